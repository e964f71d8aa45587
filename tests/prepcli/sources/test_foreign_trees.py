"""Trees of other libraries: detection of the layout, the tensors of each leaf, boxes of ranks, and fuzzed files."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.grids import ArrayPart, ArrayParts
from prepcli.algebra.rows import parse_row
from prepcli.core.errors import PrepError
from prepcli.engine.blobs import open_blobs
from prepcli.formats.msgpack import read_flax_files
from prepcli.models.parameters import Family, parameter_rows
from prepcli.models.registry import FAMILIES
from prepcli.planning.arrays import Array, MappedArray, parted_array, whole_array
from prepcli.planning.libraries import TORCHTITAN
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.tensors import is_leaf_path
from prepcli.sources.foreign_trees import ForeignTree, TreeFormat, match_foreign_tree
from prepcli.sources.locate import locate
from prepcli.sources.openers.tensor_files import match_dcp_tree
from prepcli.sources.opening import open_source
from prepcli.sources.references import EASYLM_PARTS, split_part
from prepcli.sources.source import match_source_tensors, source_rows, stored_tensor
from prepcli.sources.state_rows import (
    PathLeaf,
    find_state_leaves,
    index_state_tensors,
    shape_in_leaf,
    state_axis_map,
)
from prepcli.sources.tensor_match import DEFAULT_MATCH_OPTIONS, TensorMatch
from tests.helpers.golden_flax import FILES, FOLDER, decode_msgpack
from tests.helpers.golden_flax import LLAMA as FLAX_LLAMA
from tests.helpers.memory_stores import store_of
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_arrays import read_tensor, tensor_bytes
from tests.prepcli.formats.test_msgpack import fuzzed_file

LLAMA = FAMILIES["llama"]
GPT_NEO = FAMILIES["gpt_neo"]
CONFIG: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 9,
}
FORMATS = {
    "hf-flax": (LLAMA, TreeFormat("hf-flax", "")),
    "hf-flax variables": (LLAMA, TreeFormat("hf-flax", "params.")),
    "hf-flax without prefix": (
        LLAMA,
        TreeFormat("hf-flax", "", None, has_prefix=False),
    ),
    "neo": (GPT_NEO, TreeFormat("hf-flax", "")),
    "neo without prefix": (
        GPT_NEO,
        TreeFormat("hf-flax", "params.params.", None, has_prefix=False),
    ),
    "easylm": (LLAMA, TreeFormat("easylm", "")),
    "easylm in a training state": (LLAMA, TreeFormat("easylm", "params.params.")),
    "easylm stacked": (LLAMA, TreeFormat("easylm", "params.", 0)),
    "easylm stacked on axis 1": (LLAMA, TreeFormat("easylm", "", 1)),
}


def make_leaf(*shape: int) -> Array:
    return whole_array("leaf", "float32", shape, (0, 0))


def leaves_of(
    family: Family, tree_format: TreeFormat, config: Mapping[str, Any] = CONFIG
) -> dict[str, Array]:
    """Return the leaves of a tree of this format."""
    axis_maps = {
        path: bind_row(row, family.sizes(config))
        for path, row in tree_format.rows(family, config).items()
    }
    return {
        tree_format.root + axis_map.leaf_path(path, indices): make_leaf(*axis_map.leaf_shape)
        for path, axis_map in axis_maps.items()
        for _, indices in axis_map.tensors()
    }


def native_shapes(family: Family, config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the native layout, by name."""
    axis_maps = (
        bind_row(row, family.sizes(config)) for row in parameter_rows(family, config).values()
    )
    return {name: axis_map.source_shape for axis_map in axis_maps for name, _ in axis_map.tensors()}


@pytest.mark.parametrize("name", FORMATS)
def test_match_detects_format_and_tensors(name: str):
    family, tree_format = FORMATS[name]
    tree = match_foreign_tree(leaves_of(family, tree_format), family, CONFIG, "m")
    assert tree.format == tree_format
    assert {tensor.name: tensor.shape for tensor in tree.tensors} == native_shapes(family)
    assert tree.names.is_prefixed == tree_format.has_prefix
    assert tree.extra_entries == ()
    for tensor in tree.tensors:
        (region,) = tensor.placement
        assert isinstance(region, MappedArray)
        assert region.axis_map.source_shape == tensor.shape


# Classes without a leaf for an untied head: they multiply by the embedding.
HEADLESS = {
    *(("tunix", name) for name in ("gemma", "gemma2", "gemma3_text")),
    *(("maxtext", name) for name in ("gemma2", "gemma3_text")),
    *(("maxtext-unscanned", name) for name in ("gemma2", "gemma3_text")),
    ("levanter", "gpt2"),
}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.layouts])
def test_layout_contains_each_tensor_once(name: str):
    family = FAMILIES[name]
    # MaxText has pairs of layers, and DeepSeek-V3 dense and sparse ones.
    config = CONFIG | {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    for layout in family.layouts:
        leaves = leaves_of(family, TreeFormat(layout, ""), config).values()
        shapes = native_shapes(family, config)
        if (layout, name) in HEADLESS:
            del shapes[family.tying.head_tensor]
        assert sum(math.prod(leaf.shape) for leaf in leaves) == sum(
            math.prod(shape) for shape in shapes.values()
        )


def test_match_accepts_boxed_leaves_and_path_aliases():
    leaves = leaves_of(LLAMA, TreeFormat("easylm", ""))
    leaves["lm_head.lm_head.kernel"] = leaves.pop("lm_head.kernel")
    tree = match_foreign_tree(
        {f"{name}.value": leaf for name, leaf in leaves.items()}, LLAMA, CONFIG, "m"
    )
    assert {tensor.name for tensor in tree.tensors} == native_shapes(LLAMA).keys()


def test_match_keeps_unknown_and_allows_missing_leaves():
    leaves = leaves_of(GPT_NEO, TreeFormat("hf-flax", ""))
    del leaves["transformer.h.1.ln_1.bias"]
    leaves |= {"transformer.h.0.extra": make_leaf(2), "other": make_leaf(0, 3)}
    tree = match_foreign_tree(leaves, GPT_NEO, CONFIG, "m")
    names = {tensor.name for tensor in tree.tensors}
    assert native_shapes(GPT_NEO).keys() - names == {"h.1.ln_1.bias"}
    assert names - native_shapes(GPT_NEO).keys() == {"h.0.extra", "other"}
    assert [tree.names.display_name(name) for name in ("h.0.extra", "other")] == [
        "transformer.h.0.extra",
        "other",
    ]


def test_match_lists_extra_entries():
    leaves = leaves_of(LLAMA, TreeFormat("easylm", "params.params."))
    leaves |= {
        "step": make_leaf(),
        "opt_state.0.mu.x": make_leaf(3),
        "opt_state.0.nu.x": make_leaf(4),
    }
    tree = match_foreign_tree(leaves, LLAMA, CONFIG, "m")
    assert [(entry.name, entry.nbytes, entry.rule) for entry in tree.extra_entries] == [
        ("step", 4, "training state"),
        ("opt_state", 28, "optimizer state"),
    ]


INVALID_LEAVES = {
    "no layout": ({"a.b": make_leaf(2)}, "has no known layout"),
    "nothing": ({}, "has no known layout"),
    "a leaf of another shape": (
        {"transformer.wte.embedding": make_leaf(11, 9)},
        "has the wrong shape",
    ),
    "a leaf in two spellings": (
        {"lm_head.kernel": make_leaf(8, 11), "lm_head.lm_head.kernel": make_leaf(8, 11)},
        "a leaf twice",
    ),
    "a leaf that is boxed and not": (
        {"lm_head.kernel": make_leaf(8, 11), "lm_head.kernel.value": make_leaf(8, 11)},
        "a leaf twice",
    ),
    "a name that a tensor has": ({"norm.weight": make_leaf(8)}, "a tensor twice"),
}


@pytest.mark.parametrize("name", INVALID_LEAVES)
def test_match_rejects_invalid_leaves(name: str):
    changed, what = INVALID_LEAVES[name]
    known = (
        leaves_of(LLAMA, TreeFormat("easylm", "")) if what not in ("has no known layout",) else {}
    )
    with pytest.raises(PrepError) as caught:
        match_foreign_tree(known | changed, LLAMA, CONFIG, "m")
    assert what in caught.value.what


def test_unknown_layout_error_lists_supported_layouts():
    with pytest.raises(PrepError) as caught:
        match_foreign_tree({"blk.w": make_leaf(2)}, LLAMA, CONFIG, "m")
    assert caught.value.why == "found blk.w, which are not the leaves of a llama"
    assert "native (layers.0." in caught.value.hint
    assert "easylm (transformer.h.0." in caught.value.hint
    assert "below no root or params or params.params" in caught.value.hint


@pytest.mark.parametrize("layer_axis", [None, 0])
def test_match_limits_the_number_of_layers(layer_axis: int | None):
    leaves = leaves_of(LLAMA, TreeFormat("easylm", "", layer_axis))
    with pytest.raises(PrepError) as caught:
        match_foreign_tree(leaves, LLAMA, {**CONFIG, "num_hidden_layers": 50_000}, "m")
    assert "50,000 layers" in caught.value.why


def test_match_rejects_a_family_without_layouts():
    toy = Family("toy", "", (), GPT_NEO.sizes, {}, {}, GPT_NEO.tying, GPT_NEO.arch_config)
    with pytest.raises(PrepError, match="has no known layout"):
        match_foreign_tree({"a": make_leaf(2)}, toy, CONFIG, "m")


MIXTRAL = FAMILIES["mixtral"]
MIXTRAL_CONFIG = CONFIG | {"num_local_experts": 2}
FUSED_TENSOR = "layers.0.mlp.experts.gate_up_proj"


def match_fused_experts(leaves: Mapping[str, Array]) -> ForeignTree:
    """Match a tree that prep wrote from a model with fused experts."""
    manifest = Manifest(prefixed=True, tensors={f"model.{FUSED_TENSOR}": {"digests": []}})
    return match_foreign_tree(leaves, MIXTRAL, MIXTRAL_CONFIG, "tree", manifest=manifest)


def test_recorded_names_select_fused_experts():
    leaves = leaves_of(MIXTRAL, TreeFormat("levanter", "", 0), MIXTRAL_CONFIG)
    tensors = {tensor.name: tensor for tensor in match_fused_experts(leaves).tensors}
    # Gate and up are two leaves.
    assert len(tensors[FUSED_TENSOR].placement) == 2
    assert "layers.0.block_sparse_moe.experts.0.w1.weight" not in tensors


def test_half_of_fused_experts_is_a_missing_tensor():
    leaves = leaves_of(MIXTRAL, TreeFormat("levanter", "", 0), MIXTRAL_CONFIG)
    up = "transformer.layers.stacked.block_sparse_moe.experts.w3.weight"
    del leaves[up]
    tree = match_fused_experts(leaves)
    assert FUSED_TENSOR not in {tensor.name for tensor in tree.tensors}
    assert tree.names.missing_leaves[FUSED_TENSOR] == up


def test_recorded_names_without_prefix_are_kept():
    leaves = leaves_of(LLAMA, TreeFormat("tunix", ""))
    manifest = Manifest(prefixed=False, tensors={})
    tree = match_foreign_tree(leaves, LLAMA, CONFIG, "tree", manifest=manifest)
    assert tree.names.full_name("norm.weight") == "norm.weight"


SIZES = {"layers": 3, "heads": 4, "head_dim": 8, "embed": 16}
STACKED = bind_row(
    parse_row("layers heads head_dim embed <- h.{layers}.q: (heads head_dim) embed"), SIZES
)
MIDDLE = bind_row(
    parse_row("heads layers head_dim embed <- h.{layers}.q: (heads head_dim) embed"), SIZES
)
APART = bind_row(parse_row("heads head_dim embed <- h.{layers}.q: (heads head_dim) embed"), SIZES)
PARAMETERS = {"layers.q": (3, 4, 8, 16), "head": (5, 16)}


def test_find_state_leaves_finds_leaves_outside_of_slots():
    state = {
        "opt_state.mu.layers.q": (3, 4, 8, 16),
        "opt_state.row.layers.q": (3, 4, 8, 1),
        "opt_state.full.layers.q": (3, 4, 8, 16),
        "opt_state.full.head": (5, 16),
        "opt_state.other.head": (5,),
        "opt_state.count": (),
        "ema.head": (5, 16),
    }
    found = list(find_state_leaves(state, PARAMETERS, ["opt_state.full"]))
    assert found == [
        PathLeaf("opt_state.mu.layers.q", "opt_state.mu", "layers.q"),
        PathLeaf("opt_state.row.layers.q", "opt_state.row", "layers.q"),
    ]


@pytest.mark.parametrize(
    ("row", "path", "shape"),
    [
        (STACKED, "layers.q", (3, 4, 8, 1)),
        (MIDDLE, "layers.q", (4, 3, 8, 1)),
        (APART, "layers.1.q", (4, 8, 1)),
    ],
)
def test_tensors_do_not_depend_on_the_stacking(row, path: str, shape: tuple[int, ...]):
    axis_map = state_axis_map(path, row, shape)
    tensors = {name: tuple(indices.items()) for name, indices in axis_map.tensors()}
    assert axis_map.leaf_shape == shape
    assert axis_map.source_shape == (4, 8, 1)
    assert tensors["/layers.1.q"] == (() if row is APART else (("layers", 1),))
    assert all(map(is_leaf_path, tensors))
    assert shape_in_leaf(row, (4, 8, 1)) == shape


@pytest.mark.parametrize(("row", "path"), [(STACKED, "layers.q"), (APART, "layers.{layers}.q")])
def test_index_state_tensors_finds_the_leaf_of_each_tensor(row, path: str):
    index = index_state_tensors({path: row})
    assert index.keys() == {f"/layers.{layer}.q" for layer in range(3)}
    assert index["/layers.2.q"] == (
        path.format(layers=2),
        row,
        (("layers", 2),) if row is STACKED else (),
    )


SMALL_CONFIG: dict[str, Any] = {
    "vocab_size": 6,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}


def embedding_in_boxes(*starts: int) -> Array:
    """Return an embedding [6, 8] in boxes that begin at these rows, each in a file of its own."""
    parts: list[ArrayPart] = []
    for file, (start, stop) in enumerate(zip(starts, (*starts[1:], 6))):
        parts.append(ArrayPart(((start, stop), (0, 8)), file, 32 * start, (32, 4)))
    return parted_array("tok_embeddings.weight", "float32", (6, 8), ArrayParts(tuple(parts)))


@pytest.mark.parametrize("starts", [(0, 4), (0, 2), (0, 1, 2), (0, 3, 5)])
def test_boxes_of_ranks_are_parts_of_a_tensor(starts: tuple[int, ...]):
    tensors: list[Array] = []
    for path, row in LLAMA.layouts["torchtitan"].parameters.items():
        shape = bind_row(parse_row(row.row), LLAMA.sizes(SMALL_CONFIG)).leaf_shape
        tensors.append(whole_array(path.format(layers=0), "float32", shape, (0, 0)))
    tensors[0] = embedding_in_boxes(*starts)
    tree = match_dcp_tree(tensors, LLAMA, SMALL_CONFIG, "step-3", library=TORCHTITAN)
    embedding = next(tensor for tensor in tree.tensors if tensor.name == "embed_tokens.weight")
    values = np.arange(48, dtype=np.float32).reshape(6, 8)
    assert np.array_equal(
        read_tensor(embedding.placement[0], values, [values.tobytes()] * len(starts)), values
    )


FLAX_CONFIG: dict[str, Any] = json.loads((FLAX_LLAMA / "hf/config.json").read_text())
VALUES = (0, 1, 3, 10**12, -1, None, True, "x", [], {}, 1.5)


def opens_fuzzed_file(folder: Path, seed: int) -> bool:
    """Open a fuzzed file, or a valid file with a wrong config, and return False if a PrepError was raised."""
    rng = random.Random(seed)
    config = dict(FLAX_CONFIG)
    data, kind = fuzzed_file(seed)
    if seed % 4 == 0:
        name = rng.choice(sorted(FILES))
        data, kind = (FOLDER / name).read_bytes(), FILES[name]
        config[rng.choice(sorted(config))] = rng.choice(VALUES)
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / ("streaming_params" if kind == "easylm" else "params.msgpack")
    path.write_bytes(data)
    try:
        prefix = rng.choice(["", *(f"{part}::" for part in EASYLM_PARTS)])
        source = open_source(locate(f"{prefix}{path if seed % 2 else folder}"))
        match_source_tensors(source, source_rows(source), DEFAULT_MATCH_OPTIONS)
    except PrepError:
        return False
    finally:
        path.unlink()
    return True


@pytest.mark.parametrize("part", slow_except(range(6), (0,)))
def test_fuzzed_file_opens_or_raises_prep_error(tmp_path: Path, part: int):
    num_opened = sum(
        opens_fuzzed_file(tmp_path, seed) for seed in range(part * 150, part * 150 + 150)
    )
    assert 0 < num_opened < 150


def match_file(path: Path) -> TensorMatch:
    source = open_source(locate(str(path)))
    return match_source_tensors(source, source_rows(source), DEFAULT_MATCH_OPTIONS)


def test_truncated_stream_is_rejected(tmp_path: Path):
    unpacker = msgpack.Unpacker()
    unpacker.feed((FLAX_LLAMA / "streaming_params").read_bytes())
    records = [msgpack.packb(record) or b"" for record in unpacker]
    shutil.copy(FLAX_LLAMA / "hf/config.json", tmp_path)
    for count in range(len(records)):
        (tmp_path / "streaming_params").write_bytes(b"".join(records[:count]))
        with pytest.raises(PrepError):
            match_file(tmp_path)


def test_arrays_in_pieces_are_read_from_their_file():
    source = open_source(locate(str(FLAX_LLAMA / "pieces.msgpack")), FLAX_LLAMA / "hf")
    assert source.byte_sources == source.files
    in_parts = [t for t in source.tensors if isinstance(t.placement[0].array.chunks, ArrayParts)]
    assert {t.name for t in in_parts} == {t.name for t in source.tensors if t.nbytes > 600}


def test_arrays_in_pieces_are_read_from_a_store():
    data = (FLAX_LLAMA / "pieces.msgpack").read_bytes()
    values = {".".join(path): value for path, value in decode_msgpack(data, "flax").items()}
    root, _ = store_of({"flax_model.msgpack": data})
    folder = read_flax_files(root, "flax")
    assert any(isinstance(array.chunks, ArrayParts) for array in folder.tensors)
    with open_blobs(folder.files) as files:
        for array in folder.tensors:
            content = tensor_bytes(files, stored_tensor(array))
            assert content == values.pop(array.name).tobytes()
    assert not values


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("params::/a/b", ("params", "/a/b")),
        ("trainstate_params::x", ("trainstate_params", "x")),
        ("flax::x", ("", "flax::x")),
        ("./params", ("", "./params")),
        ("params::", ("params", "")),
        ("x::params::y", ("", "x::params::y")),
    ],
)
def test_split_part_returns_known_part_and_path(name: str, expected: tuple[str, str]):
    assert split_part(name) == expected
