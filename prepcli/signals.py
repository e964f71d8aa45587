"""SIGTERM and SIGUSR1 during a conversion: what is done stays, and the same command goes on from there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
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

    def stop(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
