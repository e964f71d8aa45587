"""Signals: a conversion is stopped where it is, training at the end of a step; either goes on from there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PARENT_VARIABLE = "PREP_PARENT"  # the variable that names the process that this one belongs to
PR_SET_PDEATHSIG = 1


class Stopped(BaseException):
    """The process was told to stop. Not an Exception: it passes `except Exception`, while `finally` still runs."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


class Interrupted(BaseException):
    """Ctrl-C ended a command. Not a KeyboardInterrupt: Typer turns that into an exit code and drops its notes."""


@contextmanager
def note_durable_work(describe_durable: Callable[[], str]) -> Iterator[None]:
    """Within, what stops the work carries a note of what is kept of it, if anything is.

    Args:
        kept: Returns what a later start goes on from; empty for nothing.
    """
    try:
        yield
    except (KeyboardInterrupt, Stopped) as error:
        if text := describe_durable():
            error.add_note(text)
        raise


def notes_of(error: BaseException) -> list[str]:
    """What `noting_kept` noted, the innermost first."""
    return list(getattr(error, "__notes__", ()))


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Within, the first signal raises Stopped in the main thread, and a second one ends the process at once."""

    def stop(name: str) -> None:
        raise Stopped(name)

    with _handle_first(STOP_SIGNALS, stop):
        yield


@contextmanager
def remember_signal() -> Iterator[Callable[[], str]]:
    """Within, the first signal or Ctrl-C is only remembered: what is yielded gives its name, empty before it. A second
    one ends the process at once."""
    told: list[str] = []
    with _handle_first((*STOP_SIGNALS, signal.SIGINT), told.append):
        yield lambda: told[0] if told else ""


@contextmanager
def block_signals() -> Iterator[None]:
    """Within, signals that end a run wait, also for the processes that are made there: see `follow_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent() -> None:
    """In a process that belongs to another one: let signals come again, and die with that one, however it ends."""
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent.isdecimal():
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGINT))
    if os.getppid() != int(parent):
        raise Stopped("the end of its parent")


@contextmanager
def _handle_first(signals: Sequence[signal.Signals], on_signal: Callable[[str], None]) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_DFL)
        on_signal(signal.Signals(number).name)

    before = {each: signal.signal(each, handle) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
