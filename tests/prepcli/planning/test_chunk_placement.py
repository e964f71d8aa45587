"""Chunks never overlap, keep their source's page offset, and have the bytes of shards once, wherever these end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.boxes import Box, full_box, strides
from prepcli.algebra.grids import ChunkGrid, StridedChunks
from prepcli.algebra.rows import parse_row
from prepcli.planning import chunk_placement
from prepcli.planning.chunk_placement import (
    MIN_ALIGNED_CHUNK_NBYTES,
    PAGE,
    ChunkLayout,
    LeafPiece,
    place_chunk_files,
    place_chunks,
    shard_copies,
)
from prepcli.planning.plan import OutputLeaf, PlacedChunks
from tests.helpers.plans import dividing_chunks
from tests.helpers.strategies import complete_tables

DTYPE = "float32"
ITEM = 4


def chunks_of(layout: ChunkLayout, grids: dict[str, ChunkGrid]) -> list[tuple[int, int, int]]:
    """Return file, start and stop of every chunk of every leaf, sorted."""
    copies = []
    for leaf, boxes in layout.placed_chunks.items():
        nbytes = math.prod(grids[leaf].chunk_shape) * ITEM
        indices = [index for box in boxes for index in box.indices()]
        assert sorted(indices) == list(
            itertools.product(*(range(n) for n in grids[leaf].chunk_counts))
        )
        for box in boxes:
            for index in box.indices():
                file, offset = box.chunks.find(index)
                copies.append((file, offset, offset + nbytes))
    return sorted(copies)


def check(layout: ChunkLayout, grids: dict[str, ChunkGrid]) -> None:
    chunks = chunks_of(layout, grids)
    for (file, _, stop), (next_file, start, _) in itertools.pairwise(chunks):
        assert file != next_file or stop <= start
    for number, size in enumerate(layout.file_sizes):
        assert max((stop for file, _, stop in chunks if file == number), default=0) <= size


def pieces_of(rows: Sequence[AxisMap], grids: dict[str, ChunkGrid], shift: int) -> list[LeafPiece]:
    size = math.prod(rows[0].source_shape) * ITEM
    return [
        LeafPiece(leaf, row, tuple(stacked.items()), grids[leaf], DTYPE, shift + i * size)
        for i, (_, stacked) in enumerate(rows[0].tensors())
        for leaf, row in zip(grids, rows)
    ]


@settings(max_examples=100, deadline=None)
@given(complete_tables(), st.data())
def test_place_chunks_never_overlaps_chunks(rows: tuple[AxisMap, ...], data):
    grids = {
        f"leaf{i}": ChunkGrid(row.leaf_shape, data.draw(dividing_chunks(row.leaf_shape)))
        for i, row in enumerate(rows)
    }
    pieces = pieces_of(rows, grids, data.draw(st.integers(0, 2 * PAGE)))
    layout = place_chunks(pieces)
    check(layout, grids)
    assert layout == place_chunks(pieces)
    for piece, region in zip(pieces, layout.locations, strict=True):
        copies, nbytes = (
            list(region.copies(full_box(piece.axis_map.source_shape))),
            math.prod(piece.axis_map.source_shape) * ITEM,
        )
        chunks = math.prod(stop - first for first, stop in zip(*piece.chunk_group))
        if (
            [copy.width for copy in copies]
            == [nbytes]
            == [chunks * math.prod(piece.grid.chunk_shape) * ITEM]
        ):
            assert (copies[0].file_offset - piece.source_offset) % PAGE == 0


@settings(max_examples=50, deadline=None)
@given(complete_tables(), st.data())
def test_place_chunk_files_gives_each_chunk_a_file(rows: tuple[AxisMap, ...], data):
    grids = {
        f"leaf{i}": ChunkGrid(row.leaf_shape, data.draw(dividing_chunks(row.leaf_shape)))
        for i, row in enumerate(rows)
    }
    pieces = pieces_of(rows, grids, shift=0)
    layout = place_chunk_files(pieces)
    chunks = chunks_of(layout, grids)
    assert [file for file, _, _ in chunks] == list(range(len(layout.file_sizes)))
    for file, start, stop in chunks:
        assert (start, stop) == (0, layout.file_sizes[file])
    database = place_chunks(pieces)
    for piece, region, database_region in zip(
        pieces, layout.locations, database.locations, strict=True
    ):
        box = full_box(piece.axis_map.source_shape)
        nbytes = sum(copy.nbytes for copy in region.copies(box))
        assert nbytes == sum(copy.nbytes for copy in database_region.copies(box))


def place_one(text: str, sizes: dict[str, int], chunk: tuple[int, ...], offset: int) -> ChunkLayout:
    row = bind_row(parse_row(text), sizes)
    return place_chunks([LeafPiece("w", row, (), ChunkGrid(row.leaf_shape, chunk), DTYPE, offset)])


@pytest.mark.parametrize("offset", [0, 8, 4095, 4096, 123_456])
def test_place_chunks_keeps_page_offset_of_contiguous(offset: int):
    layout = place_one("mlp embed <- w: mlp embed", {"mlp": 30, "embed": 50}, (10, 50), offset)
    (box,) = layout.placed_chunks["w"]
    assert [box.chunks.find(index)[1] for index in box.indices()] == [
        offset % PAGE + i * 2000 for i in range(3)
    ]
    assert layout.file_sizes == [offset % PAGE + 6000]


@pytest.mark.parametrize("columns", [16, 128, 130])
def test_place_chunks_aligns_large_reordered_chunks(columns: int):
    layout = place_one(
        "embed mlp <- w: mlp embed", {"mlp": 2 * columns, "embed": 512}, (128, columns), 8
    )
    (box,) = layout.placed_chunks["w"]
    offsets = [box.chunks.find(index)[1] for index in box.indices()]
    nbytes = 128 * columns * ITEM
    if nbytes >= MIN_ALIGNED_CHUNK_NBYTES:
        assert all(offset % PAGE == 0 for offset in offsets)
        assert offsets[1] - offsets[0] < nbytes + PAGE
    else:
        assert offsets == [i * nbytes for i in range(len(offsets))]


def test_place_chunks_starts_new_file_when_full(monkeypatch):
    monkeypatch.setattr(chunk_placement, "FILE_NBYTES", 10_000)
    row = bind_row(parse_row("layers embed <- h.{layers}.n: embed"), {"layers": 8, "embed": 1000})
    grid = ChunkGrid(row.leaf_shape, (1, 1000))
    layout = place_chunks(
        LeafPiece("n", row, tuple(stacked.items()), grid, DTYPE) for _, stacked in row.tensors()
    )
    check(layout, {"n": grid})
    assert [box.chunks.file for box in layout.placed_chunks["n"]] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_place_chunks_places_shared_chunks_once():
    row = bind_row(parse_row("layers embed <- h.{layers}.n: embed"), {"layers": 4, "embed": 6})
    grid = ChunkGrid(row.leaf_shape, (2, 6))
    pieces = [
        LeafPiece("n", row, tuple(stacked.items()), grid, DTYPE) for _, stacked in row.tensors()
    ]
    assert [piece.chunk_group for piece in pieces] == [((0, 0), (1, 1))] * 2 + [
        ((1, 0), (2, 1))
    ] * 2
    layout = place_chunks(pieces)
    assert len(layout.placed_chunks["n"]) == 2
    first, second, third, *_ = [location.array.chunks for location in layout.locations]
    assert first == second != third


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
def test_chunk_group_separates_stacked_indices(
    text: str, first: tuple[int, ...], stop: tuple[int, ...]
):
    row = bind_row(parse_row(text), {"layers": 2, "experts": 3, "embed": 3})
    piece = LeafPiece(
        "n",
        row,
        (("layers", 1), ("experts", 2)),
        ChunkGrid(row.leaf_shape, (1,) * len(row.leaf_dims)),
        DTYPE,
    )
    assert piece.chunk_group == (first, stop)


def test_place_chunks_places_a_0d_leaf_as_one_chunk():
    layout = place_one("<- s:", {}, (), 12)
    assert [list(box.indices()) for box in layout.placed_chunks["w"]] == [[()]]
    assert layout.placed_chunks["w"][0].chunks.find(()) == (0, 12)
    assert layout.file_sizes == [16]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_place_chunks_places_no_chunk_of_an_empty_leaf(shape: tuple[int, int]):
    layout = place_one("mlp embed <- w: mlp embed", {"mlp": shape[0], "embed": shape[1]}, (1, 1), 0)
    assert layout.file_sizes == [0]
    assert [list(box.indices()) for box in layout.placed_chunks["w"]] == [[]]


ITEM_NBYTES = 4
GAP_NBYTES = 12  # bytes between two chunks


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


@st.composite
def leaves_and_shards(draw: st.DrawFn) -> tuple[OutputLeaf, list[list[Box]]]:
    """Return a leaf, and the shards that each process owns."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=3)))
    chunk_shape = tuple(draw(st.sampled_from(divisors(n))) for n in shape)
    shard_shape = tuple(draw(st.sampled_from(divisors(n))) for n in shape)
    count = draw(st.integers(1, 3))
    shards: list[list[Box]] = [[] for _ in range(count)]
    axes = [range(0, n, length) for n, length in zip(shape, shard_shape)]
    for starts in itertools.product(*axes):
        box = tuple((start, start + length) for start, length in zip(starts, shard_shape))
        shards[draw(st.integers(0, count - 1))].append(box)
    return _leaf(ChunkGrid(shape, chunk_shape), by_row=draw(st.booleans())), shards


def _leaf(grid: ChunkGrid, *, by_row: bool) -> OutputLeaf:
    """Return a leaf whose chunks are one group, or one group per index of the first dim in a file of its own."""
    counts = grid.chunk_counts
    rows = counts[0] if by_row and counts else 1
    chunk_nbytes = math.prod(grid.chunk_shape) * ITEM_NBYTES + GAP_NBYTES
    groups = []
    for row in range(rows):
        first = (row, *[0] * (len(counts) - 1)) if counts else ()
        stop = (row + 1 if rows > 1 else counts[0], *counts[1:]) if counts else ()
        extents = [high - low for low, high in zip(first, stop)]
        groups.append(
            PlacedChunks(first, stop, StridedChunks(row, 16, first, strides(extents, chunk_nbytes)))
        )
    return OutputLeaf(("x",), "int32", grid, tuple(groups))


def write(leaf: OutputLeaf, box: Box, *, values: np.ndarray, files: list[np.ndarray]) -> None:
    """Write a shard's bytes. A byte that is written twice is an error."""
    for part, copy in shard_copies(leaf, box):
        data = (
            np.ascontiguousarray(values[tuple(slice(*ends) for ends in part)])
            .reshape(-1)
            .view(np.uint8)
        )
        assert data.size == copy.nbytes
        for number, offset in enumerate(copy.run_offsets()):
            run = data[number * copy.run_nbytes : (number + 1) * copy.run_nbytes]
            target = files[copy.file][offset : offset + run.size]
            assert not target.any()
            target[...] = run


@given(leaves_and_shards())
def test_shards_write_every_byte_of_a_leaf_once(case: tuple[OutputLeaf, list[list[Box]]]):
    leaf, shards_by_process = case
    nonzero_bytes = np.arange(math.prod(leaf.grid.shape) * ITEM_NBYTES) % 251 + 1
    values = nonzero_bytes.astype(np.uint8).view(np.int32).reshape(leaf.grid.shape)
    nbytes = 16 + (leaf.chunk_nbytes + GAP_NBYTES) * math.prod(leaf.grid.chunk_counts)
    files = [np.zeros(nbytes, np.uint8) for _ in leaf.placed_chunks]
    for box in itertools.chain(*shards_by_process):
        write(leaf, box, values=values, files=files)
    for group in leaf.placed_chunks:
        for index in group.indices():
            file, offset = group.chunks.find(index)
            chunk = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, leaf.grid.chunk_shape))
            assert (
                files[file][offset : offset + leaf.chunk_nbytes].tobytes()
                == values[chunk].tobytes()
            )
    assert sum(np.count_nonzero(file) for file in files) == values.nbytes
