"""Writes: direct I/O or writeback, the limit of writeback, and syncs in the background."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.engine import write_policy
from prepcli.engine.background_sync import SYNC_INTERVAL_S, BackgroundSync, SyncPoint, UnitPart
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import Files
from prepcli.engine.write_policy import (
    MIN_MEASURED_NBYTES,
    TRIAL_NBYTES,
    TRIALS,
    Writeback,
    WriteMode,
    WritePolicy,
    allocate,
    finish_writeback,
    start_writeback,
)
from prepcli.planning.slabs import PAGE
from tests.helpers.waiting import MAX_S

RUN = 64 * PAGE
Call = tuple[str, int, int]  # started or finished, offset, bytes


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Record the writeback calls instead of making them."""
    recorded: list[Call] = []
    monkeypatch.setattr(
        write_policy, "start_writeback", lambda fd, offset, n: recorded.append(("start", offset, n))
    )
    monkeypatch.setattr(
        write_policy,
        "finish_writeback",
        lambda fd, offset, n: recorded.append(("finish", offset, n)),
    )
    return recorded


def modes(policy: WritePolicy, count: int, nbytes: int = TRIAL_NBYTES) -> list[WriteMode]:
    """Return the modes of the next writes."""
    modes_chosen = []
    for _ in range(count):
        with policy.writing(nbytes) as mode:
            modes_chosen.append(mode)
    return modes_chosen


def measured_policy(direct: list[float], writeback: list[float]) -> WritePolicy:
    """Return a policy after measurements in seconds per byte."""
    policy = WritePolicy(MIN_MEASURED_NBYTES)
    for seconds in zip(direct, writeback):
        for mode, seconds_per_byte in zip(WriteMode, seconds):
            policy.add_measurement(mode, seconds_per_byte)
    return policy


def test_small_outputs_use_direct_io_unmeasured():
    policy = WritePolicy(MIN_MEASURED_NBYTES - 1)
    assert set(modes(policy, 3 * TRIALS)) == {WriteMode.DIRECT}
    assert policy.needs_alignment


def test_large_outputs_alternate_write_modes_in_trials(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write_policy, "STOP_TRIALS_RATIO", float("inf"))
    policy = WritePolicy(MIN_MEASURED_NBYTES)
    assert modes(policy, 2 * TRIALS) == [WriteMode.DIRECT, WriteMode.WRITEBACK] * TRIALS
    assert len(set(modes(policy, 5))) == 1


def test_short_writes_are_not_measured():
    policy = WritePolicy(MIN_MEASURED_NBYTES)
    assert set(modes(policy, 9, TRIAL_NBYTES - 1)) == {WriteMode.DIRECT}
    assert modes(policy, 2) == [WriteMode.DIRECT, WriteMode.WRITEBACK]


def test_a_failed_write_is_not_measured():
    policy = WritePolicy(MIN_MEASURED_NBYTES)
    with pytest.raises(ValueError, match="no"), policy.writing(TRIAL_NBYTES):
        raise ValueError("no")
    assert modes(policy, 2) == [WriteMode.DIRECT, WriteMode.WRITEBACK]


@pytest.mark.parametrize(
    ("direct", "writeback", "expected"),
    [
        (
            [2.0, 2.0, 2.0],
            [3.0, 9.0, 1.0],
            WriteMode.WRITEBACK,
        ),  # other load only makes a disk slower, so the minimum counts
        ([9.0, 9.0, 2.0], [2.1, 2.1, 2.1], WriteMode.DIRECT),
        ([2.0, 2.0, 2.0], [1.9, 1.9, 1.9], WriteMode.DIRECT),  # not clearly faster
    ],
)
def test_policy_keeps_the_faster_mode(
    direct: list[float], writeback: list[float], expected: WriteMode
):
    policy = measured_policy(direct, writeback)
    assert set(modes(policy, 3)) == {expected}
    assert policy.needs_alignment is (expected is WriteMode.DIRECT)


def test_policy_tries_slow_writeback_once():
    policy = measured_policy([1.0], [2.1])
    assert set(modes(policy, 3)) == {WriteMode.DIRECT}
    assert modes(measured_policy([1.0], [1.9]), 2) == [WriteMode.DIRECT, WriteMode.WRITEBACK]


def test_policy_without_direct_io_uses_writeback():
    policy = WritePolicy(0, has_direct=False)
    assert set(modes(policy, 3, 1)) == {WriteMode.WRITEBACK}


def test_policy_without_writeback_uses_direct_io(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write_policy, "HAS_WRITEBACK", False)
    assert set(modes(WritePolicy(MIN_MEASURED_NBYTES), 9)) == {WriteMode.DIRECT}


def test_writeback_limits_the_bytes_in_flight(calls: list[Call]):
    writeback = Writeback(2 * RUN)
    for number in range(3):
        writeback.start(3, number * RUN, RUN)
    assert [name for name, *_ in calls] == ["start", "start", "start", "finish"]
    assert calls[-1] == ("finish", 0, RUN)
    writeback.drain()
    assert calls[-2:] == [("finish", RUN, RUN), ("finish", 2 * RUN, RUN)]


def test_writeback_starts_whole_pages_only(calls: list[Call]):
    Writeback().start(3, PAGE + 1, RUN)
    assert calls == [("start", 2 * PAGE, RUN - PAGE)]


def test_writeback_skips_partial_pages(calls: list[Call]):
    Writeback().start(3, 1, 2 * PAGE - 2)
    assert not calls


MIB = 1 << 20


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def failing(number: int) -> Callable[..., int]:
    """Return a system call that fails with an error number."""

    def call(*_: int) -> int:
        ctypes.set_errno(number)
        return -1

    return call


@pytest.mark.parametrize("is_btrfs", [False, True])
def test_allocate_reserves_disk_space_except_on_btrfs(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_btrfs: bool
):
    # On btrfs an extent would keep its disk space until the last of its blocks is shared with another file.
    command = ["stat", "--file-system", "--format=%t", tmp_path]
    file_system = int(subprocess.check_output(command), 16)
    monkeypatch.setattr(write_policy, "_BTRFS", file_system if is_btrfs else -1)
    allocate(fd, MIB)
    assert os.fstat(fd).st_size == MIB
    assert (os.fstat(fd).st_blocks * 512 >= MIB) is not is_btrfs
    assert os.pread(fd, MIB, 0) == bytes(MIB)


@pytest.mark.parametrize("nbytes", [0, 100, MIB])
def test_allocate_truncates_a_longer_file(fd: int, nbytes: int):
    os.pwrite(fd, b"x" * 2 * MIB, 0)
    allocate(fd, nbytes)
    assert os.pread(fd, 3 * MIB, 0) == b"x" * nbytes


@pytest.mark.parametrize("call", [None, failing(errno.EOPNOTSUPP), failing(errno.ENOSYS)])
def test_allocate_falls_back_without_support(fd: int, call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write_policy, "_fallocate", call)
    allocate(fd, MIB)
    assert os.fstat(fd).st_size == MIB


def test_allocate_reports_a_full_disk(fd: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write_policy, "_fallocate", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as raised:
        allocate(fd, MIB)
    assert raised.value.errno == errno.ENOSPC


def test_writeback_cleans_a_byte_range(fd: int):
    os.pwrite(fd, b"x" * MIB, 0)
    start_writeback(fd, 0, MIB)
    finish_writeback(fd, 0, MIB)
    assert os.pread(fd, MIB, 0) == b"x" * MIB


@pytest.mark.parametrize("call", [start_writeback, finish_writeback])
def test_writeback_reports_errors(call: Callable[[int, int, int], None]):
    with pytest.raises(OSError, match="Bad file descriptor"):
        call(-1, 0, MIB)


def test_start_writeback_repeats_an_interrupted_call(fd: int, monkeypatch: pytest.MonkeyPatch):
    results = iter([-1, 0])

    def interrupted(*_: int) -> int:
        ctypes.set_errno(errno.EINTR)
        return next(results)

    monkeypatch.setattr(write_policy, "_sync_file_range", interrupted)
    start_writeback(fd, 0, MIB)
    assert not list(results)


class Sink:
    """A sink whose `sync` blocks until `may_sync` is set."""

    def __init__(self) -> None:
        self.may_sync = threading.Event()
        self.may_sync.set()

    def sync(self) -> None:
        assert self.may_sync.wait(MAX_S)

    def check_unchanged(self) -> None:
        """Accept all files."""


class Clock:
    """A clock set by the test."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ignore_point(point: SyncPoint) -> None:
    """Ignore a point."""


def make_sync(
    sink: Any, clock: Clock, record: Callable[[SyncPoint], None] = ignore_point
) -> BackgroundSync:
    return BackgroundSync(sink, record, max_unsynced_nbytes=1000, clock=clock)


def test_sync_is_due_by_time_and_by_bytes():
    sink, clock = Sink(), Clock()
    sync = make_sync(sink, clock)
    assert not sync.is_due(999)
    assert sync.is_due(1000)
    clock.now_s = SYNC_INTERVAL_S
    assert sync.is_due(1)
    assert not sync.is_due(0)
    sink.may_sync.clear()
    sync.submit(SyncPoint((1,)))
    assert not sync.is_due(999), "the previous sync is still running"
    assert sync.is_due(1000)
    sink.may_sync.set()
    sync.finish(SyncPoint((2,)))


def test_sync_records_points_once_they_are_durable():
    sink = Sink()
    points: list[SyncPoint] = []
    sync = make_sync(sink, Clock(), points.append)
    sink.may_sync.clear()
    first = SyncPoint((5,), UnitPart(6, {0: StreamDigest("a", "a")}))
    sync.submit(first)
    assert not points
    sink.may_sync.set()
    last = SyncPoint((6,))
    sync.finish(last)
    assert points == [first, last]


def test_sync_raises_the_error_of_the_previous_sync(monkeypatch: pytest.MonkeyPatch):
    sink = Sink()
    points: list[SyncPoint] = []
    sync = make_sync(sink, Clock(), points.append)

    def fail() -> None:
        raise PrepError("the disk is gone")

    monkeypatch.setattr(sink, "sync", fail)
    sync.submit(SyncPoint((5,)))
    with pytest.raises(PrepError, match="the disk is gone"):
        sync.finish(SyncPoint((9,)))
    assert not points


def test_file_written_during_a_sync_is_part_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: list[int] = []
    with Files([tmp_path / "a", tmp_path / "b"], [4, 4]) as files:
        monkeypatch.setattr(
            "os.fdatasync", lambda fd: (synced.append(fd), files.write_bytes(1, b"b"))[0]
        )
        files.write_bytes(0, b"a")
        files.sync()
        monkeypatch.setattr("os.fdatasync", synced.append)
        files.sync()
    assert len(synced) == 2
