"""Signal handling: a signal stops a conversion at once, and training at the end of a step. Both can be resumed.

A thread answers Ctrl-C while the main thread runs no Python code, and ends the process at the second one. The
exception of a signal is raised in the main thread only, whichever thread the kernel gives the signal to. A save in
another thread is never interrupted.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from prepcli.core.errors import FAILED, PrepError
from prepcli.core.launchers import PARENT_VARIABLE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A command that does not react to its first signal within this time answers it, e.g. while it compiles.
ANSWER_S = 1.0
# Interrupts waits of the main thread. By default it is ignored, so that a late one does no harm.
NUDGE = signal.SIGURG
# Seconds between two nudges.
NUDGE_S = 0.1
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
        # The exit code of a signal tells a scheduler to start the command again, also without the note.
        with suppress(PrepError):
            if text := describe_durable():
                error.add_note(text)
        raise


def notes_of(error: BaseException) -> list[str]:
    """Return the texts that `note_durable_work` added to an exception. The innermost block's text comes first."""
    return list(getattr(error, "__notes__", ()))


class _Stop:
    """The first signal of the outermost block, which all nested blocks share.

    Python drops an exception that a handler raises inside a destructor, and calls `sys.unraisablehook`. It is raised
    again when the main thread is nudged.

    Attributes:
        name: Name of the signal that a handler has raised or remembered, empty before. Later signals change nothing.
        dropped: Name of a signal that is to be raised at the next nudge.
    """

    def __init__(self, wake_thread: Callable[[], object]) -> None:
        self.name = ""
        self.dropped = ""
        self._wake_thread = wake_thread
        self._previous_hook = sys.unraisablehook

    def raise_first(self, number: int, frame: FrameType | None) -> None:
        """Raise the exception of a signal unless it is a later one. A handler."""
        if not self.name and not self.dropped:
            self._raise(signal.Signals(number).name, frame)

    def raise_dropped(self, number: int, frame: FrameType | None) -> None:
        """Raise a dropped exception again. The handler of nudges."""
        if self.dropped:
            self._raise(self.dropped, frame)

    def keep_dropped(self, unraisable: Any) -> None:
        """Note that the exception of a signal was dropped. A `sys.unraisablehook`."""
        if not self.name or not isinstance(unraisable.exc_value, KeyboardInterrupt | Stopped):
            self._previous_hook(unraisable)
            return
        self.dropped = self.name
        self.name = ""
        self._wake_thread()

    def _raise(self, name: str, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is _Stop.keep_dropped.__code__:
                # Nothing catches an exception of the hook.
                self.dropped = name
                return
            frame = frame.f_back
        self.name = name
        self.dropped = ""
        raise_stop(name)


# The stop of the outermost block. Empty outside of all blocks.
_stops: list[_Stop] = []


@contextmanager
def raise_on_signal(numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Raise Stopped, or KeyboardInterrupt for SIGINT, in the main thread at the first signal.

    Later signals change nothing until the end of the outermost block: job managers repeat them before they kill a
    process. An exception that Python drops is raised at the end of the block at the latest.
    """
    received: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not stop.name:
            received.append(signal.Signals(number).name)
        stop.raise_first(number, frame)

    with ExitStack() as stack:
        if not _stops:
            stack.enter_context(_react_at_once())
        stop = _stops[-1]
        stack.enter_context(_handlers(dict.fromkeys(numbers, handle)))
        yield
        if received:
            stop.name = received[0]
            stop.dropped = ""
            raise_stop(stop.name)


@contextmanager
def remember_signal(
    answer: Callable[[str], None], quit_process: Callable[[], None]
) -> Iterator[Callable[[], str]]:
    """Remember the first signal or Ctrl-C inside the context, and answer it at once.

    Later SIGTERM and SIGUSR1 change nothing until the end of the outermost block: see `raise_on_signal`.

    Args:
        answer: Called in a thread with the name of the first signal, also while the main thread runs no Python code.
        quit_process: Called in the thread at Ctrl-C after another signal. It ends the process.

    Yields:
        A function for the name of the signal, empty before it arrives.
    """
    received: list[str] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(signal.Signals(number).name)
            _stops[-1].name = received[0]

    with (
        _react_at_once(answer, quit_process, answers_all=True),
        _handlers(dict.fromkeys((*STOP_SIGNALS, signal.SIGINT), remember)),
    ):
        yield lambda: received[0] if received else ""


@contextmanager
def answer_signals(
    answer: Callable[[str], None], quit_process: Callable[[], None]
) -> Iterator[None]:
    """Answer the first signal that a block inside this one handles late or not, and let later ones change nothing.

    Outside of the blocks inside this one, a first signal has its earlier effect.

    Args:
        answer: Called in a thread with the name of the first signal if the main thread does not handle it in ANSWER_S.
        quit_process: Called in the thread at Ctrl-C after another signal. It ends the process.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if not _stops[-1].name:
            signal.signal(number, previous[signal.Signals(number)])
            _handle_again(number, frame)

    numbers = (*STOP_SIGNALS, signal.SIGINT)
    previous = {number: signal.getsignal(number) for number in numbers}
    with _react_at_once(answer, quit_process), _handlers(dict.fromkeys(numbers, handle)):
        yield


@contextmanager
def handle_interrupts(handle: Callable[[], None]) -> Iterator[None]:
    """Call a function at each Ctrl-C, for a command that goes on after one. Blocks around this one do not see them.

    Args:
        handle: Called in the main thread. It may raise KeyboardInterrupt.
    """
    # Otherwise the thread of a block around this one would count them, and quit at the second one.
    previous_fd = signal.set_wakeup_fd(-1)
    try:
        with _handlers({signal.SIGINT: lambda number, frame: handle()}):
            yield
    finally:
        signal.set_wakeup_fd(previous_fd)


def raise_stop(name: str) -> NoReturn:
    """Raise the exception of a signal: KeyboardInterrupt for SIGINT, and Stopped for another one."""
    if name == signal.SIGINT.name:
        raise KeyboardInterrupt
    raise Stopped(name)


@contextmanager
def _react_at_once(
    answer: Callable[[str], None] = lambda name: None,
    quit_process: Callable[[], None] = lambda: None,
    *,
    answers_all: bool = False,
) -> Iterator[None]:
    """React to signals in a thread: answer the first one, quit at Ctrl-C after it, and nudge the main thread.

    Python runs the handlers of signals between two bytecodes of the main thread, which XLA may keep for minutes. But
    its handler in C writes the number of each signal to the wakeup descriptor at once.

    If the signal arrives in another thread, or just before the main thread waits for a lock, Python does not end the
    wait. A nudge is a signal to the main thread. It ends the wait, and Python runs all handlers that are due.

    Args:
        answer: Called with the name of the first signal.
        quit_process: Ends the process.
        answers_all: Answer the first signal at once. By default it needs no answer if the main thread handles it within
            ANSWER_S.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    with ExitStack() as stack:
        is_outermost = not _stops
        if is_outermost:
            # All blocks inside this one share its stop, which raises exceptions that Python drops again.
            stop = _Stop(lambda: writer.send(bytes([NUDGE])))
            stack.callback(_stops.clear)
            stack.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
            _stops.append(stop)
            sys.unraisablehook = stop.keep_dropped
            stack.enter_context(_handlers({NUDGE: stop.raise_dropped}))
        thread = _ReactingThread(reader, _stops[-1], answer, quit_process, answers_all)
        previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            writer.close()
            # An answer that is being printed comes before all later messages, unless the terminal is stopped.
            thread.join(ANSWER_S)
            if thread.first and not is_outermost:
                # For the thread of the block around this one, Ctrl-C is then a later signal.
                os.write(previous_fd, bytes([signal.Signals[thread.first]]))


class _ReactingThread(threading.Thread):
    """Thread that reads the numbers of signals from a socket, until its other end is closed.

    Attributes:
        first: Name of the first signal. Empty before.
    """

    def __init__(
        self,
        reader: socket.socket,
        stop: _Stop,
        answer: Callable[[str], None],
        quit_process: Callable[[], None],
        answers_all: bool,
    ) -> None:
        super().__init__(name="prep-signals", daemon=True)
        self.first = ""
        self._reader = reader
        self._stop_of_process = stop
        self._answer = answer
        self._quit_process = quit_process
        self._answers_all = answers_all
        self._is_answered = False

    def run(self) -> None:
        """React to signals. See `_react_at_once`."""
        # Seconds until the main thread should have handled the first signal. None means never.
        wait_s: float | None = None
        with self._reader, selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while True:
                if not selector.select(wait_s):
                    wait_s = self._look_at_main_thread()
                    continue
                data = self._reader.recv(1)
                if not data:
                    return
                if data[0] == NUDGE and self._stop_of_process.dropped:
                    wait_s = NUDGE_S
                elif data[0] in (*STOP_SIGNALS, signal.SIGINT):
                    if self.first and data[0] == signal.SIGINT:
                        self._quit_process()
                    if not self.first:
                        self.first = signal.Signals(data[0]).name
                        wait_s = 0.0 if self._answers_all else ANSWER_S

    def _look_at_main_thread(self) -> float | None:
        """Answer the first signal if it has no answer yet, and nudge the main thread if it has not handled it.

        Return the seconds until the next look, and None if there is none.
        """
        stop = self._stop_of_process
        if not self._is_answered and (self._answers_all or not (stop.name or stop.dropped)):
            self._is_answered = True
            self._answer(self.first)
        if stop.name:
            return None
        main_id = threading.main_thread().ident
        assert main_id is not None
        signal.pthread_kill(main_id, NUDGE)
        return NUDGE_S


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
    """Handle signals that end a run after the context.

    Processes created inside it block them: see `die_with_parent`.
    """
    numbers = (*STOP_SIGNALS, signal.SIGINT)
    received: list[signal.Signals] = []
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {}
    if threading.current_thread() is threading.main_thread():
        # The kernel gives a signal to a thread that does not block it, e.g. the one of `_react_at_once`. Python then
        # runs the handler in the main thread all the same.
        for number in numbers:
            handlers[number] = lambda number, frame: received.append(signal.Signals(number))
    try:
        with _handlers(handlers):
            # A child inherits the mask. It unblocks the signals once its own handlers are in place.
            previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    finally:
        for number in received:
            _handle_again(number)


def _handle_again(number: int, frame: FrameType | None = None) -> None:
    """Let the present handler of a signal handle one that arrived before."""
    handler = signal.getsignal(number)
    if callable(handler):
        # `raise_signal` would count as a second signal in the thread of `_react_at_once`.
        handler(number, frame)
    else:
        signal.raise_signal(number)


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
def _handlers(
    handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]],
) -> Iterator[None]:
    """Install handlers of signals, and restore the earlier ones at the end. An ignored Ctrl-C stays ignored."""
    previous: dict[signal.Signals, Any] = {}
    for number, handler in handlers.items():
        # Shells start background commands of scripts with Ctrl-C ignored.
        if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
