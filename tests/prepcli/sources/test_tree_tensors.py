"""Trees of other libraries: which layout leaves have, and what each of them holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from prepcli.errors import PrepError
from prepcli.planning.grids import StridedPlacement
from prepcli.planning.strided_copies import Region
from prepcli.sources.tree_tensors import StoredLeaf, TreeFormat, match_foreign_tree
from trainer.models.axis_map import bind_row
from trainer.models.families.gpt_neo import FAMILY as GPT_NEO
from trainer.models.families.llama import FAMILY as LLAMA
from trainer.models.parameters import Family, parameter_rows
from trainer.models.registry import FAMILIES

CONFIG: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "num_attention_heads": 2,
    "num_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 9,
}
FORMS = {
    "hf-flax": (LLAMA, TreeFormat("hf-flax", "")),
    "hf-flax variables": (LLAMA, TreeFormat("hf-flax", "params.")),
    "hf-flax without prefix": (LLAMA, TreeFormat("hf-flax", "", None, has_prefix=False)),
    "neo": (GPT_NEO, TreeFormat("hf-flax", "")),
    "neo without prefix": (GPT_NEO, TreeFormat("hf-flax", "params.params.", None, has_prefix=False)),
    "easylm": (LLAMA, TreeFormat("easylm", "")),
    "easylm in a training state": (LLAMA, TreeFormat("easylm", "params.params.")),
    "easylm stacked": (LLAMA, TreeFormat("easylm", "params.", 0)),
    "easylm stacked on axis 1": (LLAMA, TreeFormat("easylm", "", 1)),
}


def leaf(*shape: int) -> StoredLeaf:
    return StoredLeaf(
        shape, "float32", tuple(max(1, n) for n in shape), lambda want: StridedPlacement(0, 0, (0,) * len(shape), shape)
    )


def leaves_of(family: Family, form: TreeFormat, config: Mapping[str, Any] = CONFIG) -> dict[str, StoredLeaf]:
    """The leaves that a tree of this form has."""
    bound = {path: bind_row(row, family.sizes(config)) for path, row in form.rows(family, config).items()}
    return {
        form.root + path.format(**at): leaf(*row.leaf_shape) for path, row in bound.items() for _, at in row.tensors()
    }


def wanted_of(family: Family) -> dict[str, tuple[int, ...]]:
    """The tensors that the native table takes."""
    bound = (bind_row(row, family.sizes(CONFIG)) for row in parameter_rows(family, CONFIG).values())
    return {name: row.source_shape for row in bound for name, _ in row.tensors()}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_found_and_every_tensor_with_it(name: str):
    family, form = FORMS[name]
    found = match_foreign_tree(leaves_of(family, form), family, CONFIG, "m")
    assert found.format == form
    assert {tensor.name: tensor.shape for tensor in found.tensors} == wanted_of(family)
    assert found.names.is_prefixed == form.has_prefix
    assert found.extra_entries == ()
    for tensor in found.tensors:
        (part,) = tensor.placement
        assert isinstance(part, Region)
        assert part.axis_map.source_shape == tensor.shape


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.layouts])
def test_each_layout_has_each_tensor_once(name: str):
    family = FAMILIES[name]
    for layout in family.layouts:
        held = leaves_of(family, TreeFormat(layout, "")).values()
        assert sum(math.prod(each.shape) for each in held) == sum(
            math.prod(shape) for shape in wanted_of(family).values()
        )


def test_boxed_leaves_and_other_spellings():
    leaves = leaves_of(LLAMA, TreeFormat("easylm", ""))
    leaves["lm_head.lm_head.kernel"] = leaves.pop("lm_head.kernel")
    found = match_foreign_tree({f"{name}.value": each for name, each in leaves.items()}, LLAMA, CONFIG, "m")
    assert {tensor.name for tensor in found.tensors} == wanted_of(LLAMA).keys()


def test_what_is_missing_is_missing_and_what_is_unknown_has_its_own_name():
    leaves = leaves_of(GPT_NEO, TreeFormat("hf-flax", ""))
    del leaves["transformer.h.1.ln_1.bias"]
    leaves |= {"transformer.h.0.extra": leaf(2), "other": leaf(0, 3)}
    found = match_foreign_tree(leaves, GPT_NEO, CONFIG, "m")
    names = {tensor.name for tensor in found.tensors}
    assert wanted_of(GPT_NEO).keys() - names == {"h.1.ln_1.bias"}
    assert names - wanted_of(GPT_NEO).keys() == {"h.0.extra", "other"}
    assert [found.names.display_name(name) for name in ("h.0.extra", "other")] == ["transformer.h.0.extra", "other"]


def test_what_is_beside_the_parameters():
    leaves = leaves_of(LLAMA, TreeFormat("easylm", "params.params."))
    leaves |= {"step": leaf(), "opt_state.0.mu.x": leaf(3), "opt_state.0.nu.x": leaf(4)}
    found = match_foreign_tree(leaves, LLAMA, CONFIG, "m")
    assert [(d.name, d.nbytes, d.rule) for d in found.extra_entries] == [
        ("step", 4, "training state"),
        ("opt_state", 28, "optimizer state"),
    ]


HARM = {
    "no layout": ({"a.b": leaf(2)}, "has no known layout"),
    "nothing": ({}, "has no known layout"),
    "a leaf of another shape": ({"transformer.wte.embedding": leaf(11, 9)}, "is not what it should be"),
    "a leaf in two spellings": ({"lm_head.kernel": leaf(8, 11), "lm_head.lm_head.kernel": leaf(8, 11)}, "a leaf twice"),
    "a leaf that is boxed and not": (
        {"lm_head.kernel": leaf(8, 11), "lm_head.kernel.value": leaf(8, 11)},
        "a leaf twice",
    ),
    "a name that a tensor has": ({"norm.weight": leaf(8)}, "a tensor twice"),
}


@pytest.mark.parametrize("name", HARM)
def test_leaves_that_make_no_model(name: str):
    changed, what = HARM[name]
    known = leaves_of(LLAMA, TreeFormat("easylm", "")) if what not in ("has no known layout",) else {}
    with pytest.raises(PrepError) as caught:
        match_foreign_tree(known | changed, LLAMA, CONFIG, "m")
    assert what in caught.value.what


def test_an_unknown_layout_is_answered_with_those_that_are_read():
    with pytest.raises(PrepError) as caught:
        match_foreign_tree({"blk.w": leaf(2)}, LLAMA, CONFIG, "m")
    assert caught.value.why == "found blk.w, which are not the leaves of a llama"
    assert "native (layers.0." in caught.value.hint
    assert "easylm (transformer.h.0." in caught.value.hint
    assert "below no root or params or params.params" in caught.value.hint


@pytest.mark.parametrize("stacked_on", [None, 0])
def test_a_config_that_asks_for_too_much(stacked_on: int | None):
    leaves = leaves_of(LLAMA, TreeFormat("easylm", "", stacked_on))
    with pytest.raises(PrepError) as caught:
        match_foreign_tree(leaves, LLAMA, {**CONFIG, "num_hidden_layers": 50_000}, "m")
    assert "50,000 layers" in caught.value.why


def test_a_family_without_other_trees():
    toy = Family("toy", "", (), GPT_NEO.sizes, {}, {}, GPT_NEO.tying, GPT_NEO.arch_config)
    with pytest.raises(PrepError, match="has no known layout"):
        match_foreign_tree({"a": leaf(2)}, toy, CONFIG, "m")
