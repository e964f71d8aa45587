"""From tensors and targets to streams: rows that are true, rows of padding, rows that are made and rows that go."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.planning.accounting import TensorNames
from prepcli.planning.plan import Contiguous, Fill, Stream
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.streams import TensorTarget, VocabResize, build_streams, dropped_padding
from trainer.models.families.gpt_neo import FAMILY

MEAN = Fill("mean")


def source_of(*tensors: SourceTensor) -> Source:
    return Source("s", Path("s"), FAMILY, {}, TensorNames(FAMILY), tensors, (), (), (), None)


def tensor(name: str, *shape: int, digests: tuple[tuple[int, int, str], ...] = ()) -> SourceTensor:
    return SourceTensor(name, "float32", shape, (Contiguous(0, 8),), digests)


def cut(true: int, stored: int, *names: str) -> VocabResize:
    return VocabResize(Vocabulary(true, stored), names or ("wte", "head", "bias"), MEAN)


def rows_of(found: tuple[Stream, ...]) -> list[tuple[str, tuple[int, int], str]]:
    kinds = ["read" if stream.reads else stream.fill.kind if stream.fill else "nothing" for stream in found]
    return [(stream.name, stream.rows, kind) for stream, kind in zip(found, kinds)]


def to(rows: int) -> TensorTarget:
    return TensorTarget((Contiguous(0, 0),), rows)


def test_tensors_come_in_the_order_of_the_source_those_without_a_target_not_at_all():
    source = source_of(tensor("b", 3, 2), tensor("mask", 1, 1), tensor("a", 4), tensor("scalar"))
    found = build_streams(source, {"scalar": to(1), "a": to(4), "b": to(3)}, cut(9, 9))
    assert rows_of(found) == [("b", (0, 3), "read"), ("a", (0, 4), "read"), ("scalar", (0, 1), "read")]
    assert [stream.nbytes for stream in found] == [24, 16, 4]


@pytest.mark.parametrize(
    ("true", "stored", "rows", "expected"),
    [
        (9, 9, 9, [((0, 9), "read")]),
        (9, 9, 12, [((0, 9), "read"), ((9, 12), "mean")]),  # padded
        (9, 12, 12, [((0, 9), "read"), ((9, 12), "read")]),  # padding kept
        (9, 12, 9, [((0, 9), "read")]),  # padding taken off
        (9, 12, 10, [((0, 9), "read"), ((9, 10), "read")]),  # some of it
        (9, 12, 16, [((0, 9), "read"), ((9, 12), "read"), ((12, 16), "mean")]),  # more of it
    ],
)
def test_true_rows_padding_and_what_is_made(true: int, stored: int, rows: int, expected: list):
    source = source_of(tensor("wte", stored, 4))
    found = build_streams(source, {"wte": to(rows)}, cut(true, stored))
    assert rows_of(found) == [("wte", *each) for each in expected]
    assert {stream.shape for stream in found} == {(max(stored, rows), 4)}


def test_the_padding_of_a_bias_is_zeros():
    found = build_streams(source_of(tensor("bias", 9)), {"bias": to(12)}, cut(9, 9))
    assert rows_of(found) == [("bias", (0, 9), "read"), ("bias", (9, 12), "zeros")]


def test_padding_is_read_in_the_pieces_in_which_it_was_digested():
    pieces = ((0, 9, "a"), (9, 12, "b"), (12, 16, "c"))
    source = source_of(tensor("wte", 16, 4, digests=pieces))
    found = build_streams(source, {"wte": to(16)}, cut(9, 16))
    assert [stream.rows for stream in found] == [(0, 9), (9, 12), (12, 16)]
    fewer = build_streams(source, {"wte": to(14)}, cut(9, 16))
    assert [stream.rows for stream in fewer] == [(0, 9), (9, 12), (12, 14)]


def test_what_is_only_compared_is_read_in_the_same_pieces():
    source = source_of(tensor("wte", 12, 4), tensor("head", 12, 4))
    found = build_streams(source, {"wte": to(9)}, cut(9, 12), {"head"})
    assert [(stream.name, stream.rows, bool(stream.writes)) for stream in found] == [
        ("wte", (0, 9), True),
        ("head", (0, 9), False),
        ("head", (9, 12), False),
    ]


@given(st.integers(1, 20), st.integers(0, 6), st.integers(0, 12), st.lists(st.integers(0, 30), max_size=3))
def test_rows_of_a_vocabulary_are_whole_without_gaps(true: int, padding: int, more: int, edges: list[int]):
    stored, rows = true + padding, true + more
    pieces = tuple((low, low, "") for low in edges)
    found = build_streams(source_of(tensor("wte", stored, 4, digests=pieces)), {"wte": to(rows)}, cut(true, stored))
    assert [found[0].rows, found[-1].rows[1]] == [(0, true), rows]
    assert all(a.rows[1] == b.rows[0] for a, b in itertools.pairwise(found))
    assert all(low < high for low, high in (stream.rows for stream in found))
    assert all(bool(stream.reads) == (stream.rows[1] <= stored) for stream in found)


def test_rows_that_are_taken_off_are_named():
    source = source_of(tensor("wte", 12, 4), tensor("other", 12, 4), tensor("bias", 12))
    targets = {"wte": to(9), "other": to(12), "bias": to(9)}
    found = list(dropped_padding(source, targets, cut(9, 12)))
    assert [(d.name, d.rows, d.nbytes) for d in found] == [("wte", (9, 12), 48), ("bias", (9, 12), 12)]
    assert list(dropped_padding(source, {name: to(12) for name in targets}, cut(9, 12))) == []


def test_a_stream_counts_its_bytes():
    stream = Stream("w", "bfloat16", (7, 3, 2), (2, 5), (), ())
    assert (stream.row_nbytes, stream.byte_range, stream.nbytes) == (12, (24, 60), 36)
    assert stream.box == ((2, 5), (0, 3), (0, 2))
    scalar = replace(stream, shape=(), rows=(0, 1))
    assert (scalar.byte_range, scalar.box, math.prod(scalar.shape)) == ((0, 2), (), 1)
