"""Plans of drafts, their streams of rows, and the layouts of Orbax items."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from prepcli.engine.casts import Cast, LowRankUpdate
from prepcli.engine.fills import Fill
from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import FAMILIES, family_of
from prepcli.models.rules import DEFAULT_RULES
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan, Stream
from prepcli.sources.source import Source, SourceTensor, stored_rows
from prepcli.sources.tensor_match import TensorNames, Vocabulary, detect_names
from prepcli.targets.orbax_item import OrbaxLayout, Partitioning, device_nbytes
from prepcli.targets.planner import (
    Draft,
    Placed,
    TensorTarget,
    VocabResize,
    build_streams,
    make_plan,
    start_draft,
    with_rows,
)
from prepcli.targets.safetensors_folder import place_safetensors
from tests.helpers.plans import flat
from tests.helpers.tiny_checkpoints import LLAMA, checkpoint_tensors

ROWS = LLAMA["vocab_size"]
EMBEDDING = "embed_tokens.weight"
QUERY = "layers.0.self_attn.q_proj.weight"


def source_of(config: dict[str, Any], dtypes: dict[str, str] | None = None) -> Source:
    """Return a source with the tensors of a model, one after another in a file. `dtypes` replaces some dtypes."""
    family = family_of(config)
    arrays = checkpoint_tensors(config, "float32", family.is_tied(config), legacy=False)
    names = detect_names(family, config, full_names=arrays)
    tensors, offset = [], 8
    for name, array in arrays.items():
        dtype = (dtypes or {}).get(name, "float32")
        tensors.append(
            SourceTensor(
                names.bare_name(name), dtype, array.shape, (flat(dtype, array.shape, offset),)
            )
        )
        offset += tensors[-1].nbytes
    return Source("m", Path("m"), family, config, names, tuple(tensors), (), (), (), None)


def draft_of(config: dict[str, Any], dtype: str | None = None) -> Draft:
    source = source_of(config)
    return start_draft(source, stored_rows(source), dtype=dtype)


def folder_plan(draft: Draft) -> Plan:
    placed = place_safetensors(draft, 10**9)
    return make_plan(draft, placed, command="export", request="export m", name="m")


def streams_of(plan: Plan, name: str) -> list[Stream]:
    return [stream for stream in plan.streams if stream.name == name]


def test_adapter_changes_the_true_rows_only():
    draft = with_rows(draft_of(LLAMA), ROWS + 5)
    width = LLAMA["hidden_size"]
    place = (flat("bfloat16", (ROWS, width), 8, file=1),)
    whole = SourceTensor(EMBEDDING, "bfloat16", (ROWS, width), place)
    a = Stream("a", "float32", (2, width), (0, 2), (flat("float32", (2, width), file=1),), ())
    b = Stream("b", "float32", (width, 2), (0, width), (flat("float32", (width, 2), file=1),), ())
    update = LowRankUpdate(a, b, 0.5)
    plan = folder_plan(
        replace(draft, updates={QUERY: update}, replaced={EMBEDDING: whole}, digested=(a, b))
    )
    true_rows, new_rows = streams_of(plan, EMBEDDING)
    assert (true_rows.dtype, true_rows.operations) == ("bfloat16", (Cast("float32"),))
    assert (true_rows.reads, new_rows.reads) == (whole.placement, ())
    assert [stream.operations for stream in streams_of(plan, QUERY)] == [(update, Cast("float32"))]
    assert plan.streams[:2] == (a, b)


def test_settings_have_the_order_of_earlier_versions():
    """The digest of a plan depends on it, and finished outputs record the digest."""
    draft = replace(draft_of(LLAMA), settings=Manifest(added_tokens=None))
    folder = ["name", "kind", "family", "vocab", "prefixed", "tied", "config", "added_tokens"]
    assert list(folder_plan(draft).settings) == folder
    partitioning = Partitioning(parse_mesh("1,2,1"), DEFAULT_RULES)
    placed = OrbaxLayout(partitioning).place(draft)
    plan = make_plan(draft, placed, command="save-init", request="save-init m", name="m")
    layout = ["layout", "mesh", "rules", "scan", "scan_axis", "prefixed", "tied", "config"]
    assert list(plan.settings) == [*folder[:4], *layout, "added_tokens"]
    assert sum(math.prod(leaf.grid.shape) for leaf in plan.leaves) * 4 == plan.write_nbytes


FAMILY = FAMILIES["gpt_neo"]
MEAN = Fill("mean")


def source_with(*tensors: SourceTensor) -> Source:
    return Source("s", Path("s"), FAMILY, {}, TensorNames(FAMILY), tensors, (), (), (), None)


def tensor(name: str, *shape: int, digests: tuple[tuple[int, int, str], ...] = ()) -> SourceTensor:
    return SourceTensor(name, "float32", shape, (flat("float32", shape, 8),), digests)


def cut(true: int, stored: int, *names: str) -> VocabResize:
    return VocabResize(Vocabulary(true, stored), names or ("wte", "head", "bias"), MEAN)


def to(rows: int) -> TensorTarget:
    return TensorTarget((flat("float32", (rows,)),), rows)


def test_build_streams_splits_tensors_read_for_comparison():
    # `head` is read only to be compared with `wte`. The output drops rows 9 to 12, the padding.
    source = source_with(tensor("wte", 12, 4), tensor("head", 12, 4))
    streams = build_streams(source, {"wte": to(9)}, resize=cut(9, 12), compared={"head"})
    assert [(stream.name, stream.rows, bool(stream.writes)) for stream in streams] == [
        ("wte", (0, 9), True),
        ("head", (0, 9), False),
        ("head", (9, 12), False),
    ]


@given(
    st.integers(1, 20),
    st.integers(0, 6),
    st.integers(0, 12),
    st.lists(st.integers(0, 30), max_size=3),
)
def test_build_streams_covers_all_rows_without_gaps(
    true: int, padding: int, more: int, edges: list[int]
):
    stored, rows = true + padding, true + more
    starts = [0, *sorted(low for low in edges if low <= stored)]
    pieces = tuple((low, high, "") for low, high in itertools.pairwise([*starts, stored]))
    streams = build_streams(
        source_with(tensor("wte", stored, 4, digests=pieces)),
        {"wte": to(rows)},
        resize=cut(true, stored),
    )
    assert [streams[0].rows, streams[-1].rows[1]] == [(0, true), rows]
    assert all(a.rows[1] == b.rows[0] for a, b in itertools.pairwise(streams))
    assert all(low < high for low, high in (stream.rows for stream in streams))
    assert all(bool(stream.reads) == (stream.rows[1] <= stored) for stream in streams)


def item_of(
    source: Source, mesh: str = "", scan: bool = True, vocab: int = 131, axis: int = 0
) -> Placed:
    """Return the item of a source with `vocab` rows of the vocabulary."""
    partitioning = Partitioning(parse_mesh(mesh) if mesh else None, DEFAULT_RULES)
    layout = OrbaxLayout(partitioning, scan=scan, scan_axis=axis)
    draft = start_draft(source, layout.rows(source))
    return layout.place(with_rows(draft, vocab))


def test_device_nbytes_follows_the_mesh():
    source = source_of(LLAMA)
    total_nbytes = sum(t.nbytes for t in source.tensors)
    assert device_nbytes(item_of(source, "1,1,1")) == total_nbytes
    assert device_nbytes(item_of(source, "8,1,1")) == total_nbytes
    split = item_of(source, "1,2,4", vocab=136)
    parts = {name: math.prod(spec.shards_per_dim) for name, spec in split.specs.items()}
    assert (
        device_nbytes(split)
        == sum(leaf.nbytes // parts[leaf.name] for leaf in split.leaves)
        < total_nbytes // 4
    )
    assert item_of(source, "").specs == {}


def test_place_rejects_a_mesh_that_does_not_divide():
    with pytest.raises(PrepError, match="vocab") as caught:
        item_of(source_of(LLAMA), "1,1,4")
    assert caught.value.code == USAGE
    assert "m" in str(caught.value)


def test_place_rejects_a_leaf_of_two_dtypes():
    source = source_of(LLAMA, {"model.layers.1.mlp.up_proj.weight": "bfloat16"})
    with pytest.raises(
        PrepError, match=r"the leaf params\.layers\.mlp\.up\.weight would have two dtypes"
    ) as caught:
        item_of(source)
    assert caught.value.why == (
        "model.layers.1.mlp.up_proj.weight is bfloat16, model.layers.0.mlp.up_proj.weight is float32"
    )
    assert "--no-scan" in caught.value.hint
    dtypes = {leaf.name: leaf.dtype for leaf in item_of(source, scan=False).leaves}
    assert [dtypes[f"params.layers.{i}.mlp.up.weight"] for i in range(3)] == [
        "float32",
        "bfloat16",
        "float32",
    ]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_place_names_the_integer_tensor_of_a_leaf(layer: int):
    odd = f"model.layers.{layer}.mlp.up_proj.weight"
    with pytest.raises(PrepError, match="would have two dtypes") as caught:
        item_of(source_of(LLAMA, {odd: "int32"}))
    assert caught.value.why.startswith(f"{odd} is int32, ")
    assert odd in caught.value.hint


def test_place_rejects_elements_smaller_than_a_byte():
    source = source_of(LLAMA, {"model.norm.weight": "float4_e2m1fn"})
    with pytest.raises(PrepError, match=r"model\.norm\.weight is float4_e2m1fn") as caught:
        item_of(source)
    assert "smaller than a byte" in caught.value.why
