from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from prepcli.core.worker_thread import WorkerThread, run_in_threads, wait_for_threads
from tests.helpers.interruptions import SimulatedSignal, run_interrupted
from tests.helpers.waiting import MAX_S, wait_until


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
