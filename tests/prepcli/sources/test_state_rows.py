"""Leaves of the optimizer state that belong to a parameter and are in no complete slot."""

from __future__ import annotations

import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.rows import parse_row
from prepcli.planning.tensors import is_leaf_path
from prepcli.sources.state_rows import (
    PathLeaf,
    find_state_leaves,
    index_state_tensors,
    shape_in_leaf,
    state_axis_map,
)

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
