"""Ranges that come in pieces, late, or never; what is read ahead; and how much of it is kept."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.engine.files import ByteArray
from prepcli.errors import PrepError
from prepcli.remote import remote_files
from prepcli.remote.remote_files import (
    READ_AHEAD_CACHE_NBYTES,
    ReadAheadCache,
    RemoteBlob,
    RemoteFile,
    RetryableError,
    read_range,
    read_range_in_parallel,
)
from prepcli.remote.retries import DEFAULT_RETRY_POLICY, RetryPolicy

CONTENT = np.random.default_rng(0).integers(0, 256, 9 << 20, np.uint8)


@dataclass
class Script:
    """Answers in memory: every request takes the next of `answers`, an error or the most bytes that come."""

    answers: list[int | Exception] = field(default_factory=list)
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    name: str = "o/model"
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        self.asked.append((file.path, offset, into.size))
        answer = self.answers.pop(0) if self.answers else into.size
        if isinstance(answer, Exception):
            raise answer
        count = min(answer, into.size)
        into[:count] = CONTENT[offset : offset + count]
        return count


FILE = RemoteFile("w", CONTENT.size, "sha256:0")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "FIRST_WAIT_S", 0.0)


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.just(RetryableError("down")), st.integers(0, 300_000)), max_size=7),
    st.integers(0, CONTENT.size - 1),
    st.integers(1, 200_000),
)
def test_a_range_is_filled_whatever_single_requests_bring(answers, offset, size):
    size = min(size, CONTENT.size - offset)
    into = np.zeros(size, np.uint8)
    read_range(Script(list(answers)), FILE, offset, into)
    assert (into == CONTENT[offset : offset + size]).all()


def test_what_came_is_not_asked_for_again():
    ranges = Script([100_000, RetryableError("reset"), 70_000])
    read_range(ranges, FILE, 5, np.zeros(200_000, np.uint8))
    assert ranges.asked == [("w", 5, 200_000), ("w", 100_005, 100_000), ("w", 100_005, 100_000), ("w", 170_005, 30_000)]


def test_after_eight_tries_in_a_row_it_is_an_error_that_says_what_happened_last():
    ranges = Script([RetryableError("the server says 503")] * 8)
    with pytest.raises(PrepError) as caught:
        read_range(ranges, FILE, 0, np.zeros(10, np.uint8))
    assert (caught.value.what, caught.value.why) == (
        "cannot read w of o/model",
        "8 tries in a row failed: the server says 503",
    )
    assert len(ranges.asked) == 8


def test_a_trickle_is_no_progress():
    with pytest.raises(PrepError, match="8 tries in a row failed: the answers are cut short"):
        read_range(Script([1] * 50), FILE, 0, np.zeros(1 << 20, np.uint8))


def test_progress_gives_new_tries():
    answers: list[int | Exception] = []
    for _ in range(5):
        answers += [*[RetryableError("reset")] * 7, 100_000]
    into = np.zeros(500_000, np.uint8)
    read_range(Script(answers), FILE, 0, into)
    assert (into == CONTENT[:500_000]).all()


def test_waits_grow_and_a_server_that_asks_for_longer_is_left_alone(monkeypatch):
    monkeypatch.setattr(remote_files, "FIRST_WAIT_S", 1.0)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    waits = [remote_files._wait_s(tries, RetryableError("")) for tries in range(1, 8)]
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert remote_files._wait_s(1, RetryableError("", 60)) == 60
    assert remote_files._wait_s(1, RetryableError("", 1e9)) == remote_files.MAX_RETRY_AFTER_S


def test_a_large_run_is_asked_for_in_parts_at_once():
    ranges, into = Script(), np.zeros(CONTENT.size, np.uint8)
    read_range_in_parallel(ranges, FILE, 0, into)
    assert len(ranges.asked) == 2
    assert (into == CONTENT).all()


def test_an_error_of_a_part_is_that_of_the_whole():
    with pytest.raises(PrepError, match="gone"):
        read_range_in_parallel(
            Script([PrepError("gone"), PrepError("gone")]), FILE, 0, np.zeros(CONTENT.size, np.uint8)
        )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, CONTENT.size), st.integers(0, 1_500_000)),
        max_size=60,
    )
)
def test_whatever_is_read_in_whatever_order_is_the_content_and_little_is_kept(reads):
    ahead = ReadAheadCache(Script())
    for path, offset, size in reads:
        size = min(size, CONTENT.size - offset)
        into = np.zeros(size, np.uint8)
        ahead.read(RemoteFile(path, CONTENT.size, ""), offset, into)
        assert (into == CONTENT[offset : offset + size]).all()
        assert sum(piece.data.size for piece in ahead._pieces) <= READ_AHEAD_CACHE_NBYTES


def test_small_runs_one_after_another_make_few_requests():
    ranges = Script()
    ahead, into = ReadAheadCache(ranges), np.zeros(4096, np.uint8)
    for offset in range(0, CONTENT.size, 4096):
        ahead.read(FILE, offset, into)
        assert (into == CONTENT[offset : offset + 4096]).all()
    assert len(ranges.asked) <= 10
    assert sum(size for _, _, size in ranges.asked) == CONTENT.size


def test_runs_of_several_places_in_turn_do_not_push_each_other_out():
    ranges = Script()
    ahead, into = ReadAheadCache(ranges), np.zeros(1024, np.uint8)
    for row in range(64):
        for place in range(8):
            ahead.read(FILE, place * (1 << 20) + row * 1024, into)
    assert len(ranges.asked) == 8


def test_what_lies_beyond_the_end_is_an_error():
    with pytest.raises(PrepError, match="is cut short"):
        ReadAheadCache(Script()).read(FILE, CONTENT.size - 1, np.zeros(2, np.uint8))


def test_a_blob_can_go_to_another_process():
    blob = pickle.loads(pickle.dumps(RemoteBlob(FILE, ReadAheadCache(Script()))))
    opened, into = blob.open(), np.zeros(100, np.uint8)
    opened.read_at(7, into)
    opened.close()
    assert blob.name == "w"
    assert (into == CONTENT[7:107]).all()
