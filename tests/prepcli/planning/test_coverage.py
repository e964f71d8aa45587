"""Coverage: a plan that omits, repeats or invents a byte is rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.grids import ChunkGrid, StridedChunks
from prepcli.algebra.rows import parse_row
from prepcli.core.errors import PrepError
from prepcli.engine.fills import Fill
from prepcli.planning import coverage
from prepcli.planning.arrays import Array, MappedArray
from prepcli.planning.plan import (
    EqualityCheck,
    OutputFile,
    OutputLeaf,
    PlacedChunks,
    Plan,
    Stream,
)
from tests.helpers.plans import dividing_chunks, flat, make_save_plan, reverse_streams
from tests.helpers.strategies import complete_tables

LIMIT = 64
SIZES = {"vocab": 12, "embed": 4, "q": 6, "kv": 4}


def check(plan: Plan, limit: int = LIMIT) -> None:
    coverage.check(plan, limit)


def check_fails(plan: Plan, reason: str) -> None:
    with pytest.raises(PrepError, match="the plan is inconsistent") as raised:
        check(plan)
    assert reason in raised.value.why
    assert "nothing was written" in raised.value.hint


@given(complete_tables(), st.data())
def test_check_accepts_complete_plans_in_both_directions(rows: tuple[AxisMap, ...], data):
    save_plan = make_save_plan(rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows])
    limit = data.draw(st.integers(4, 200))
    check(save_plan.plan, limit)
    check(
        replace(save_plan.plan, streams=reverse_streams(save_plan.plan.streams), leaves=()), limit
    )


def reversed_plan(plan: Plan) -> Plan:
    """Return the plan of the way back."""
    return replace(plan, streams=reverse_streams(plan.streams), leaves=())


def padded_vocab_plan(rows: int = 12) -> Plan:
    """Return a plan that saves an embedding of 9 rows to a leaf of 12 rows, the last 3 of them filled."""
    row = bind_row(parse_row("vocab embed <- wte: vocab embed"), SIZES)
    grid = ChunkGrid((12, 4), (4, 2))
    chunks = StridedChunks(0, 0, (0, 0), (64, 32))
    region = MappedArray(row, (), Array("wte", "float32", grid.shape, grid.chunk_shape, chunks))
    true_rows = Stream("wte", "float32", (12, 4), (0, 9), (flat("float32", (12, 4)),), (region,))
    padding = replace(true_rows, rows=(9, rows), reads=(), operations=(Fill("zeros"),))
    leaves = (OutputLeaf(("wte",), "float32", grid, (PlacedChunks((0, 0), (3, 2), chunks),)),)
    return Plan("test", "test", "test", (), (true_rows, padding), (), leaves=leaves)


def test_check_accepts_padding_to_whole_chunks():
    check(padded_vocab_plan())
    check_fails(padded_vocab_plan(11), "bytes written: file 0")


@pytest.mark.parametrize(
    ("file", "spans"),
    [
        (OutputFile("d/data", 192), []),
        (OutputFile("d/data", 200), [(0, 192, 200)]),
        (
            OutputFile("d/data", 200, constant_ranges=((194, b"ab"),)),
            [(0, 192, 194), (0, 196, 200)],
        ),
    ],
)
def test_unwritten_spans_are_the_gaps_of_the_files(
    file: OutputFile, spans: list[coverage.FileSpan]
):
    """The chunks of `padded_vocab_plan` fill the first 192 bytes."""
    plan = replace(padded_vocab_plan(), files=(file,))
    assert [*coverage.unwritten_spans(plan)] == spans


def test_check_accepts_padding_of_contiguous_tensor():
    true_rows = Stream(
        "wte", "float32", (12, 4), (0, 9), (flat("float32", (12, 4)),), (flat("float32", (12, 4)),)
    )
    padding = replace(true_rows, rows=(9, 12), reads=(), operations=(Fill("zeros"),))
    check(Plan("test", "test", "test", (), (true_rows, padding), ()))
    check_fails(
        Plan("test", "test", "test", (), (true_rows, replace(padding, rows=(8, 12))), ()),
        "would be written twice",
    )


def test_check_rejects_stream_without_source():
    plan = padded_vocab_plan()
    unfilled = replace(plan.streams[1], operations=())
    check_fails(
        replace(plan, streams=(plan.streams[0], unfilled)), "wte is neither read nor filled"
    )


def two_leaves() -> Plan:
    rows = [
        bind_row(parse_row(f"{a} embed <- w: ({parts}) embed"), SIZES)
        for a, parts in (("q", ">q | kv"), ("kv", "q | >kv"))
    ]
    return make_save_plan(rows, [(3, 4), (4, 2)]).plan


def without_a_chunk(plan: Plan) -> Plan:
    box = plan.leaves[0].placed_chunks[0]
    shorter = replace(
        plan.leaves[0], placed_chunks=(replace(box, stop=(box.stop[0] - 1, box.stop[1])),)
    )
    return replace(plan, leaves=(shorter, *plan.leaves[1:]))


def with_a_chunk_twice(plan: Plan) -> Plan:
    box = plan.leaves[0].placed_chunks[0]
    rest = replace(box, first=(0, 0), stop=(1, 1))
    return replace(
        plan, leaves=(replace(plan.leaves[0], placed_chunks=(box, rest)), *plan.leaves[1:])
    )


def with_overlapping_leaves(plan: Plan) -> Plan:
    box = plan.leaves[1].placed_chunks[0]
    moved = replace(box, chunks=plan.leaves[0].placed_chunks[0].chunks)
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


DAMAGES: dict[Callable[[Plan], Plan], str] = {
    without_a_chunk: "leaf0 has 2 chunks, the plan places 1",
    with_a_chunk_twice: "leaf0 has 2 chunks, the plan places 3",
    with_overlapping_leaves: "would be written twice",
    without_a_leaf: "bytes written: file 0",
    without_a_region: "w: the slab at byte 48 has 64 bytes, its writes have 48",
    without_a_stream: "bytes written: nothing where file 0",
    read_twice: "would be read twice",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_check_rejects_damaged_plan(damage: Callable[[Plan], Plan]):
    check(two_leaves())
    check_fails(damage(two_leaves()), DAMAGES[damage])


def test_check_rejects_a_slab_with_incomplete_reads():
    plan = two_leaves()
    (stream,) = reverse_streams(plan.streams)
    check(replace(plan, streams=(stream,), leaves=()))
    partial = replace(stream, reads=stream.reads[1:])
    check_fails(
        replace(plan, streams=(partial,), leaves=()),
        "w: the slab at byte 0 has 64 bytes, its reads have",
    )


@pytest.mark.parametrize("fixed_range", [(0, 0), (2, 2)])
def test_check_rejects_two_rows_over_the_same_part(fixed_range: tuple[int, int]):
    rows = [
        bind_row(
            parse_row(f"q <- w: (qkv={i} q)"), SIZES | {"qkv": 2 if fixed_range == (0, 0) else 3}
        )
        for i in (0, 1)
    ]
    twice = make_save_plan(rows, [(6,), (6,)]).plan
    (stream,) = twice.streams
    same = tuple(replace(region, axis_map=rows[0]) for region in stream.writes)
    check_fails(
        replace(twice, streams=(replace(stream, writes=same),)), "two rows map the same part of w"
    )


@pytest.mark.parametrize(
    ("rows", "is_valid"), [([(0, 9), (9, 12)], True), ([(0, 12)], False), ([(0, 9)], False)]
)
def test_check_requires_tied_tensors_in_equal_row_ranges(
    rows: list[tuple[int, int]], is_valid: bool
):
    def read(name: str, offset: int, pieces: list[tuple[int, int]]) -> list[Stream]:
        return [
            Stream(name, "float32", (12, 4), piece, (flat("float32", (12, 4), offset),), ())
            for piece in pieces
        ]

    streams = (*read("wte", 0, [(0, 9), (9, 12)]), *read("head", 192, rows))
    plan = Plan("test", "test", "test", (), streams, (), checks=(EqualityCheck("head", "wte"),))
    if is_valid:
        check(plan)
    else:
        check_fails(plan, "head and wte would not be compared")


def test_check_accepts_plan_that_only_digests():
    stream = Stream("w", "float32", (3, 4), (0, 3), (flat("float32", (3, 4), 8),), ())
    check(Plan("test", "test", "test", (), (stream,), ()))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_check_accepts_empty_tensors(shape: tuple[int, ...]):
    empty = Stream(
        "e",
        "float32",
        shape,
        (0, shape[0]),
        (flat("float32", shape),),
        (flat("float32", shape, 48),),
    )
    full = Stream(
        "w", "float32", (3, 4), (0, 3), (flat("float32", (3, 4)),), (flat("float32", (3, 4)),)
    )
    check(Plan("test", "test", "test", (), (empty, full), ()))


# The slabs of 404 bytes end within heads. EasyLM stores the elements of a head in such an order.
@pytest.mark.parametrize("direction", [lambda plan: plan, reversed_plan])
def test_runs_of_a_permutation_are_joined_across_slabs(
    direction: Callable[[Plan], Plan], monkeypatch: pytest.MonkeyPatch
):
    sizes = {"embed": 200, "heads": 3, "half": 2, "pair": 8}
    text = "embed heads pair half <- w: (heads half pair) embed"
    row = bind_row(parse_row(text), sizes)
    plan = direction(make_save_plan((row,), [(200, 3, 8, 2)]).plan)
    expanded: list[int] = []
    run_spans = coverage._run_spans

    def count(*run: Any) -> Iterator[coverage.FileSpan]:
        spans = list(run_spans(*run))
        expanded.append(len(spans))
        return iter(spans)

    monkeypatch.setattr(coverage, "_run_spans", count)
    check(plan, 40 * 404)
    # Without joins there is one range per value: 9,600.
    assert sum(expanded) < 1500
