"""Signal handling: a signal stops a conversion at once, and training at the end of a step. Both can be resumed.

A thread answers Ctrl-C while the main thread runs no Python code, and ends the process at the second one.
"""

from __future__ import annotations

import _thread
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from prepcli.errors import FAILED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Environment variable with the parent's process id.
PARENT_VARIABLE = "PREP_PARENT"
# A command that does not react to its first signal within this time answers it, e.g. while it compiles.
ANSWER_S = 1.0
# A process that cannot print its last report within this time ends without it.
REPORT_S = 10.0
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
def remember_signal(
    answer: Callable[[str], None], quit_process: Callable[[], None]
) -> Iterator[Callable[[], str]]:
    """Remember the first signal or Ctrl-C inside the context, and answer it at once.

    Further SIGTERM and SIGUSR1 change nothing: job managers repeat them before they kill a process.

    Args:
        answer: Called in a thread with the name of the first signal, also while the main thread runs no Python code.
        quit_process: Called in the thread at Ctrl-C after another signal. It ends the process.

    Yields:
        A function for the name of the signal, empty before it arrives.
    """
    received: list[str] = []
    numbers = (*STOP_SIGNALS, signal.SIGINT)

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)

    with _react_at_once(answer, quit_process), _handlers(dict.fromkeys(numbers, remember)):
        yield lambda: received[0] if received else ""


@contextmanager
def interrupt_at_once(
    answer: Callable[[str], None], quit_process: Callable[[], None]
) -> Iterator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C, and quit at the second one.

    Python drops an exception that a handler raises inside a destructor, and prints its traceback. It is raised again
    after the destructor instead.

    Args:
        answer: Called in a thread with the name of the first signal if the main thread does not handle it in ANSWER_S.
        quit_process: Called in the thread at Ctrl-C after another signal. It ends the process.
    """
    handled: list[str] = []
    repeated: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if handled:
            return
        handled.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    def raise_again(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            previous_hook(unraisable)
            return
        handled.clear()
        repeated.append(signal.SIGINT)
        # In a thread: here the handler would run inside of this hook.
        _thread.start_new_thread(signal.pthread_kill, (main_id, signal.SIGINT))

    main_id = threading.get_ident()
    # Shells start background commands of scripts with Ctrl-C ignored.
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    previous_hook = sys.unraisablehook
    sys.unraisablehook = raise_again
    try:
        with (
            _react_at_once(
                answer, quit_process, is_handled=lambda: bool(handled), repeated=repeated
            ),
            _handlers({} if is_ignored else {signal.SIGINT: interrupt}),
        ):
            yield
    finally:
        sys.unraisablehook = previous_hook


@contextmanager
def _react_at_once(
    answer: Callable[[str], None],
    quit_process: Callable[[], None],
    *,
    is_handled: Callable[[], bool] | None = None,
    repeated: list[int] | None = None,
) -> Iterator[None]:
    """React to signals in a thread: answer the first one, and quit at Ctrl-C after another one.

    Python runs the handlers of signals between two bytecodes of the main thread, which XLA may keep for minutes. But
    its handler in C writes the number of each signal to the wakeup descriptor at once.

    Args:
        answer: Called with the name of the first signal.
        quit_process: Ends the process.
        is_handled: Returns whether the main thread has handled the first signal. It then needs no answer if it does so
            within ANSWER_S seconds. None to answer in any case.
        repeated: Numbers of signals that this process sends to itself again. They are removed and not counted.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def react() -> None:
        with reader, selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            first = ""
            # Seconds until the first signal is answered. None means never.
            wait_s: float | None = None
            while True:
                if not selector.select(wait_s):
                    wait_s = None
                    if is_handled is None or not is_handled():
                        answer(first)
                    continue
                data = reader.recv(1)
                if not data:
                    return
                if data[0] not in (*STOP_SIGNALS, signal.SIGINT):
                    continue
                if repeated and data[0] in repeated:
                    repeated.remove(data[0])
                    continue
                if first and data[0] == signal.SIGINT:
                    quit_process()
                if not first:
                    first = signal.Signals(data[0]).name
                    wait_s = 0.0 if is_handled is None else ANSWER_S

    thread = threading.Thread(target=react, name="prep-signals", daemon=True)
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        writer.close()
        # An answer that is being printed comes before all later messages, unless the terminal is stopped.
        thread.join(ANSWER_S)


def exit_with_report(report: Callable[[], int]) -> NoReturn:
    """Report why this process ends, and exit with the returned code at once: the main thread may wait forever.

    The file system or a full pipe may not respond. The process then ends without the report.
    """
    timer = threading.Timer(REPORT_S, os._exit, (FAILED,))
    timer.daemon = True
    timer.start()
    os._exit(report())


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

    with _handlers(dict.fromkeys(signals, handle)):
        yield


@contextmanager
def _handlers(
    handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]],
) -> Iterator[None]:
    """Install handlers of signals, and restore the earlier ones at the end."""
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
