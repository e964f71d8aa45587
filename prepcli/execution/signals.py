"""Signal handling: a signal stops a conversion at once, and training at the end of a step. Both can be resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Environment variable with the parent's process id.
PARENT_VARIABLE = "PREP_PARENT"
# from <linux/prctl.h>
PR_SET_PDEATHSIG = 1


class Stopped(BaseException):
    """A signal stopped the process. Not an Exception: it passes `except Exception`, while `finally` blocks run."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


class Interrupted(BaseException):
    """Ctrl-C ended a command. Not a KeyboardInterrupt, which Typer converts to an exit code without its notes."""


@contextmanager
def note_durable_work(describe_durable: Callable[[], str]) -> Iterator[None]:
    """Add a note of the durable work to an exception of the block.

    Args:
        describe_durable: Returns a description of the work that a later run continues from, or an
            empty text.
    """
    try:
        yield
    except (KeyboardInterrupt, Stopped) as error:
        if text := describe_durable():
            error.add_note(text)
        raise


def notes_of(error: BaseException) -> list[str]:
    """Return the texts that `note_durable_work` added to an exception. The innermost block's text comes first."""
    return list(getattr(error, "__notes__", ()))


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raise Stopped in the main thread at the first signal. A second signal ends the process at once.

    Python drops an exception that a handler raises inside a destructor. Stopped is then raised at the end of the block.
    """
    received: list[str] = []

    def stop(name: str) -> None:
        received.append(name)
        raise Stopped(name)

    with _handle_first(STOP_SIGNALS, stop):
        yield
    # Python drops an exception raised in a destructor, so it is raised again here.
    if received:
        raise Stopped(received[0])


@contextmanager
def remember_signal() -> Iterator[Callable[[], str]]:
    """Remember the first signal or Ctrl-C inside the context. A second one ends the process at once.

    Yields:
        A function for the name of the signal, empty before it arrives.
    """
    received: list[str] = []
    with _handle_first((*STOP_SIGNALS, signal.SIGINT), received.append):
        yield lambda: received[0] if received else ""


@contextmanager
def block_signals() -> Iterator[None]:
    """Block signals that end a run, also in processes created inside the context: see `die_with_parent`."""
    # A child inherits the mask. It unblocks the signals once its own handlers are in place.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def die_with_parent() -> None:
    """If this process is a worker, let the kernel kill it when its parent ends, and unblock signals."""
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent.isdecimal():
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGINT))
    # The parent may have ended before the call of prctl.
    if os.getppid() != int(parent):
        raise Stopped("the end of its parent")


@contextmanager
def _handle_first(
    signals: Sequence[signal.Signals], on_signal: Callable[[str], None]
) -> Iterator[None]:
    """Call `on_signal` with the name of the first signal, after restoring the default handlers."""

    def handle(number: int, frame: FrameType | None) -> None:
        # Restored first, so that a second signal during `on_signal` ends the process.
        for stop_signal in signals:
            signal.signal(stop_signal, signal.SIG_DFL)
        on_signal(signal.Signals(number).name)

    previous = {stop_signal: signal.signal(stop_signal, handle) for stop_signal in signals}
    try:
        yield
    finally:
        for stop_signal, handler in previous.items():
            signal.signal(stop_signal, handler)
