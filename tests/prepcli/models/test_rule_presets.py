"""Presets of partition rules, compared with the tables of flaxlm and t5x."""

from __future__ import annotations

import pytest

from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import activation_spec, num_batch_shards, partition_spec
from prepcli.models.rules import PRESETS

MESH = parse_mesh("2,4,8")
WEIGHTS = {
    "embedding": ("vocab", "embed"),
    "query": ("heads", "head_dim", "embed"),
    "up": ("mlp", "embed"),
    "norm": ("embed",),
}
ACTIVATIONS = {
    "residual": ("batch", "residual_seq", "embed"),
    "input": ("batch", "seq", "embed"),
    "heads": ("batch", "seq", "heads", "head_dim"),
    "hidden": ("batch", "seq", "mlp"),
    "logits": ("batch", "seq", "vocab"),
}
ROWS, DATA = "P((dp, fsdp), ", "P((dp, fsdp), None, "
REPLICATED = {"residual": f"{DATA}None)", "input": f"{DATA}None)"}
TENSOR = {"hidden": f"{DATA}mp)", "logits": f"{DATA}mp)"}
HEADS, WHOLE_HEADS = f"{DATA}mp, None)", f"{DATA}None, None)"
ONE_DIM = {**REPLICATED, **TENSOR, "heads": HEADS}
TWO_DIMS = {**TENSOR, "residual": f"{DATA}mp)", "input": f"{DATA}mp)", "heads": HEADS}
NO_TENSOR = {**REPLICATED, "hidden": f"{DATA}None)", "logits": f"{DATA}None)", "heads": WHOLE_HEADS}
WHOLE_WEIGHTS = ("P(None, None)", "P(None, None, None)", "P(None, None)", "P(None)")
SPLIT_WEIGHTS = ("P(mp, None)", "P(mp, None, None)", "P(mp, None)")
FULLY_SPLIT_WEIGHTS = ("P(mp, fsdp)", "P(mp, None, fsdp)", "P(mp, fsdp)")
TABLE = {
    "flaxlm:0,0": (
        WHOLE_WEIGHTS,
        {name: text.replace("(dp, fsdp)", "None") for name, text in NO_TENSOR.items()},
    ),
    "flaxlm:1,0": (WHOLE_WEIGHTS, NO_TENSOR),
    "flaxlm:1,1": ((*SPLIT_WEIGHTS, "P(None)"), {**ONE_DIM, "heads": WHOLE_HEADS}),
    "flaxlm:2,1": ((*SPLIT_WEIGHTS, "P(mp)"), TWO_DIMS),
    "flaxlm:1,2": ((*FULLY_SPLIT_WEIGHTS, "P(fsdp)"), ONE_DIM),
    "flaxlm:2,2": ((*FULLY_SPLIT_WEIGHTS, "P(mp)"), TWO_DIMS),
    "t5x:1,1": ((*SPLIT_WEIGHTS, "P(None)"), ONE_DIM),
    "t5x:2,1": ((*SPLIT_WEIGHTS, "P(mp)"), TWO_DIMS),
    "t5x:1,2": ((*FULLY_SPLIT_WEIGHTS, "P(fsdp)"), ONE_DIM),
    "t5x:2,2": ((*FULLY_SPLIT_WEIGHTS, "P(mp)"), TWO_DIMS),
}


def test_table_has_all_pairs():
    assert {*PRESETS} == {*TABLE, "auto"}


@pytest.mark.parametrize("name", TABLE)
def test_preset_splits_weights_and_activations_as_in_table(name: str):
    rules, (weights, activations) = PRESETS[name], TABLE[name]
    specs = [
        partition_spec([(dim,) for dim in dims], (64,) * len(dims), MESH, rules.params)
        for dims in WEIGHTS.values()
    ]
    assert tuple(map(str, specs)) == weights
    shapes = {name: (64,) * len(dims) for name, dims in ACTIVATIONS.items()}
    texts = {
        name: str(activation_spec(shapes[name], dims, MESH, rules))
        for name, dims in ACTIVATIONS.items()
    }
    assert texts == activations
    assert num_batch_shards(MESH, rules) == (1 if name == "flaxlm:0,0" else 8)


@pytest.mark.parametrize("name", TABLE)
def test_preset_keeps_indivisible_kv_heads_whole(name: str):
    spec = partition_spec(
        [("kv_heads",), ("head_dim",), ("embed",)], (2, 64, 64), MESH, PRESETS[name].params
    )
    assert spec.mesh_axes[0] == ()


def test_auto_splits_activations_where_the_mesh_divides_them():
    rules = PRESETS["auto"]
    specs = [
        activation_spec((8, 16, heads, 64), ACTIVATIONS["heads"], MESH, rules) for heads in (8, 6)
    ]
    assert [str(spec) for spec in specs] == [HEADS, WHOLE_HEADS]
    assert (
        str(activation_spec((8, 16, 64), ACTIVATIONS["residual"], MESH, rules))
        == f"{ROWS}mp, None)"
    )
