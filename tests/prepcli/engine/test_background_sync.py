"""Background sync: points become durable by time and by bytes, and are recorded afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.engine.background_sync import SYNC_INTERVAL_S, BackgroundSync, SyncPoint, UnitPart
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import Files
from tests.helpers.waiting import MAX_S


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
