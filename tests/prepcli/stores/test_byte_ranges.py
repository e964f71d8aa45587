"""Tests of byte ranges that arrive in pieces, late or never, and of the read-ahead cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.stores import byte_ranges
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import (
    READ_AHEAD_CACHE_NBYTES,
    ReadAheadCache,
    RemoteFile,
    RetryableError,
    read_range,
    read_range_in_parallel,
)
from prepcli.stores.retries import DEFAULT_RETRY_POLICY, RetryPolicy

CONTENT = np.random.default_rng(0).integers(0, 256, 9 << 20, np.uint8)


@dataclass
class ScriptedReader:
    """Fake range reader: each request takes the next of `answers`, an error or the maximum of bytes to return."""

    answers: list[int | Exception] = field(default_factory=list)
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    name: str = "o/model"
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        self.requests.append((file.path, offset, into.size))
        answer = self.answers.pop(0) if self.answers else into.size
        if isinstance(answer, Exception):
            raise answer
        count = min(answer, into.size)
        into[:count] = CONTENT[offset : offset + count]
        return count


FILE = RemoteFile("w", CONTENT.size, "sha256:0")


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.0)


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.just(RetryableError("down")), st.integers(0, 300_000)), max_size=7),
    st.integers(0, CONTENT.size - 1),
    st.integers(1, 200_000),
)
def test_read_range_fills_the_buffer_from_partial_answers(answers, offset, size):
    size = min(size, CONTENT.size - offset)
    into = np.zeros(size, np.uint8)
    read_range(ScriptedReader(list(answers)), FILE, offset=offset, into=into)
    assert (into == CONTENT[offset : offset + size]).all()


def test_read_range_requests_only_missing_bytes():
    reader = ScriptedReader([100_000, RetryableError("reset"), 70_000])
    read_range(reader, FILE, offset=5, into=np.zeros(200_000, np.uint8))
    assert reader.requests == [
        ("w", 5, 200_000),
        ("w", 100_005, 100_000),
        ("w", 100_005, 100_000),
        ("w", 170_005, 30_000),
    ]


def test_read_range_gives_up_after_eight_tries():
    reader = ScriptedReader([RetryableError("HTTP 503 from the server")] * 8)
    with pytest.raises(PrepError) as caught:
        read_range(reader, FILE, offset=0, into=np.zeros(10, np.uint8))
    assert (caught.value.what, caught.value.why) == (
        "cannot read w of o/model",
        "8 tries in a row failed: HTTP 503 from the server",
    )
    assert len(reader.requests) == 8


def test_read_range_gives_up_on_tiny_answers():
    with pytest.raises(PrepError, match="8 tries in a row failed: the answers are cut short"):
        read_range(ScriptedReader([1] * 50), FILE, offset=0, into=np.zeros(1 << 20, np.uint8))


def test_read_range_resets_tries_after_progress():
    answers: list[int | Exception] = []
    for _ in range(5):
        answers += [*[RetryableError("reset")] * 7, 100_000]
    into = np.zeros(500_000, np.uint8)
    read_range(ScriptedReader(answers), FILE, offset=0, into=into)
    assert (into == CONTENT[:500_000]).all()


def test_backoff_grows_and_respects_retry_after(monkeypatch):
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 1.0)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    waits = [byte_ranges._backoff_s(tries, RetryableError("")) for tries in range(1, 8)]
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert byte_ranges._backoff_s(1, RetryableError("", 60)) == 60
    assert byte_ranges._backoff_s(1, RetryableError("", 1e9)) == byte_ranges.MAX_RETRY_AFTER_S


def test_read_range_in_parallel_splits_large_reads():
    reader, into = ScriptedReader(), np.zeros(CONTENT.size, np.uint8)
    read_range_in_parallel(reader, FILE, offset=0, into=into)
    assert len(reader.requests) == 2
    assert (into == CONTENT).all()


def test_read_range_in_parallel_raises_errors_of_a_part():
    with pytest.raises(PrepError, match="gone"):
        read_range_in_parallel(
            ScriptedReader([PrepError("gone"), PrepError("gone")]),
            FILE,
            offset=0,
            into=np.zeros(CONTENT.size, np.uint8),
        )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.integers(0, CONTENT.size),
            st.integers(0, 1_500_000),
        ),
        max_size=60,
    )
)
def test_cache_returns_the_content_and_stays_small(reads):
    cache = ReadAheadCache(ScriptedReader())
    for path, offset, size in reads:
        size = min(size, CONTENT.size - offset)
        into = np.zeros(size, np.uint8)
        cache.read(RemoteFile(path, CONTENT.size, ""), offset, into)
        assert (into == CONTENT[offset : offset + size]).all()
        assert sum(cached.data.size for cached in cache._cached_ranges) <= READ_AHEAD_CACHE_NBYTES


def test_cache_reads_ahead_for_sequential_runs():
    reader = ScriptedReader()
    cache, into = ReadAheadCache(reader), np.zeros(4096, np.uint8)
    for offset in range(0, CONTENT.size, 4096):
        cache.read(FILE, offset, into)
        assert (into == CONTENT[offset : offset + 4096]).all()
    assert len(reader.requests) <= 10
    assert sum(size for _, _, size in reader.requests) == CONTENT.size


def test_cache_keeps_several_sequential_readers():
    reader = ScriptedReader()
    cache, into = ReadAheadCache(reader), np.zeros(1024, np.uint8)
    for row in range(64):
        for place in range(8):
            cache.read(FILE, place * (1 << 20) + row * 1024, into)
    assert len(reader.requests) == 8


def test_large_read_requests_no_cached_bytes():
    reader = ScriptedReader()
    cache = ReadAheadCache(reader)
    cache.read(FILE, 0, np.zeros(1000, np.uint8))
    into = np.zeros(1 << 20, np.uint8)
    cache.read(FILE, 1000, into)
    assert (into == CONTENT[1000 : 1000 + into.size]).all()
    cached_nbytes = byte_ranges.MIN_READ_AHEAD_NBYTES
    assert reader.requests == [
        ("w", 0, cached_nbytes),
        ("w", cached_nbytes, 1000 + into.size - cached_nbytes),
    ]


def test_cache_rejects_reads_beyond_the_end():
    with pytest.raises(PrepError, match="is cut short"):
        ReadAheadCache(ScriptedReader()).read(FILE, CONTENT.size - 1, np.zeros(2, np.uint8))
