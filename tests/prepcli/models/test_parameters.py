"""The parameters of models: their rows, layers, matrices, and the patterns of recipes."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError
from prepcli.models.layer_config import (
    LayerSchedule,
    group_indices,
    layer_schedule,
    repeating_period,
)
from prepcli.models.param_tree import (
    LAYER_PARTS,
    FactoredAxes,
    MatrixAxes,
    ParamLeaf,
    factored_axes,
    is_layer_matrix,
    matches_any,
    matrix_axes,
    param_leaves,
    reduce_leaf,
    reduced_axes,
)
from prepcli.models.parameters import (
    Family,
    Parameter,
    WeightTying,
    parameter_rows,
)
from prepcli.models.registry import FAMILIES
from tests.helpers.tiny_checkpoints import ALL_CONFIGS

SIZES = {"layers": 3, "embed": 4, "mlp": 5, "vocab": 7}
FAMILY = Family(
    name="toy",
    prefix="toy.",
    unprefixed=("head",),
    sizes=lambda config: SIZES,
    parameters={
        "embed.tokens": Parameter("vocab embed <- wte: vocab embed"),
        "layers.mlp.up.weight": Parameter("layers mlp embed <- h.{layers}.up: mlp embed"),
        "layers.mlp.up.bias": Parameter("layers mlp <- h.{layers}.bias: mlp", condition="mlp_bias"),
        "layers.gain": Parameter("layers <- h.{layers}.gain:"),
        "decoder.layers.norm": Parameter("layers embed <- d.{layers}.norm: embed"),
    },
    dropped={},
    tying=WeightTying(
        head_leaf="head", head_tensor="head", embedding_tensor="wte", tied_by_default=False
    ),
    arch_config=FAMILIES["llama"].arch_config,
)


def shapes(scan: bool = True, axis: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shape of each leaf of the family."""
    table_rows = parameter_rows(FAMILY, {"mlp_bias": True}, scan, axis)
    return {path: bind_row(row, SIZES).leaf_shape for path, row in table_rows.items()}


def test_parameter_rows_stack_layers_on_scan_axis():
    assert shapes()["layers.mlp.up.weight"] == (3, 5, 4)
    assert shapes(axis=1) == {
        "embed.tokens": (7, 4),
        "layers.mlp.up.weight": (5, 3, 4),
        "layers.mlp.up.bias": (5, 3),
        # This leaf has no axis 1, so its layers stay on axis 0.
        "layers.gain": (3,),
        "decoder.layers.norm": (4, 3),
    }


def test_parameter_rows_without_scan_have_layer_paths():
    assert shapes(scan=False) == {
        "embed.tokens": (7, 4),
        "layers.{layers}.mlp.up.weight": (5, 4),
        "layers.{layers}.mlp.up.bias": (5,),
        "layers.{layers}.gain": (),
        "decoder.layers.{layers}.norm": (4,),
    }
    for path, row in parameter_rows(FAMILY, {}, scan=False).items():
        bound = bind_row(row, SIZES)
        paths = [path.format(**indices) for _, indices in bound.tensors()]
        assert len(set(paths)) == len(paths) == (3 if "layers" in path else 1)


LLAMA = FAMILIES["llama"]
SPLIT = "layers experts mlp embed <- layers.{layers}.experts.{experts}.w1.weight: mlp embed"
FUSED = "layers experts mlp embed <- layers.{layers}.experts.gate_up: experts (gate=0 mlp) embed"
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 6,
}


def sizes(_: object) -> dict[str, int]:
    return LLAMA.sizes(CONFIG) | {"experts": 3, "gate": 2}


TWO_FORMS = dataclasses.replace(
    LLAMA, sizes=sizes, parameters={"layers.mlp.gate.weight": Parameter(SPLIT, alternate=FUSED)}
)


def tensors_of(text: str) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in a row."""
    (row,) = parameter_rows(
        dataclasses.replace(TWO_FORMS, parameters={"w": Parameter(text)}), CONFIG
    ).values()
    axis_map = bind_row(row, sizes(None))
    return {name: axis_map.source_shape for name, _ in axis_map.tensors()}


@pytest.mark.parametrize("form", [SPLIT, FUSED])
def test_parameter_rows_use_form_whose_tensors_exist(form: str):
    assert (
        parameter_rows(TWO_FORMS, CONFIG, tensors=tensors_of(form))["layers.mlp.gate.weight"].text
        == form
    )


def test_parameter_rows_use_first_form_by_default():
    assert parameter_rows(TWO_FORMS, CONFIG)["layers.mlp.gate.weight"].text == SPLIT


def test_parameter_rows_reject_both_forms():
    with pytest.raises(PrepError, match="two forms"):
        parameter_rows(TWO_FORMS, CONFIG, tensors=tensors_of(SPLIT) | tensors_of(FUSED))


@given(st.lists(st.sampled_from([0, 3]), min_size=1, max_size=9))
def test_repeating_period_is_shortest_prefix(windows: list[int]):
    repeats = [
        n
        for n in range(1, len(windows) + 1)
        if [windows[i % n] for i in range(len(windows))] == windows
    ]
    assert repeating_period(windows) == min(repeats)


@pytest.mark.parametrize(
    ("kinds", "schedule"),
    [
        ("aaaa", LayerSchedule(0, 1, 4)),
        ("bbbaaaaa", LayerSchedule(3, 1, 5)),
        ("babababa", LayerSchedule(0, 2, 4)),
        ("baaaaaaaaaab", LayerSchedule(0, 11, 1)),
        ("aabaabaa", LayerSchedule(0, 3, 2)),
        ("ab", LayerSchedule(0, 2, 1)),
        ("", LayerSchedule(0, 1, 0)),
    ],
)
def test_layer_schedule_compiles_fewest_layers(kinds: str, schedule: LayerSchedule):
    assert layer_schedule(kinds) == schedule


@given(st.lists(st.sampled_from("ab"), max_size=12))
def test_layer_schedule_repeats_its_period(kinds: list[str]):
    schedule = layer_schedule(kinds)
    scanned = kinds[schedule.num_first : schedule.stop]
    assert scanned == scanned[: schedule.period] * schedule.num_periods
    assert schedule.stop <= len(kinds)


def test_group_indices_count_layers_of_each_kind():
    assert group_indices(3, {}) == ({"layers": 0}, {"layers": 1}, {"layers": 2})
    assert group_indices(4, {"dense_layers": (0, 2), "sparse_layers": (1, 3)}) == (
        {"layers": 0, "dense_layers": 0},
        {"layers": 1, "sparse_layers": 0},
        {"layers": 2, "dense_layers": 1},
        {"layers": 3, "sparse_layers": 1},
    )


def test_group_indices_allow_a_layer_in_two_groups_or_in_none():
    assert group_indices(3, {"attention_layers": (1,), "sparse_layers": (1, 2)}) == (
        {"layers": 0},
        {"layers": 1, "attention_layers": 0, "sparse_layers": 0},
        {"layers": 2, "sparse_layers": 1},
    )


# A search through all layers for each layer takes several times as long as this.
MAX_CPU_S = 2.0
MANY_LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 16000},
    "deepseek_v3": {"num_hidden_layers": 16000, "first_k_dense_replace": 8000},
}


@pytest.mark.parametrize("name", MANY_LAYERS)
def test_time_to_read_layers_is_linear(name: str):
    start = time.process_time()
    arch_config = FAMILIES[name].arch_config(MANY_LAYERS[name])
    assert len(arch_config.layer_kinds) == 16000
    assert len(arch_config.group_indices) == 16000
    assert time.process_time() - start < MAX_CPU_S


def test_time_to_count_sparse_layers_is_linear():
    start = time.process_time()
    config = MANY_LAYERS["deepseek_v3"]
    param_leaves(FAMILIES["deepseek_v3"], config, tied=False)
    assert time.process_time() - start < MAX_CPU_S


def leaf(path: str, dims: str, *shape: int) -> ParamLeaf:
    """Return a leaf with a dim per word."""
    return ParamLeaf(path, path, shape, tuple((name,) for name in dims.split()))


QUERY = leaf("layers.attn.q.weight", "layers heads head_dim embed", 3, 4, 8, 16)


@pytest.mark.parametrize(
    ("dims", "axes"),
    [
        ("vocab embed", MatrixAxes((), (0,), (1,))),
        ("layers heads head_dim embed", MatrixAxes((0,), (1, 2), (3,))),
        ("embed layers kv_heads head_dim", MatrixAxes((1,), (0,), (2, 3))),
        ("layers experts mlp embed", MatrixAxes((0, 1), (2,), (3,))),
        ("layers experts embed", MatrixAxes((0,), (1,), (2,))),
        ("layers heads head_dim", None),
        ("layers embed", None),
        ("embed", None),
    ],
)
def test_matrix_axes_group_attention_heads(dims: str, axes: MatrixAxes | None):
    assert matrix_axes(leaf("a.weight", dims, *range(2, 2 + len(dims.split())))) == axes


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=lambda config: config["model_type"])
def test_every_matrix_of_a_layer_has_two_dims(config: dict[str, Any]):
    leaves = param_leaves(FAMILIES[config["model_type"]], config, False)
    in_layers = [
        leaf
        for leaf in leaves.values()
        if leaf.role == "matrix"
        and not LAYER_PARTS.isdisjoint(leaf.path.split("."))
        # The gate of shared experts is a vector per layer.
        and not leaf.path.endswith("shared_gate.weight")
    ]
    assert in_layers
    assert all(map(is_layer_matrix, in_layers))
    assert not any(is_layer_matrix(leaf) for leaf in leaves.values() if leaf not in in_layers)


def test_factored_axes_name_the_larger_dim_first():
    assert factored_axes(QUERY, 16) == FactoredAxes((1, 2), (3,))
    assert factored_axes(QUERY, 17) is None
    assert factored_axes(leaf("a.weight", "mlp embed", 8, 8), 1) == FactoredAxes((1,), (0,))


def test_reduced_axes_reverse_reduce_leaf():
    reduced = reduce_leaf(QUERY, (1, 2))
    assert (reduced.shape, reduced.dims) == ((3, 1, 1, 16), (("layers",), (), (), ("embed",)))
    assert reduced_axes(reduced.shape, QUERY.shape) == (1, 2)
    assert reduced_axes(QUERY.shape, QUERY.shape) == ()
    assert reduced_axes((3, 4, 8), QUERY.shape) is None
    assert reduced_axes((3, 4, 8, 2), QUERY.shape) is None


def test_decay_rates_of_mamba_are_no_matrix():
    rates = leaf("layers.mixer.a_log.weight", "layers mixer_channels mixer_state", 2, 8, 4)
    assert not is_layer_matrix(rates)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("embed.tokens", "embed.tokens", True),
        ("embed", "embed.tokens", True),
        ("emb", "embed.tokens", False),
        ("layers.attn.q", "layers.7.attn.q.weight", True),
        ("layers.7", "layers.7.attn.q.weight", False),
        ("re:attn\\.[qk]", "layers.7.attn.k.weight", True),
        ("re:^attn", "layers.attn.k.weight", False),
        ("re:.", "head.weight", True),
    ],
)
def test_patterns_match_paths_without_layer_numbers(pattern: str, path: str, matches: bool):
    assert matches_any([pattern], path) is matches
    assert not matches_any([], path)
