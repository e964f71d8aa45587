"""Failure notes in a folder that another user can write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.execution.failure_notes import FailureAge, FailureNotes
from prepcli.planning.shares import Share


def make_notes(folder: Path, index: int) -> FailureNotes:
    return FailureNotes(folder, "plan", share=Share(2, index))


def fail(notes: FailureNotes) -> None:
    with pytest.raises(PrepError, match="broken"), notes.recording_errors():
        raise PrepError("broken", "a reason")


def test_failure_is_found_by_another_process(tmp_path: Path):
    reader = make_notes(tmp_path, 0)
    fail(make_notes(tmp_path, 1))
    failure = reader.find(1)
    assert failure is not None
    assert (failure.age, failure.error.what) == (FailureAge.NEW, "process 1 failed: broken")


@pytest.mark.parametrize("name", ["failed.1", "heard.0"])
def test_fifo_is_not_read_as_a_failure_note(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    notes = make_notes(tmp_path, 0)
    assert notes.find(1) is None
    notes.record_heard()


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_failure_is_raised_if_its_note_cannot_be_written(tmp_path: Path, kind: str):
    notes = make_notes(tmp_path, 1)
    for name in ("new.failed.1", "failed.1"):
        if kind == "fifo":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).symlink_to("target")
    fail(notes)
    assert not (tmp_path / "target").exists()
