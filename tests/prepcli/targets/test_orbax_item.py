"""Layout of an Orbax item: leaves, chunks and files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import family_of
from prepcli.models.rules import DEFAULT_RULES
from prepcli.sources.source import Source, SourceTensor
from prepcli.sources.tensor_match import detect_names
from prepcli.targets.orbax_item import OrbaxLayout, Partitioning, device_nbytes
from prepcli.targets.planner import Placed, start_draft, with_rows
from tests.helpers.plans import flat
from tests.helpers.tiny_checkpoints import GPT2, GPT_NEO, LLAMA, checkpoint_tensors


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


def item_of(
    source: Source, mesh: str = "", scan: bool = True, vocab: int = 131, axis: int = 0
) -> Placed:
    """Return the item of a source with `vocab` rows of the vocabulary."""
    partitioning = Partitioning(parse_mesh(mesh) if mesh else None, DEFAULT_RULES)
    layout = OrbaxLayout(partitioning, scan=scan, scan_axis=axis)
    draft = start_draft(source, layout.rows(source))
    return layout.place(with_rows(draft, vocab))


@pytest.mark.parametrize("mesh", ["", "1,2,4", "1,1,1"])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("config", [GPT2, GPT_NEO, LLAMA], ids=["gpt2", "gpt_neo", "llama"])
def test_place_maps_every_tensor_to_a_leaf(config: dict[str, Any], scan: bool, mesh: str):
    source = source_of(config)
    item = item_of(source, mesh, scan, vocab=136)
    assert item.locations.keys() == {t.name for t in source.tensors}
    added = sum(t.nbytes // 131 * 5 for t in source.tensors if t.shape[0] == 131)
    assert sum(leaf.nbytes for leaf in item.leaves) == sum(t.nbytes for t in source.tensors) + added
    for leaf in item.leaves:
        assert all(
            extent % chunk == 0 for extent, chunk in zip(leaf.grid.shape, leaf.grid.chunk_shape)
        )
        assert sum(len(list(box.indices())) for box in leaf.placed_chunks) == math.prod(
            leaf.grid.chunk_counts
        )
    names = {leaf.name for leaf in item.leaves}
    assert ("params.layers.attn.q.weight" in names) == scan
    assert ("params.layers.2.attn.q.weight" in names) != scan


def test_place_stacks_layers_on_the_second_axis():
    (q,) = [
        leaf
        for leaf in item_of(source_of(LLAMA), axis=1).leaves
        if leaf.name == "params.layers.attn.q.weight"
    ]
    assert q.grid.shape == (8, 3, 4, 32)
    assert q.grid.chunk_shape[1] == 1


def test_place_names_data_files_deterministically():
    first, second = (
        item_of(source_of(LLAMA), "1,2,4", vocab=136),
        item_of(source_of(LLAMA), "1,2,4", vocab=136),
    )
    assert first == second
    assert all(
        len(Path(file.path).name) == 32 and file.path.startswith("d/") for file in first.files
    )
    assert len({file.path for file in first.files}) == len(first.files)


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


def test_place_keeps_dtypes_per_leaf():
    norms = {f"model.layers.{i}.input_layernorm.weight": "bfloat16" for i in range(3)}
    dtypes = {leaf.name: leaf.dtype for leaf in item_of(source_of(LLAMA, norms)).leaves}
    assert dtypes.pop("params.layers.attn_norm.scale") == "bfloat16"
    assert set(dtypes.values()) == {"float32"}


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


def test_chunks_have_the_page_offset_of_their_tensor():
    source = source_of(LLAMA)
    item = item_of(source)
    plain = next(t for t in source.tensors if t.name == "layers.1.self_attn.q_proj.weight")
    (region,) = item.locations[plain.name]
    (flat,) = plain.placement
    assert flat.is_contiguous
    assert (region.array.offset - flat.array.offset) % 4096 == 0


def test_chunks_copied_from_an_item_begin_at_pages():
    source = source_of(LLAMA)
    item = item_of(source)
    stored = replace(
        source, tensors=tuple(replace(t, placement=item.locations[t.name]) for t in source.tensors)
    )
    again = item_of(stored)
    assert all(box.chunks.offset % 4096 == 0 for leaf in again.leaves for box in leaf.placed_chunks)
