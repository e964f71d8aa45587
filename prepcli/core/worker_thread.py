"""Threads that run calls in order, and are safe against exceptions of signals in the main thread.

Python may raise the exception of a signal, such as KeyboardInterrupt, in the main thread between any two bytecodes.
Inside a lock written in Python (`threading.Condition`, and with it `ThreadPoolExecutor.submit` and `Future.result`) the
exception can leave the lock acquired, and another thread then waits for it forever. After an interrupted `Thread.join`,
a running thread counts as ended. The main thread and its worker threads therefore share only `queue.SimpleQueue`, which
is written in C, and threads are started without `threading.Thread`: its `start` waits for such a lock.
"""

from __future__ import annotations

import _thread
import atexit
import os
import queue
import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from prepcli.core.errors import INTERRUPTED

ResultT = TypeVar("ResultT")

# Python threads have the stack of the process limit, or 2 MiB if there is no limit, as on many clusters. Compilers
# recurse deeper.
COMPILER_STACK_NBYTES = 64 << 20
# Seconds between two looks at the running calls
ABANDONED_POLL_S = 0.05
# Running calls of `run_abandonable`.
_running: list[Callable[[], object]] = []

_Calls = queue.SimpleQueue[Callable[[], object] | None]


class WorkerThread:
    """A thread that runs calls in the order of their submission. It does not keep the process from ending.

    Attributes:
        errors: Exceptions of the calls. The thread continues with the next call.
    """

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._calls: _Calls = queue.SimpleQueue()
        _thread.start_new_thread(_run_calls, (self._calls, self.errors))

    def submit(self, call: Callable[[], object]) -> None:
        """Run a call after the ones submitted before."""
        self._calls.put(call)

    def drain(self) -> None:
        """Wait until all submitted calls have ended. After an interruption it may be called again."""
        # A queue of its own for each call: the answer to an interrupted call must not end the next one.
        drained = queue.SimpleQueue[None]()
        self._calls.put(lambda: drained.put(None))
        drained.get()

    def stop(self) -> None:
        """End the thread after the submitted calls, without waiting for it."""
        self._calls.put(None)


class CallingThread:
    """Runs each call in the thread that submits it, in place of a `WorkerThread`."""

    def submit(self, call: Callable[[], object]) -> None:
        """Run a call."""
        call()

    def drain(self) -> None:
        """Do nothing: all submitted calls have ended."""

    def stop(self) -> None:
        """Do nothing: there is no thread to end."""


def wait_for_threads(
    threads: Iterable[WorkerThread | CallingThread],
    on_interruption: Callable[[BaseException], object],
) -> None:
    """Wait until all submitted calls of threads have ended, one thread after another, even if signals interrupt it.

    `on_interruption` is called with each exception that interrupts the wait.
    """
    for thread in threads:
        while True:
            try:
                thread.drain()
                break
            except BaseException as error:
                on_interruption(error)


def run_in_threads(
    call: Callable[[], object], num_threads: int, *, on_interruption: Callable[[], object]
) -> list[BaseException]:
    """Run a call in each of several threads, and wait for all of them.

    Return the exceptions of signals, and then the exceptions of the calls. `on_interruption` is called if a signal
    interrupts the wait, to end the calls early.
    """
    interruptions: list[BaseException] = []

    def interrupt(error: BaseException) -> None:
        interruptions.append(error)
        on_interruption()

    threads: list[WorkerThread] = []
    try:
        for _ in range(num_threads):
            threads.append(WorkerThread())
            threads[-1].submit(call)
        wait_for_threads(threads, interrupt)
    except BaseException as error:
        interrupt(error)
        # Files and arrays of a call must not be closed while it runs.
        wait_for_threads(threads, interrupt)
    errors = interruptions
    for thread in threads:
        thread.stop()
        errors += thread.errors
    return errors


def _run_calls(calls: _Calls, errors: list[BaseException]) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
        # The arrays of a call must not live until the next one.
        del call


def run_abandonable(call: Callable[[], ResultT]) -> ResultT:
    """Run a call in a thread, and return its result. An exception of a signal ends the wait for it, but not the call.

    Use it for calls that run no Python code for minutes, such as a compilation: the main thread of Python cannot handle
    a signal during such a call.
    """
    results: list[ResultT] = []
    ended = queue.SimpleQueue[BaseException | None]()

    def run() -> None:
        error: BaseException | None = None
        try:
            results.append(call())
        except BaseException as raised:
            error = raised
        _running.remove(call)
        ended.put(error)

    _running.append(call)
    previous_nbytes = _thread.stack_size(COMPILER_STACK_NBYTES)
    try:
        _thread.start_new_thread(run, ())
    finally:
        _thread.stack_size(previous_nbytes)
    try:
        error = ended.get()
    except BaseException:
        atexit.unregister(_wait_for_abandoned_calls)
        atexit.register(_wait_for_abandoned_calls)
        raise
    if error is not None:
        raise error
    return results[0]


def _wait_for_abandoned_calls() -> None:
    """Wait at the exit of the interpreter until no call runs. At Ctrl-C, end the process instead.

    The exit of the interpreter would destroy the objects of a compiler while it uses them.
    """
    try:
        while _running:
            time.sleep(ABANDONED_POLL_S)
    except KeyboardInterrupt:
        exit_now(INTERRUPTED)


def exit_past_abandoned_calls(code: int) -> None:
    """End the process with a code if a call still runs that nobody waits for.

    For a command, which has reported why it ends: its exit need not wait for the call.
    """
    if _running:
        exit_now(code)


def exit_now(code: int) -> None:
    """End the process with a code, without exit handlers and without waiting for threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
