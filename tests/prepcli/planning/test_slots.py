"""Names in a training state: parameters, slots of the optimizer, and what stands alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.planning.boxes import whole
from prepcli.planning.grids import Grid, Lattice
from prepcli.planning.moves import Region, copies
from prepcli.planning.slots import PARAMS, alone, joined, parted, slots_of

SHAPES = {"embed.tokens": (8, 4), "encoder.embed.tokens": (8, 4), "norm.scale": (4,)}


def leaves(*roots: str) -> dict[str, tuple[int, ...]]:
    return {f"{root}.{path}": shape for root in roots for path, shape in SHAPES.items()}


@pytest.mark.parametrize("slot", [PARAMS, "opt_state.adam.mu", ""])
def test_what_was_joined_is_parted(slot: str):
    assert parted(joined(slot, "h.0.attn.q.weight")) == (slot, "h.0.attn.q.weight")


def test_a_parameter_keeps_its_name():
    assert joined(PARAMS, "wte.weight") == "wte.weight"


def test_slots_have_a_leaf_for_each_parameter():
    found = leaves("params", "opt_state.adam.nu", "opt_state.adam.mu", "opt_state") | {"opt_state.adam.count": ()}
    assert slots_of(found, SHAPES) == ("opt_state", "opt_state.adam.mu", "opt_state.adam.nu")


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
    assert slots_of(found, SHAPES) == ("opt_state.nu",)


def test_only_the_optimizer_has_slots():
    assert slots_of(leaves("params", "ema"), SHAPES) == ()
    assert slots_of({"opt_state.x": (3,)}, {}) == ()


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple))
def test_a_leaf_that_stands_alone_is_its_own_tensor(shape: tuple[int, ...]):
    row = alone("opt_state.count", shape)
    assert (row.leaf_shape, row.source_shape) == (shape, shape)
    assert list(row.tensors()) == [("opt_state.count", {})]
    flat = (0,) * len(shape)
    (copy,) = copies(Region(row, (), Grid(shape, shape), Lattice(0, 0, flat, flat), 4), whole(shape))
    nbytes = 4
    for extent in shape:
        nbytes *= extent
    assert (copy.at, copy.offset, copy.width, copy.dims) == (0, 0, nbytes, ())
