"""Where chunks go: apart from each other, as deep in a page as they come from, and always the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.planning import placing
from prepcli.planning.boxes import whole
from prepcli.planning.grids import Grid
from prepcli.planning.moves import copies
from prepcli.planning.placing import PAGE, PAGED_SLOT, Layout, Want, cells_together, place
from tests.helpers.plans import dividing
from tests.helpers.strategies import tables
from trainer.models.axis_map import AxisMap, bind, parse

ITEM = 4


def chunks_of(layout: Layout, grids: dict[str, Grid]) -> list[tuple[int, int, int]]:
    """File, first byte and one past the last of every chunk of every leaf."""
    found = []
    for leaf, boxes in layout.placed.items():
        nbytes = math.prod(grids[leaf].chunk) * ITEM
        indices = [index for box in boxes for index in box.indices()]
        assert sorted(indices) == list(itertools.product(*(range(n) for n in grids[leaf].counts)))
        for box in boxes:
            for index in box.indices():
                file, offset = box.places.find(index)
                found.append((file, offset, offset + nbytes))
    return sorted(found)


def check(layout: Layout, grids: dict[str, Grid]) -> None:
    chunks = chunks_of(layout, grids)
    for (file, _, stop), (other, start, _) in itertools.pairwise(chunks):
        assert file != other or stop <= start
    for number, size in enumerate(layout.sizes):
        assert max((stop for file, _, stop in chunks if file == number), default=0) <= size


def wants_of(rows: Sequence[AxisMap], grids: dict[str, Grid], shift: int) -> list[Want]:
    size = math.prod(rows[0].source_shape) * ITEM
    return [
        Want(leaf, row, tuple(at.items()), grids[leaf], ITEM, shift + i * size)
        for i, (_, at) in enumerate(rows[0].tensors())
        for leaf, row in zip(grids, rows)
    ]


@settings(max_examples=100, deadline=None)
@given(tables(), st.data())
def test_every_chunk_has_a_place_of_its_own(rows: tuple[AxisMap, ...], data):
    grids = {f"leaf{i}": Grid(row.leaf_shape, data.draw(dividing(row.leaf_shape))) for i, row in enumerate(rows)}
    wants = wants_of(rows, grids, data.draw(st.integers(0, 2 * PAGE)))
    layout = place(wants)
    check(layout, grids)
    assert layout == place(wants)
    for want, region in zip(wants, layout.regions, strict=True):
        found, nbytes = list(copies(region, whole(want.row.source_shape))), math.prod(want.row.source_shape) * ITEM
        chunks = math.prod(stop - first for first, stop in zip(*cells_together(want)))
        if [copy.width for copy in found] == [nbytes] == [chunks * math.prod(want.grid.chunk) * ITEM]:
            assert (found[0].offset - want.source_offset) % PAGE == 0


def one(text: str, sizes: dict[str, int], chunk: tuple[int, ...], offset: int) -> Layout:
    row = bind(parse(text), sizes)
    return place([Want("w", row, (), Grid(row.leaf_shape, chunk), ITEM, offset)])


@pytest.mark.parametrize("offset", [0, 8, 4095, 4096, 123_456])
def test_bytes_in_their_own_order_lie_as_deep_in_a_page_as_in_their_source(offset: int):
    layout = one("mlp embed <- w: mlp embed", {"mlp": 30, "embed": 50}, (10, 50), offset)
    (box,) = layout.placed["w"]
    assert [box.places.find(index)[1] for index in box.indices()] == [offset % PAGE + i * 2000 for i in range(3)]
    assert layout.sizes == [offset % PAGE + 6000]


@pytest.mark.parametrize("columns", [16, 128, 130])
def test_large_chunks_in_another_order_begin_at_pages(columns: int):
    layout = one("embed mlp <- w: mlp embed", {"mlp": 2 * columns, "embed": 512}, (128, columns), 8)
    (box,) = layout.placed["w"]
    offsets = [box.places.find(index)[1] for index in box.indices()]
    nbytes = 128 * columns * ITEM
    if nbytes >= PAGED_SLOT:
        assert all(offset % PAGE == 0 for offset in offsets)
        assert offsets[1] - offsets[0] < nbytes + PAGE
    else:
        assert offsets == [i * nbytes for i in range(len(offsets))]


def test_a_file_that_is_full_is_followed_by_another(monkeypatch):
    monkeypatch.setattr(placing, "FILE_NBYTES", 10_000)
    row = bind(parse("layers embed <- h.{layers}.n: embed"), {"layers": 8, "embed": 1000})
    grid = Grid(row.leaf_shape, (1, 1000))
    layout = place(Want("n", row, tuple(at.items()), grid, ITEM) for _, at in row.tensors())
    check(layout, {"n": grid})
    assert [box.places.file for box in layout.placed["n"]] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_parts_that_share_their_chunks_share_their_place():
    row = bind(parse("layers embed <- h.{layers}.n: embed"), {"layers": 4, "embed": 6})
    grid = Grid(row.leaf_shape, (2, 6))
    wants = [Want("n", row, tuple(at.items()), grid, ITEM) for _, at in row.tensors()]
    assert [cells_together(want) for want in wants] == [((0, 0), (1, 1))] * 2 + [((1, 0), (2, 1))] * 2
    layout = place(wants)
    assert len(layout.placed["n"]) == 2
    assert layout.regions[0].places == layout.regions[1].places != layout.regions[2].places


@pytest.mark.parametrize(
    ("text", "first", "stop"),
    [
        ("layers experts embed <- h.{layers}.e.{experts}.n: embed", (1, 2, 0), (2, 3, 3)),
        ("(layers experts) embed <- h.{layers}.e.{experts}.n: embed", (5, 0), (6, 3)),
        ("embed layers experts <- h.{layers}.e.{experts}.n: embed", (0, 1, 2), (3, 2, 3)),
        ("(layers embed) experts <- h.{layers}.e.{experts}.n: embed", (0, 2), (6, 3)),
        ("layers experts 1 embed <- h.{layers}.e.{experts}.n: embed", (1, 2, 0, 0), (2, 3, 1, 3)),
    ],
)
def test_dims_of_stacked_atoms_are_laid_out_one_by_one(text: str, first: tuple[int, ...], stop: tuple[int, ...]):
    row = bind(parse(text), {"layers": 2, "experts": 3, "embed": 3})
    want = Want("n", row, (("layers", 1), ("experts", 2)), Grid(row.leaf_shape, (1,) * len(row.leaf)), ITEM)
    assert cells_together(want) == (first, stop)


def test_a_0d_leaf_has_one_chunk():
    layout = one("<- s:", {}, (), 12)
    assert [list(box.indices()) for box in layout.placed["w"]] == [[()]]
    assert layout.placed["w"][0].places.find(()) == (0, 12)
    assert layout.sizes == [16]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_a_leaf_without_elements_takes_no_room(shape: tuple[int, int]):
    layout = one("mlp embed <- w: mlp embed", {"mlp": shape[0], "embed": shape[1]}, (1, 1), 0)
    assert layout.sizes == [0]
    assert [list(box.indices()) for box in layout.placed["w"]] == [[]]
