"""What was written becomes durable by time as well as by bytes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from prepcli.engine.background_sync import SYNC_INTERVAL_S, BackgroundSync, SyncPoint
from prepcli.engine.files import Files
from prepcli.engine.journal import Journal, read_journal
from prepcli.errors import PrepError


class Sink:
    """A sink whose sync waits until it may go on."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.may.set()

    def sync(self) -> None:
        assert self.may.wait(10)

    def check_unchanged(self) -> None:
        """Nothing is lost."""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made(path: Path, sink: Any, clock: Clock) -> BackgroundSync:
    return BackgroundSync(sink, Journal(path, "run"), 1000, clock=clock)


def test_marks_are_due_by_time_and_by_bytes(tmp_path: Path):
    sink, clock = Sink(), Clock()
    marks = made(tmp_path / "journal", sink, clock)
    assert not marks.is_due(999)
    assert marks.is_due(1000)
    clock.now_s = SYNC_INTERVAL_S
    assert marks.is_due(1)
    assert not marks.is_due(0)
    sink.may.clear()
    marks.submit(SyncPoint(1))
    assert not marks.is_due(999), "the sync before is not over"
    assert marks.is_due(1000)
    sink.may.set()
    marks.finish(SyncPoint(2))


def test_marks_are_journalled_once_they_are_durable(tmp_path: Path):
    sink = Sink()
    marks = made(tmp_path / "journal", sink, Clock())
    sink.may.clear()
    marks.submit(SyncPoint(5, {0: "a"}))
    assert read_journal(tmp_path / "journal", "run").durable_nbytes == 0
    sink.may.set()
    marks.finish(SyncPoint(9, {1: "b"}))
    found = read_journal(tmp_path / "journal", "run")
    assert (found.durable_nbytes, found.digests) == (9, {0: "a", 1: "b"})


def test_marks_raise_what_a_sync_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sink = Sink()
    marks = made(tmp_path / "journal", sink, Clock())

    def fail() -> None:
        raise PrepError("the disk is gone")

    monkeypatch.setattr(sink, "sync", fail)
    marks.submit(SyncPoint(5, {0: "a"}))
    with pytest.raises(PrepError, match="the disk is gone"):
        marks.finish(SyncPoint(9))
    assert read_journal(tmp_path / "journal", "run").durable_nbytes == 0


def test_sync_beside_a_writer_loses_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    with Files([tmp_path / "a", tmp_path / "b"], [4, 4]) as files:
        monkeypatch.setattr("os.fdatasync", lambda fd: (synced.append(fd), files.write_bytes(1, b"b"))[0])
        files.write_bytes(0, b"a")
        files.sync()
        monkeypatch.setattr("os.fdatasync", synced.append)
        files.sync()
    assert len(synced) == 2
