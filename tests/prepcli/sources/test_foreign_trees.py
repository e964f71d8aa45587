"""Tests of trees of other libraries: detection of the layout, and the tensors of each leaf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError
from prepcli.models.parameters import Family, parameter_rows
from prepcli.models.registry import FAMILIES
from prepcli.planning.arrays import MappedArray, whole_array
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.foreign_trees import Array, ForeignTree, TreeFormat, match_foreign_tree

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
