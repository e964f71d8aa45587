"""Data files of a step of which each is written by one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prepcli.algebra.boxes import Box, full_box, strides
from prepcli.algebra.chunks import StridedChunks
from prepcli.algebra.grids import ChunkGrid
from prepcli.core.errors import PrepError
from prepcli.planning import coverage
from prepcli.planning.arrays import Array, MappedArray, identity_axis_map, whole_array
from prepcli.planning.plan import OutputFile, OutputLeaf, PlacedChunks, Plan, Stream
from prepcli.planning.process_files import plan_process_files
from prepcli.planning.slabs import split_streams

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
    coverage.check(files.plan, lambda: split_streams(files.plan.streams, 1 << 20))
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
