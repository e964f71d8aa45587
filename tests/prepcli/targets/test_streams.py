"""Streams from tensors and targets: true rows, padding rows, filled rows and dropped rows."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.engine.fills import Fill, fill_of
from prepcli.models.registry import FAMILIES
from prepcli.planning.plan import Stream
from prepcli.sources.source import Source, SourceTensor
from prepcli.sources.tensor_match import TensorNames, Vocabulary
from prepcli.targets.planner import TensorTarget, VocabResize, build_streams, dropped_padding
from tests.helpers.plans import flat

FAMILY = FAMILIES["gpt_neo"]
MEAN = Fill("mean")


def source_of(*tensors: SourceTensor) -> Source:
    return Source("s", Path("s"), FAMILY, {}, TensorNames(FAMILY), tensors, (), (), (), None)


def tensor(name: str, *shape: int, digests: tuple[tuple[int, int, str], ...] = ()) -> SourceTensor:
    return SourceTensor(name, "float32", shape, (flat("float32", shape, 8),), digests)


def cut(true: int, stored: int, *names: str) -> VocabResize:
    return VocabResize(Vocabulary(true, stored), names or ("wte", "head", "bias"), MEAN)


def rows_of(streams: tuple[Stream, ...]) -> list[tuple[str, tuple[int, int], str]]:
    kinds = [
        "read" if stream.reads else fill.kind if (fill := fill_of(stream)) else "nothing"
        for stream in streams
    ]
    return [(stream.name, stream.rows, kind) for stream, kind in zip(streams, kinds)]


def to(rows: int) -> TensorTarget:
    return TensorTarget((flat("float32", (rows,)),), rows)


def test_build_streams_follows_the_order_of_the_source():
    source = source_of(tensor("b", 3, 2), tensor("mask", 1, 1), tensor("a", 4), tensor("scalar"))
    streams = build_streams(source, {"scalar": to(1), "a": to(4), "b": to(3)}, resize=cut(9, 9))
    assert rows_of(streams) == [
        ("b", (0, 3), "read"),
        ("a", (0, 4), "read"),
        ("scalar", (0, 1), "read"),
    ]
    assert [stream.nbytes for stream in streams] == [24, 16, 4]


@pytest.mark.parametrize(
    ("true", "stored", "rows", "expected"),
    [
        (9, 9, 9, [((0, 9), "read")]),
        (9, 9, 12, [((0, 9), "read"), ((9, 12), "mean")]),  # padded
        (9, 12, 12, [((0, 9), "read"), ((9, 12), "read")]),  # padding kept
        (9, 12, 9, [((0, 9), "read")]),  # padding dropped
        (9, 12, 10, [((0, 9), "read"), ((9, 10), "read")]),  # some of it
        (9, 12, 16, [((0, 9), "read"), ((9, 12), "read"), ((12, 16), "mean")]),  # more of it
    ],
)
def test_build_streams_splits_true_padding_and_filled_rows(
    true: int, stored: int, rows: int, expected: list
):
    source = source_of(tensor("wte", stored, 4))
    streams = build_streams(source, {"wte": to(rows)}, resize=cut(true, stored))
    assert rows_of(streams) == [("wte", *row_range) for row_range in expected]
    assert {stream.shape for stream in streams} == {(max(stored, rows), 4)}


def test_build_streams_pads_a_bias_with_zeros():
    streams = build_streams(source_of(tensor("bias", 9)), {"bias": to(12)}, resize=cut(9, 9))
    assert rows_of(streams) == [("bias", (0, 9), "read"), ("bias", (9, 12), "zeros")]


def test_build_streams_splits_padding_by_digest():
    pieces = ((0, 9, "a"), (9, 12, "b"), (12, 16, "c"))
    source = source_of(tensor("wte", 16, 4, digests=pieces))
    streams = build_streams(source, {"wte": to(16)}, resize=cut(9, 16))
    assert [stream.rows for stream in streams] == [(0, 9), (9, 12), (12, 16)]
    fewer = build_streams(source, {"wte": to(14)}, resize=cut(9, 16))
    assert [stream.rows for stream in fewer] == [(0, 9), (9, 12), (12, 14)]


def test_build_streams_splits_tensors_read_for_comparison():
    # `head` is read only to be compared with `wte`. The output drops rows 9 to 12, the padding.
    source = source_of(tensor("wte", 12, 4), tensor("head", 12, 4))
    streams = build_streams(source, {"wte": to(9)}, resize=cut(9, 12), compared={"head"})
    assert [(stream.name, stream.rows, bool(stream.writes)) for stream in streams] == [
        ("wte", (0, 9), True),
        ("head", (0, 9), False),
        ("head", (9, 12), False),
    ]


@given(
    st.integers(1, 20),
    st.integers(0, 6),
    st.integers(0, 12),
    st.lists(st.integers(0, 30), max_size=3),
)
def test_build_streams_covers_all_rows_without_gaps(
    true: int, padding: int, more: int, edges: list[int]
):
    stored, rows = true + padding, true + more
    starts = [0, *sorted(low for low in edges if low <= stored)]
    pieces = tuple((low, high, "") for low, high in itertools.pairwise([*starts, stored]))
    streams = build_streams(
        source_of(tensor("wte", stored, 4, digests=pieces)),
        {"wte": to(rows)},
        resize=cut(true, stored),
    )
    assert [streams[0].rows, streams[-1].rows[1]] == [(0, true), rows]
    assert all(a.rows[1] == b.rows[0] for a, b in itertools.pairwise(streams))
    assert all(low < high for low, high in (stream.rows for stream in streams))
    assert all(bool(stream.reads) == (stream.rows[1] <= stored) for stream in streams)


def test_dropped_padding_returns_row_range_and_bytes():
    source = source_of(tensor("wte", 12, 4), tensor("other", 12, 4), tensor("bias", 12))
    targets = {"wte": to(9), "other": to(12), "bias": to(9)}
    dropped = list(dropped_padding(source, targets, resize=cut(9, 12)))
    assert [(d.name, d.rows, d.nbytes) for d in dropped] == [
        ("wte", (9, 12), 48),
        ("bias", (9, 12), 12),
    ]
    assert (
        list(dropped_padding(source, {name: to(12) for name in targets}, resize=cut(9, 12))) == []
    )


def test_stream_counts_its_bytes():
    stream = Stream("w", "bfloat16", (7, 3, 2), (2, 5), (), ())
    assert (stream.row_nbytes, stream.byte_range, stream.nbytes) == (12, (24, 60), 36)
    assert stream.box == ((2, 5), (0, 3), (0, 2))
    scalar = replace(stream, shape=(), rows=(0, 1))
    assert (scalar.byte_range, scalar.box, math.prod(scalar.shape)) == ((0, 2), (), 1)
