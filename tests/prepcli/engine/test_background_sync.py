"""Background sync: points become durable by time and by bytes, and are recorded afterwards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.engine.background_sync import SYNC_INTERVAL_S, BackgroundSync, SyncPoint
from prepcli.engine.files import Files
from prepcli.engine.journal import Journal, read_journal
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


def make_sync(path: Path, sink: Any, clock: Clock) -> BackgroundSync:
    return BackgroundSync(sink, Journal(path, "run"), max_unsynced_nbytes=1000, clock=clock)


def test_sync_is_due_by_time_and_by_bytes(tmp_path: Path):
    sink, clock = Sink(), Clock()
    sync = make_sync(tmp_path / "journal", sink, clock)
    assert not sync.is_due(999)
    assert sync.is_due(1000)
    clock.now_s = SYNC_INTERVAL_S
    assert sync.is_due(1)
    assert not sync.is_due(0)
    sink.may_sync.clear()
    sync.submit(SyncPoint(1))
    assert not sync.is_due(999), "the previous sync is still running"
    assert sync.is_due(1000)
    sink.may_sync.set()
    sync.finish(SyncPoint(2))


def test_sync_records_points_once_they_are_durable(tmp_path: Path):
    sink = Sink()
    sync = make_sync(tmp_path / "journal", sink, Clock())
    sink.may_sync.clear()
    sync.submit(SyncPoint(5, {0: "a"}))
    assert read_journal(tmp_path / "journal", "run").durable_nbytes == 0
    sink.may_sync.set()
    sync.finish(SyncPoint(9, {1: "b"}))
    state = read_journal(tmp_path / "journal", "run")
    assert (state.durable_nbytes, state.digests) == (9, {0: "a", 1: "b"})


def test_sync_raises_the_error_of_the_previous_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sink = Sink()
    sync = make_sync(tmp_path / "journal", sink, Clock())

    def fail() -> None:
        raise PrepError("the disk is gone")

    monkeypatch.setattr(sink, "sync", fail)
    sync.submit(SyncPoint(5, {0: "a"}))
    with pytest.raises(PrepError, match="the disk is gone"):
        sync.finish(SyncPoint(9))
    assert read_journal(tmp_path / "journal", "run").durable_nbytes == 0


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
