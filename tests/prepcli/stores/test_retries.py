"""Tests of time-outs, of the throughput limit and of calls in daemon threads."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Iterator

import pytest

from prepcli.core.errors import USAGE, PrepError
from prepcli.stores.retries import (
    MIN_PROGRESS_NBYTES,
    RetryPolicy,
    call_with_timeout,
    enforce_throughput,
    map_in_daemon_threads,
    retry_policy_from_env,
)


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
