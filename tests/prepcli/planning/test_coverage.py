"""Coverage: a plan that loses, doubles or invents a byte is refused, whatever it is that it gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.errors import PrepError
from prepcli.planning import coverage
from prepcli.planning.grids import ChunkGrid, StridedPlacement
from prepcli.planning.plan import Contiguous, EqualityCheck, Fill, OutputLeaf, PlacedChunks, Plan, Stream
from prepcli.planning.slabs import split_streams
from prepcli.planning.strided_copies import Region
from tests.helpers.plans import dividing_chunks, make_save_plan, reverse_streams
from tests.helpers.strategies import complete_tables
from trainer.models.axis_map import AxisMap, bind_row, parse_row

LIMIT = 64
SIZES = {"vocab": 12, "embed": 4, "q": 6, "kv": 4}


def check(plan: Plan, limit: int = LIMIT) -> None:
    coverage.check(plan, lambda: split_streams(plan.streams, limit))


def refused(plan: Plan, reason: str) -> None:
    with pytest.raises(PrepError, match="does not add up") as caught:
        check(plan)
    assert reason in caught.value.why
    assert "nothing was written" in caught.value.hint


@settings(max_examples=60, deadline=None)
@given(complete_tables(), st.data())
def test_a_table_that_takes_all_adds_up_there_and_back(rows: tuple[AxisMap, ...], data):
    made = make_save_plan(rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows])
    limit = data.draw(st.integers(4, 200))
    check(made.plan, limit)
    check(replace(made.plan, streams=reverse_streams(made.plan.streams), leaves=()), limit)


def vocabulary(rows: int = 12) -> Plan:
    """An embedding of 9 true rows in a leaf of 12, the last 3 filled."""
    row = bind_row(parse_row("vocab embed <- wte: vocab embed"), SIZES)
    grid = ChunkGrid((12, 4), (4, 2))
    lattice = StridedPlacement(0, 0, (0, 0), (64, 32))
    part = Region(row, (), grid, lattice, 4)
    true = Stream("wte", "float32", (12, 4), (0, 9), (Contiguous(0, 0),), (part,))
    padding = replace(true, rows=(9, rows), reads=(), fill=Fill("zeros"))
    leaves = (OutputLeaf(("wte",), "float32", grid, (PlacedChunks((0, 0), (3, 2), lattice),)),)
    return Plan("test", "test", "test", (), (true, padding), (), leaves=leaves)


def test_padding_adds_up_to_whole_chunks():
    check(vocabulary())
    refused(vocabulary(11), "bytes written: file 0")


def test_padding_of_a_flat_tensor_adds_up():
    true = Stream("wte", "float32", (12, 4), (0, 9), (Contiguous(0, 0),), (Contiguous(0, 0),))
    padding = replace(true, rows=(9, 12), reads=(), fill=Fill("zeros"))
    check(Plan("test", "test", "test", (), (true, padding), ()))
    refused(Plan("test", "test", "test", (), (true, replace(padding, rows=(8, 12))), ()), "would be written twice")


def test_a_stream_that_nothing_makes_is_refused():
    plan = vocabulary()
    unmade = replace(plan.streams[1], fill=None)
    refused(replace(plan, streams=(plan.streams[0], unmade)), "nothing to make wte of")


def two_leaves() -> Plan:
    rows = [
        bind_row(parse_row(f"{a} embed <- w: ({parts}) embed"), SIZES)
        for a, parts in (("q", ">q | kv"), ("kv", "q | >kv"))
    ]
    return make_save_plan(rows, [(3, 4), (4, 2)]).plan


def without_a_chunk(plan: Plan) -> Plan:
    box = plan.leaves[0].placed_chunks[0]
    shorter = replace(plan.leaves[0], placed_chunks=(replace(box, stop=(box.stop[0] - 1, box.stop[1])),))
    return replace(plan, leaves=(shorter, *plan.leaves[1:]))


def with_a_chunk_twice(plan: Plan) -> Plan:
    box = plan.leaves[0].placed_chunks[0]
    rest = replace(box, first=(0, 0), stop=(1, 1))
    return replace(plan, leaves=(replace(plan.leaves[0], placed_chunks=(box, rest)), *plan.leaves[1:]))


def with_overlapping_leaves(plan: Plan) -> Plan:
    box = plan.leaves[1].placed_chunks[0]
    moved = replace(box, placement=plan.leaves[0].placed_chunks[0].placement)
    return replace(plan, leaves=(plan.leaves[0], replace(plan.leaves[1], placed_chunks=(moved,))))


def without_a_leaf(plan: Plan) -> Plan:
    return replace(plan, leaves=plan.leaves[:1])


def without_a_region(plan: Plan) -> Plan:
    (stream,) = plan.streams
    return replace(plan, streams=(replace(stream, writes=stream.writes[:1]),))


def without_a_stream(plan: Plan) -> Plan:
    return replace(plan, streams=())


def read_twice(plan: Plan) -> Plan:
    return replace(plan, streams=(*plan.streams, replace(plan.streams[0], writes=())))


WRONG: dict[Callable[[Plan], Plan], str] = {
    without_a_chunk: "leaf0 has 2 chunks, the plan places 1",
    with_a_chunk_twice: "leaf0 has 2 chunks, the plan places 3",
    with_overlapping_leaves: "would be written twice",
    without_a_leaf: "bytes written: file 0",
    without_a_region: "w: 64 bytes from byte 48 on, 48 of them on the right",
    without_a_stream: "bytes written: nothing where file 0",
    read_twice: "would be read twice",
}


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
def test_two_leaves_of_one_tensor(spoil: Callable[[Plan], Plan]):
    check(two_leaves())
    refused(spoil(two_leaves()), WRONG[spoil])


def test_a_part_that_no_row_has_would_come_back_as_garbage():
    plan = two_leaves()
    (stream,) = reverse_streams(plan.streams)
    check(replace(plan, streams=(stream,), leaves=()))
    partly = replace(stream, reads=stream.reads[1:])
    refused(replace(plan, streams=(partly,), leaves=()), "w: 64 bytes from byte 0 on")


@pytest.mark.parametrize("held", [(0, 0), (2, 2)])
def test_two_rows_over_one_part_are_refused_though_the_bytes_add_up(held: tuple[int, int]):
    rows = [bind_row(parse_row(f"q <- w: (qkv={i} q)"), SIZES | {"qkv": 2 if held == (0, 0) else 3}) for i in (0, 1)]
    twice = make_save_plan(rows, [(6,), (6,)]).plan
    (stream,) = twice.streams
    same = tuple(replace(part, axis_map=rows[0]) for part in stream.writes)
    refused(replace(twice, streams=(replace(stream, writes=same),)), "two rows have a part of w")


@pytest.mark.parametrize(("rows", "adds_up"), [([(0, 9), (9, 12)], True), ([(0, 12)], False), ([(0, 9)], False)])
def test_what_has_to_be_equal_is_read_in_the_same_pieces(rows: list[tuple[int, int]], adds_up: bool):
    def read(name: str, offset: int, pieces: list[tuple[int, int]]) -> list[Stream]:
        return [Stream(name, "float32", (12, 4), piece, (Contiguous(0, offset),), ()) for piece in pieces]

    streams = (*read("wte", 0, [(0, 9), (9, 12)]), *read("head", 192, rows))
    plan = Plan("test", "test", "test", (), streams, (), checks=(EqualityCheck("head", "wte"),))
    if adds_up:
        check(plan)
    else:
        refused(plan, "head and wte would not be compared")


def test_digests_alone_write_nothing():
    stream = Stream("w", "float32", (3, 4), (0, 3), (Contiguous(0, 8),), ())
    check(Plan("test", "test", "test", (), (stream,), ()))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_tensors_without_elements_add_up(shape: tuple[int, ...]):
    empty = Stream("e", "float32", shape, (0, shape[0]), (Contiguous(0, 0),), (Contiguous(0, 48),))
    full = Stream("w", "float32", (3, 4), (0, 3), (Contiguous(0, 0),), (Contiguous(0, 0),))
    check(Plan("test", "test", "test", (), (empty, full), ()))
