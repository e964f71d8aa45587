"""Byte ranges that arrive in pieces, late or never, the read-ahead cache, time-outs, and calls in daemon threads."""

from __future__ import annotations

import itertools
import pickle
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from prepcli.stores import byte_ranges
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import (
    DEFAULT_RETRY_POLICY,
    MIN_PROGRESS_NBYTES,
    READ_AHEAD_CACHE_NBYTES,
    ReadAheadCache,
    RemoteFile,
    RetryableError,
    RetryPolicy,
    call_with_timeout,
    enforce_throughput,
    map_in_daemon_threads,
    read_range,
    read_range_in_parallel,
    retry_policy_from_env,
)

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
    waits: list[float] = []
    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", waits.append)
    tries = byte_ranges.FailedTries(RetryPolicy(), stop)
    for retry_after_s in (0, 0, 0, 0, 0, 60, 1e9):
        assert tries.wait_for_next("reset", 0, retry_after_s=retry_after_s)
    assert waits == [1, 2, 4, 8, 16, 60, byte_ranges.MAX_RETRY_AFTER_S]
    assert not tries.wait_for_next("reset", 0)
    tries = byte_ranges.FailedTries(RetryPolicy(), stop, count=5)
    assert tries.wait_for_next("reset", 0)
    assert waits[-1] == byte_ranges.MAX_WAIT_S


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


def test_retry_policy_reads_timeout_variables():
    assert retry_policy_from_env({}, str).timeout_s == 10
    assert (
        retry_policy_from_env(
            {"PREP_TIMEOUT": "2.5", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}, str
        ).timeout_s
        == 2.5
    )
    assert retry_policy_from_env({"HF_HUB_DOWNLOAD_TIMEOUT": "60"}, str).timeout_s == 60


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "1e99"])
def test_retry_policy_rejects_invalid_timeouts(text: str):
    with pytest.raises(PrepError) as caught:
        retry_policy_from_env({"PREP_TIMEOUT": text}, str)
    assert caught.value.code == USAGE


def test_retry_policy_notes_each_retry():
    notes: list[str] = []
    policy = RetryPolicy(10.0, notes.append)
    for tries in (1, 2, 3):
        policy.report_retry("no answer from h for 10 s", policy.backoff_s(tries), tries=tries)
    assert notes == [
        "no answer from h for 10 s; trying again in 1 s (2 of 4)",
        "no answer from h for 10 s; trying again in 2 s (3 of 4)",
        "no answer from h for 10 s; trying again in 4 s (4 of 4)",
    ]


def test_retry_policy_pickles_without_note():
    assert pickle.loads(pickle.dumps(RetryPolicy(3.0, [].append))).timeout_s == 3.0


def test_call_with_timeout_abandons_a_late_call():
    release, late_calls = threading.Event(), list[str]()
    with pytest.raises(TimeoutError):
        call_with_timeout(
            release.wait, 0.04, on_late=lambda: late_calls.append("late"), late_s=0.02
        )
    release.set()
    assert late_calls == ["late"]


def test_call_with_timeout_returns_or_raises_like_the_call():
    assert call_with_timeout(lambda: 7, 30) == 7
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(lambda: 1 // 0, 30)


def test_map_in_daemon_threads_keeps_the_order():
    assert map_in_daemon_threads(lambda n: n * n, range(100), num_threads=4) == [
        n * n for n in range(100)
    ]
    assert map_in_daemon_threads(str, [], num_threads=4) == []


def test_map_in_daemon_threads_raises_immediately():
    release, started = threading.Event(), list[int]()

    def work(number: int) -> None:
        started.append(number)
        if number == 1:
            raise PrepError("gone")
        release.wait(30)

    with pytest.raises(PrepError, match="gone"):
        map_in_daemon_threads(work, range(10), num_threads=2)
    assert sorted(started) == [0, 1]
    release.set()


def chunk_per_second(chunk: bytes, clock: list[float]) -> Iterator[bytes]:
    while True:
        clock[0] += 1.0
        yield chunk


def test_enforce_throughput_rejects_a_slow_body():
    clock = [0.0]
    with pytest.raises(TimeoutError, match="fewer than 64 KiB came in 10 s"):
        for _ in enforce_throughput(chunk_per_second(b"x", clock), 10.0, lambda: clock[0]):
            pass
    assert clock[0] == 11.0


def test_enforce_throughput_allows_the_minimum_rate():
    clock = [0.0]
    chunks = enforce_throughput(
        chunk_per_second(bytes(MIN_PROGRESS_NBYTES // 8), clock), 10.0, lambda: clock[0]
    )
    assert sum(map(len, itertools.islice(chunks, 100))) == 100 * MIN_PROGRESS_NBYTES // 8


def test_enforce_throughput_ignores_time_in_the_consumer():
    clock = [0.0]
    for _ in enforce_throughput([b"x"] * 100, 10.0, lambda: clock[0]):
        clock[0] += 5.0
    assert clock[0] == 500.0, "every chunk was passed on"
