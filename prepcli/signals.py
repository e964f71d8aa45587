"""Signals: a conversion is stopped where it is, training at the end of a step; either goes on from there."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(BaseException):
    """The process was told to stop. Not an Exception: it passes `except Exception`, while `finally` still runs."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


@contextmanager
def stoppable() -> Iterator[None]:
    """Within, the first signal raises Stopped in the main thread, and a second one ends the process at once."""

    def stop(name: str) -> None:
        raise Stopped(name)

    with _on_first(SIGNALS, stop):
        yield


@contextmanager
def told_to_stop() -> Iterator[Callable[[], str]]:
    """Within, the first signal or Ctrl-C is only remembered: what is yielded gives its name, empty before it. A second
    one ends the process at once."""
    told: list[str] = []
    with _on_first((*SIGNALS, signal.SIGINT), told.append):
        yield lambda: told[0] if told else ""


@contextmanager
def _on_first(signals: Sequence[signal.Signals], act: Callable[[str], None]) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_DFL)
        act(signal.Signals(number).name)

    before = {each: signal.signal(each, handle) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
