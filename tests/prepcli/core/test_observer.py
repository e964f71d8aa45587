"""Observers of operations, for commands, Python callers and jobs, and threads that work for the main thread."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

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
from prepcli.core.worker_thread import WorkerThread, run_in_threads, wait_for_threads
from tests.helpers.interruptions import SimulatedSignal, run_interrupted
from tests.helpers.waiting import MAX_S, wait_until


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


def test_calls_run_in_order_and_stop_ends_the_thread():
    thread, numbers, ids = WorkerThread(), list[int](), list[int]()
    for number in range(100):
        thread.submit(lambda number=number: numbers.append(number))
    thread.submit(lambda: ids.append(threading.get_ident()))
    thread.drain()
    assert numbers == list(range(100))
    assert ids[0] in sys._current_frames()
    thread.stop()
    wait_until(lambda: ids[0] not in sys._current_frames())


def test_error_of_a_call_is_kept_and_later_calls_run():
    thread, numbers = WorkerThread(), list[int]()
    thread.submit(lambda: numbers[5])
    thread.submit(lambda: numbers.append(1))
    wait_for_threads([thread], on_interruption=lambda error: None)
    assert numbers == [1]
    assert [type(error) for error in thread.errors] == [IndexError]


def test_run_in_threads_returns_errors_of_all_threads():
    counter = itertools.count()

    def fail_twice() -> None:
        if (number := next(counter)) < 2:
            raise ValueError(number)

    errors = run_in_threads(fail_twice, 4, on_interruption=lambda: None)
    assert sorted(map(str, errors)) == ["0", "1"]
    assert next(counter) == 4


# The warning is about errors in callbacks of weak references.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_run_in_threads_waits_for_its_calls():
    running: list[int] = []
    stops: list[bool] = []  # no Event: its lock could stay acquired

    def work() -> None:
        running.append(1)
        end_s = time.monotonic() + 0.02
        while not stops and time.monotonic() < end_s:
            time.sleep(0.001)
        time.sleep(0.005)
        running.pop()

    def run(errors: list[BaseException]) -> None:
        errors += run_in_threads(work, 2, on_interruption=lambda: stops.append(True))

    at, is_reached = -1, True
    while is_reached:
        at += 1
        stops.clear()
        errors: list[BaseException] = []
        ended = run_interrupted(lambda errors=errors: run(errors), at)
        is_reached = ended.num_events > at
        assert not running, f"a call still runs after an exception at event {at}"
        assert all(isinstance(error, SimulatedSignal | None) for error in (*errors, ended.error))
    assert at > 20


# Ctrl-C ends the wait for a call, which then runs at the exit of the interpreter.
ABANDONED_CALL = """
import os, signal, sys, threading
from prepcli.core.worker_thread import run_abandonable
from tests.helpers.waiting import wait_until_asleep

signal.signal(signal.SIGINT, signal.default_int_handler)
may_end = threading.Event()

def call():
    # A signal just before the main thread waits does not end its wait.
    wait_until_asleep(os.getpid())
    os.kill(os.getpid(), signal.SIGINT)
    may_end.wait()
    print("the call has ended")

try:
    run_abandonable(call)
except KeyboardInterrupt:
    timer = threading.Timer(0.2, may_end.set)
    timer.daemon = True
    timer.start()
    sys.exit(3)
"""


def test_exit_waits_for_an_abandoned_call():
    """Otherwise the interpreter destroys what a compiler uses, and the process aborts."""
    process = subprocess.run(
        [sys.executable, "-c", ABANDONED_CALL],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=MAX_S,
        check=False,
    )
    assert (process.returncode, process.stderr) == (3, "")
    assert process.stdout == "the call has ended\n"
