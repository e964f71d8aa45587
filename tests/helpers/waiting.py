"""Waits that assume nothing about the speed of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

# Only a wait that never ends takes this long: beside other work, a second of an idle machine can become a minute.
MAX_S = 1800.0
POLL_EVERY_S = 0.005


class Running(Protocol):
    """A process, as `subprocess.Popen` starts it."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        ...


def wait_until(condition: Callable[[], object], *processes: Running) -> None:
    """Wait until a condition holds.

    Args:
        condition: Called repeatedly.
        *processes: Processes that have to run until then.

    Raises:
        AssertionError: A process has ended before, or the condition has not come true within MAX_S.
    """
    deadline_s = time.monotonic() + MAX_S
    while not condition():
        codes = [process.poll() for process in processes]
        assert codes == [None] * len(codes), f"processes have ended with {codes}"
        assert time.monotonic() < deadline_s, (
            f"the condition has not come true within {MAX_S:.0f} s"
        )
        time.sleep(POLL_EVERY_S)
