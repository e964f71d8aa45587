"""Names in a training state: parameters, slots of the optimizer, and what stands alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.planning.boxes import full_box
from prepcli.planning.grids import ChunkGrid, StridedPlacement
from prepcli.planning.state_names import PARAMS, find_slots, identity_axis_map, qualify, split_name
from prepcli.planning.strided_copies import Region, region_copies

SHAPES = {"embed.tokens": (8, 4), "encoder.embed.tokens": (8, 4), "norm.scale": (4,)}


def leaves(*roots: str) -> dict[str, tuple[int, ...]]:
    return {f"{root}.{path}": shape for root in roots for path, shape in SHAPES.items()}


@pytest.mark.parametrize("slot", [PARAMS, "opt_state.adam.mu", ""])
def test_what_was_joined_is_parted(slot: str):
    assert split_name(qualify(slot, "h.0.attn.q.weight")) == (slot, "h.0.attn.q.weight")


def test_a_parameter_keeps_its_name():
    assert qualify(PARAMS, "wte.weight") == "wte.weight"


def test_slots_have_a_leaf_for_each_parameter():
    found = leaves("params", "opt_state.adam.nu", "opt_state.adam.mu", "opt_state") | {"opt_state.adam.count": ()}
    assert find_slots(found, SHAPES) == ("opt_state", "opt_state.adam.mu", "opt_state.adam.nu")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.pop("opt_state.mu.norm.scale"),
        lambda found: found.update({"opt_state.mu.norm.scale": (1,)}),
    ],
)
def test_a_subtree_of_other_leaves_is_no_slot(spoil):
    found = leaves("params", "opt_state.mu", "opt_state.nu")
    spoil(found)
    assert find_slots(found, SHAPES) == ("opt_state.nu",)


def test_only_the_optimizer_has_slots():
    assert find_slots(leaves("params", "ema"), SHAPES) == ()
    assert find_slots({"opt_state.x": (3,)}, {}) == ()


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple))
def test_a_leaf_that_stands_alone_is_its_own_tensor(shape: tuple[int, ...]):
    row = identity_axis_map("opt_state.count", shape)
    assert (row.leaf_shape, row.source_shape) == (shape, shape)
    assert list(row.tensors()) == [("opt_state.count", {})]
    flat = (0,) * len(shape)
    (copy,) = region_copies(
        Region(row, (), ChunkGrid(shape, shape), StridedPlacement(0, 0, flat, flat), 4), full_box(shape)
    )
    nbytes = 4
    for extent in shape:
        nbytes *= extent
    assert (copy.tensor_offset, copy.file_offset, copy.width, copy.dims) == (0, 0, nbytes, ())
