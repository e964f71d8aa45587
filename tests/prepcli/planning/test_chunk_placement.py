"""Places of chunks in the files and the objects of an output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prepcli as prep
from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.boxes import Box, full_box, strides
from prepcli.algebra.grids import ChunkGrid, StridedChunks
from prepcli.algebra.rows import parse_row
from prepcli.core.errors import PrepError
from prepcli.planning import chunk_placement, coverage, object_files
from prepcli.planning.arrays import Array, MappedArray, identity_axis_map, whole_array
from prepcli.planning.chunk_placement import (
    MIN_ALIGNED_CHUNK_NBYTES,
    PAGE,
    ChunkLayout,
    LeafPiece,
    place_chunk_files,
    place_chunks,
    shard_copies,
)
from prepcli.planning.object_files import plan_object_files, plan_process_files, streams_of_spans
from prepcli.planning.plan import OutputFile, OutputLeaf, PlacedChunks, Plan, Stream
from prepcli.planning.work_units import (
    WorkUnit,
    find_bucket_units,
    find_folder_units,
    order_units,
)
from tests.helpers.plans import dividing_chunks, flat
from tests.helpers.strategies import complete_tables
from tests.helpers.tiny_checkpoints import make_checkpoint

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


LIMIT_NBYTES = 64 << 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    make_checkpoint(folder / "m", vocab_size=4001, hidden_size=64, num_heads=4)
    return folder


def plan_of(folder: Path, command: str, **options: object) -> Plan:
    """Return the plan of a conversion of the model."""
    with chdir(folder):
        conversion = getattr(prep, command)("./m", dry_run=True, **options)
    assert conversion.plan is not None
    return conversion.plan


@pytest.mark.parametrize("mesh", ["1,1,1", "1,2,2", "1,1,4", None])
def test_object_files_are_small_and_cover_every_chunk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mesh: str | None
):
    monkeypatch.setattr(object_files, "OBJECT_NBYTES", LIMIT_NBYTES)
    plan = plan_object_files(plan_of(folder, "save_init", mesh=mesh, pad_vocab="8"))
    coverage.check(plan, 1 << 20)
    largest_chunk_nbytes = max(leaf.chunk_nbytes for leaf in plan.leaves)
    assert len(plan.files) > 1
    for file in plan.files:
        assert file.size <= max(LIMIT_NBYTES, largest_chunk_nbytes)


def stacked_plan() -> Plan:
    """Return a plan of two leaves with four layers: `n` has chunks of two layers, `m` of one layer."""
    pieces: list[LeafPiece] = []
    tensors: list[str] = []
    for layer in range(4):
        for leaf, length in (("n", 2), ("m", 1)):
            row = parse_row(f"layers embed <- h.{{layers}}.{leaf}: embed")
            axis_map = bind_row(row, {"layers": 4, "embed": 6})
            grid = ChunkGrid((4, 6), (length, 6))
            pieces.append(LeafPiece(leaf, axis_map, (("layers", layer),), grid, "float32"))
            tensors.append(f"h.{layer}.{leaf}")
    layout = place_chunks(pieces)
    streams: list[Stream] = []
    for number, (name, region) in enumerate(zip(tensors, layout.locations)):
        read = flat("float32", (6,), 24 * number)
        streams.append(Stream(name, "float32", (6,), (0, 6), (read,), (region,)))
    leaves: list[OutputLeaf] = []
    for leaf, length in (("n", 2), ("m", 1)):
        grid = ChunkGrid((4, 6), (length, 6))
        leaves.append(OutputLeaf((leaf,), "float32", grid, tuple(layout.placed_chunks[leaf])))
    return Plan(
        command="save-init",
        request="",
        source_name="",
        source_files=(),
        streams=tuple(streams),
        files=(OutputFile("d/0", layout.file_sizes[0]),),
        leaves=tuple(leaves),
    )


def test_chunks_of_several_tensors_are_in_objects_of_their_own():
    """Their objects are complete only after the last layer."""
    plan = plan_object_files(stacked_plan())
    coverage.check(plan, 1 << 20)
    files: dict[str, set[int]] = {}
    for leaf in plan.leaves:
        files[leaf.name] = {chunks.chunks.file for chunks in leaf.placed_chunks}
    assert files == {"m": {0}, "n": {1}}
    assert [(unit.files, len(unit.streams)) for unit in find_bucket_units(plan)] == [
        ((0,), 4),
        ((1,), 4),
    ]


def test_files_of_other_formats_are_unchanged(folder: Path):
    plan = plan_of(folder, "pad_vocab", multiple=8)
    assert plan_object_files(plan) is plan
    plan = plan_of(folder, "save_init", mesh="1,2,2", storage="files", pad_vocab="8")
    assert plan_object_files(plan) is plan


def test_units_have_no_file_in_common(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_files, "OBJECT_NBYTES", LIMIT_NBYTES)
    plan = plan_object_files(plan_of(folder, "save_init", mesh="1,2,2", pad_vocab="8"))
    units = find_bucket_units(plan)
    assert len(units) > 5
    assert sorted(file for unit in units for file in unit.files) == [*range(len(plan.files))]
    assert sorted(s for unit in units for s in unit.streams) == [*range(len(plan.streams))]
    for unit in units:
        for number in unit.streams:
            spans = coverage.stream_write_spans(plan.streams[number])
            assert {file for file, _, _ in spans} <= set(unit.files)
    for check in plan.checks:
        names = [{plan.streams[s].name for s in unit.streams} for unit in units]
        assert any({check.name, check.duplicate_of} <= unit_names for unit_names in names)


def test_tensors_without_elements_and_files_have_no_unit():
    plan = stacked_plan()
    empty = Stream("empty", "float32", (0, 6), (0, 0), (), ())
    with_empty = replace(plan, streams=(*plan.streams, empty))
    assert find_bucket_units(with_empty) == find_bucket_units(plan)


def test_new_rows_follow_the_rows_that_they_average(folder: Path):
    plan = plan_of(folder, "pad_vocab", multiple=8, init="mean")
    for unit in find_bucket_units(plan):
        rows: dict[str, int] = {}
        for number in unit.streams:
            stream = plan.streams[number]
            assert rows.get(stream.name, 0) <= stream.rows[0]
            rows[stream.name] = stream.rows[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4096])
def test_processes_begin_with_different_units(count: int):
    units = [WorkUnit((number,), (number,), 2) for number in range(64)]
    firsts: list[int] = []
    for index in range(min(count, 64)):
        order = order_units(units, count=count, index=index * count // min(count, 64))
        assert sorted(order) == list(range(64))
        firsts.append(order[0])
    assert len(set(firsts)) == min(count, 64)


def test_large_units_come_first_with_several_processes():
    units = [
        WorkUnit((number,), (number,), nbytes) for number, nbytes in enumerate((1, 1, 9, 1, 20))
    ]
    assert order_units(units, count=1, index=0) == [0, 1, 2, 3, 4]
    assert order_units(units, count=2, index=0)[:2] == [4, 2]
    assert order_units(units, count=2, index=1)[:2] == [2, 4]


def test_units_of_a_folder_hold_all_streams_of_a_tensor(folder: Path):
    plan = plan_of(folder, "pad_vocab", multiple=8, init="mean")
    units = find_folder_units(plan)
    numbers = [number for unit in units for number in unit.streams]
    assert sorted(numbers) == list(range(len(plan.streams)))
    names = [{plan.streams[number].name for number in unit.streams} for unit in units]
    assert sum(map(len, names)) == len(set().union(*names))
    assert sum(unit.nbytes for unit in units) == sum(stream.nbytes for stream in plan.streams)


def test_a_further_pass_reads_only_the_rows_of_missing_bytes(folder: Path):
    plan = plan_of(folder, "pad_vocab", multiple=8)
    number, stream = max(enumerate(plan.streams), key=lambda item: item[1].nbytes)
    ((file, start, stop),) = coverage.stream_write_spans(stream)
    middle = (start + stop) // 2
    missing = {file: [(middle, middle + 1)]}
    (part,) = streams_of_spans([stream], missing, slab_nbytes=8 * stream.row_nbytes)
    assert (part.name, part.nbytes < stream.nbytes / 10) == (stream.name, True)
    ((_, part_start, part_stop),) = coverage.stream_write_spans(part)
    assert part_start <= middle < part_stop
    assert streams_of_spans([stream], {file: [(stop, stop + 1)]}, slab_nbytes=1 << 20) == []
    assert number < len(plan.streams)


SHAPES = {"a": (4, 6), "b": (2,)}
CHUNKS = {"a": (2, 2), "b": (2,)}
LEFT, RIGHT = ((0, 4), (0, 4)), ((0, 4), (4, 6))


def make_plan() -> Plan:
    """Return a plan of two leaves, each one tensor, in one data file."""
    leaves, streams, offset = [], [], 0
    for number, (name, shape) in enumerate(SHAPES.items()):
        grid, axis_map = ChunkGrid(shape, CHUNKS[name]), identity_axis_map(name, shape)
        leaf = OutputLeaf((name,), "float32", grid, ())
        zeros = (0,) * len(shape)
        placement = StridedChunks(0, offset, zeros, strides(grid.chunk_counts, leaf.chunk_nbytes))
        leaves.append(
            OutputLeaf(
                (name,), "float32", grid, (PlacedChunks(zeros, grid.chunk_counts, placement),)
            )
        )
        whole = whole_array(name, "float32", shape, (number, 0)).mapped()
        leaf_array = Array(name, "float32", shape, CHUNKS[name], placement)
        written = MappedArray(axis_map, (), leaf_array)
        streams.append(Stream(name, "float32", shape, (0, shape[0]), (whole,), (written,)))
        offset += leaf.nbytes
    return Plan(
        command="train",
        request="",
        source_name="",
        source_files=(),
        streams=tuple(streams),
        files=(OutputFile("d/0", offset),),
        leaves=tuple(leaves),
        display_names={},
        item="state",
    )


def test_each_chunk_is_in_the_file_of_its_process():
    boxes: list[dict[str, list[Box]]] = [
        {"a": [LEFT], "b": []},
        {"a": [RIGHT], "b": [full_box((2,))]},
    ]
    files = plan_process_files(make_plan(), ["a", "b"], boxes)
    coverage.check(files.plan, 1 << 20)
    locations = {
        (leaf.name, index): chunks.chunks.find(index)
        for leaf in files.plan.leaves
        for chunks in leaf.placed_chunks
        for index in chunks.indices()
    }
    assert {
        index[1]: location[0] for (name, index), location in locations.items() if name == "a"
    } == {0: 0, 1: 0, 2: 1}
    assert locations["b", (0,)][0] == 1
    assert [file.size for file in files.plan.files] == [4 * 16, 2 * 16 + 8]
    assert [[group.owner for group in files.groups if name in group.leaves] for name in "ab"] == [
        [None],
        [1],
    ]
    for process, chunks in enumerate(files.chunks):
        offsets = [
            offset
            for group in files.groups
            for name in group.leaves
            for _, offset in chunks.get(name, ())
        ]
        assert offsets == sorted(offsets)
        assert {process} == {
            locations[name, index][0] for name in "ab" for index, _ in chunks.get(name, ())
        }


def test_thousands_of_processes_have_files_of_their_own():
    """Each process has one row of the leaf `a`, and none has all of `b`."""
    num_processes = 4096
    grid = ChunkGrid((num_processes, 2), (1, 2))
    placement = StridedChunks(0, 0, (0, 0), (8, 8))
    axis_map = identity_axis_map("a", grid.shape)
    chunks = PlacedChunks((0, 0), grid.chunk_counts, placement)
    read = whole_array("a", "float32", grid.shape, (0, 0)).mapped()
    write = MappedArray(axis_map, (), Array("a", "float32", grid.shape, (1, 2), placement))
    stream = Stream("a", "float32", grid.shape, (0, num_processes), (read,), (write,))
    leaf = OutputLeaf(("a",), "float32", grid, (chunks,))
    plan = replace(make_plan(), streams=(stream,), leaves=(leaf,))
    boxes = [{"a": [((process, process + 1), (0, 2))]} for process in range(num_processes)]
    files = plan_process_files(plan, ["a"], boxes)
    assert len({file.path for file in files.plan.files}) == num_processes
    assert [file.size for file in files.plan.files] == [8] * num_processes
    assert files.chunks[4095] == {"a": [((4095, 0), 0)]}
    assert files.groups[0].owner is None


def test_leaves_of_one_tensor_are_one_group():
    plan = make_plan()
    joined = Stream(
        "ab",
        "float32",
        (4, 6),
        (0, 4),
        tuple(s.reads[0] for s in plan.streams),
        plan.streams[0].writes,
    )
    boxes = [{name: [full_box(shape)] for name, shape in SHAPES.items()}]
    (group,) = plan_process_files(replace(plan, streams=(joined,)), ["a", "b"], boxes).groups
    assert (group.leaves, group.streams, group.owner) == (("a", "b"), (0,), 0)


def test_shards_of_two_processes_in_one_chunk_are_an_error():
    boxes = [{"a": [((0, 1), (0, 6))], "b": []}, {"a": [((1, 4), (0, 6))], "b": [full_box((2,))]}]
    with pytest.raises(PrepError, match="cannot be saved to a bucket") as caught:
        plan_process_files(make_plan(), ["a", "b"], boxes)
    assert caught.value.why == "processes 0 and 1 hold parts of chunk (0, 0) of a"
