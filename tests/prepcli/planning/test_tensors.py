"""Tensor names in a training state: parameters, optimizer slots, and other leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.boxes import full_box
from prepcli.planning.arrays import identity_axis_map, whole_array
from prepcli.planning.tensors import PARAMS, find_slots, qualify, split_name

SHAPES = {"embed.tokens": (8, 4), "encoder.embed.tokens": (8, 4), "norm.scale": (4,)}


def leaves(*roots: str) -> dict[str, tuple[int, ...]]:
    return {f"{root}.{path}": shape for root in roots for path, shape in SHAPES.items()}


@pytest.mark.parametrize("slot", [PARAMS, "opt_state.adam.mu", ""])
def test_split_name_reverses_qualify(slot: str):
    assert split_name(qualify(slot, "h.0.attn.q.weight")) == (slot, "h.0.attn.q.weight")


def test_qualify_keeps_parameter_names():
    assert qualify(PARAMS, "wte.weight") == "wte.weight"


def test_find_slots_requires_every_parameter():
    state = leaves("params", "opt_state.adam.nu", "opt_state.adam.mu", "opt_state") | {
        "opt_state.adam.count": ()
    }
    assert find_slots(state, SHAPES) == ("opt_state", "opt_state.adam.mu", "opt_state.adam.nu")


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("opt_state.mu.norm.scale"),
        lambda state: state.update({"opt_state.mu.norm.scale": (1,)}),
    ],
)
def test_find_slots_ignores_incomplete_subtrees(damage):
    state = leaves("params", "opt_state.mu", "opt_state.nu")
    damage(state)
    assert find_slots(state, SHAPES) == ("opt_state.nu",)


def test_find_slots_searches_the_optimizer_state_only():
    assert find_slots(leaves("params", "ema"), SHAPES) == ()
    assert find_slots({"opt_state.x": (3,)}, {}) == ()


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple))
def test_identity_axis_map_copies_the_whole_leaf(shape: tuple[int, ...]):
    axis_map = identity_axis_map("opt_state.count", shape)
    assert (axis_map.leaf_shape, axis_map.source_shape) == (shape, shape)
    assert list(axis_map.tensors()) == [("opt_state.count", {})]
    leaf = whole_array("opt_state.count", "float32", shape, (0, 0))
    (copy,) = leaf.part(axis_map).copies(full_box(shape))
    nbytes = 4
    for extent in shape:
        nbytes *= extent
    assert (copy.tensor_offset, copy.file_offset, copy.width, copy.dims) == (0, 0, nbytes, ())
