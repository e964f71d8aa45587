"""Observers of operations: for commands, for Python callers, and for jobs of several processes."""

from __future__ import annotations

import io
import threading

import pytest

from prepcli.commands.console.notebook import run_observer_of
from prepcli.commands.console.ui import Ui
from prepcli.core.errors import STOPPED, PrepError
from prepcli.core.observer import (
    LINE_INTERVAL_S,
    CommandObserver,
    OneProcessObserver,
    PacedNotes,
    RecordingObserver,
    RunObserver,
    SilentCommandObserver,
    SilentObserver,
    StreamObserver,
    ticking,
)
from tests.helpers.waiting import MAX_S


def test_ui_is_an_observer_of_commands_runs_and_streams():
    ui = Ui("train", out=io.StringIO(), err=io.StringIO())
    assert run_observer_of(ui) is ui
    assert isinstance(ui, CommandObserver)
    assert isinstance(ui, StreamObserver)


@pytest.mark.parametrize("observer", [SilentObserver(), RecordingObserver(SilentObserver())])
def test_observer_of_a_caller_serves_every_process(observer: SilentObserver | RecordingObserver):
    adapter = run_observer_of(observer)
    assert isinstance(adapter, OneProcessObserver)
    assert isinstance(adapter, RunObserver)
    assert not isinstance(adapter, CommandObserver | StreamObserver)
    assert adapter.for_process(3) is adapter
    assert adapter.open_live_block() is None
    assert adapter.show_final_error(PrepError("stopped", code=STOPPED)) == STOPPED


def test_notes_and_warnings_of_a_run_reach_the_caller():
    recorder = RecordingObserver(SilentObserver())
    run_observer_of(recorder).warn("kernel fails")
    assert recorder.warnings == ["kernel fails"]


def test_silent_command_observer_is_a_command_observer():
    assert isinstance(SilentCommandObserver(command="export"), CommandObserver)


class Notes:
    """An observer that keeps the notes."""

    def __init__(self) -> None:
        self.lines = list[str]()

    def note(self, text: str, level: int = 0) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        raise AssertionError(text)

    def progress(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError("notes have no bar")


def make_notes() -> tuple[PacedNotes, Notes, list[float]]:
    observer, now = Notes(), [100.0]
    return PacedNotes(observer, clock=lambda: now[0]), observer, now  # pyright: ignore[reportArgumentType]


def test_tick_runs_while_the_main_thread_waits():
    has_ticked = threading.Event()
    with ticking(has_ticked.set, 0.001):
        assert has_ticked.wait(MAX_S)


def test_ticks_end_with_the_block():
    before = {*threading.enumerate()}
    has_ticked = threading.Event()
    with ticking(has_ticked.set, 0.001):
        has_ticked.wait(MAX_S)
    # Threads of other tests may end meanwhile.
    assert {*threading.enumerate()} <= before


def test_silent_task_is_named_within_ten_seconds():
    notes, observer, now = make_notes()
    notes.begin("compiling")
    for _ in range(25):
        notes.tick()
        now[0] += 1
    assert observer.lines == ["compiling, 9.0 s", "compiling, 18.0 s"]


def test_progress_has_the_remaining_time_of_the_task():
    notes, observer, now = make_notes()
    now[0] += 5
    notes.begin("evaluating text")
    for done in range(13):
        notes.on_progress(done, 40)
        now[0] += 1
    assert observer.lines == ["evaluating text: 4/40, 36 s left"]
    notes.begin("saving")
    now[0] += LINE_INTERVAL_S
    notes.tick()
    assert observer.lines[1:] == ["saving, 10.0 s"]


def test_event_defers_the_next_note_about_progress():
    notes, observer, now = make_notes()
    notes.begin("training")
    now[0] += 9
    notes.note("step 1")
    now[0] += 8
    notes.tick()
    now[0] += 1
    notes.tick()
    assert observer.lines == ["step 1", "training, 18.0 s"]
