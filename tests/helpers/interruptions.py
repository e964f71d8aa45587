"""Exceptions at any point of a call where Python runs the handlers of signals."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tests.helpers.waiting import MAX_S


class SimulatedSignal(BaseException):
    """The exception of a simulated signal."""


@dataclass(slots=True)
class InterruptedCall:
    """The end of a call that `run_interrupted` ran.

    Attributes:
        num_events: Number of entered and left functions, until the call was interrupted or ended.
        error: The exception of the call.
    """

    num_events: int = 0
    error: BaseException | None = None


def run_interrupted(call: Callable[[], object], at: int | None) -> InterruptedCall:
    """Run a call in a thread, and raise SimulatedSignal in it when it enters or leaves a function.

    There Python runs the handlers of signals, also in the functions of the standard library.

    Args:
        call: The call.
        at: Number of the event: a Python function is entered or left, or a C function is left. None to count only.

    Raises:
        AssertionError: The call did not end within MAX_S seconds.
    """
    ended = InterruptedCall()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "return", "c_return"):
            ended.num_events += 1
            if ended.num_events - 1 == at:
                raise SimulatedSignal(
                    f"{event} at line {frame.f_lineno} of {frame.f_code.co_filename}"
                )

    def run() -> None:
        try:
            sys.setprofile(profile)
            call()
        except BaseException as error:
            ended.error = error
        finally:
            sys.setprofile(None)

    # As a daemon, the thread of a call that hangs does not keep the tests from ending.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(MAX_S)
    assert not thread.is_alive(), f"the call hangs after an exception at its event {at}"
    return ended
