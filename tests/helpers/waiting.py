"""Waits that assume nothing about the speed of the machine."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

# Only a wait that never ends takes this long: beside other work, a second of an idle machine can become a minute.
MAX_S = 1800.0
POLL_EVERY_S = 0.005
# A main thread that is not scheduled for so long, although it is asleep, waits for an event.
ASLEEP_S = 0.2
# A process is idle that uses so many ticks of 10 ms in so many seconds at most.
IDLE_S = 0.5
IDLE_TICKS = 5


class Running(Protocol):
    """A process, as `subprocess.Popen` starts it."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

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


def wait_until_idle(process: Running) -> None:
    """Wait until a process has ended, or uses hardly any CPU time, because it looks for other processes only."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        used = _cpu_ticks(process.pid)
        deadline_s = time.monotonic() + MAX_S
        while True:
            time.sleep(IDLE_S)
            before = used
            used = _cpu_ticks(process.pid)
            if used - before <= IDLE_TICKS:
                return
            assert time.monotonic() < deadline_s, "the process is never idle"


def _cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_until_asleep(pid: int) -> None:
    """Wait until the main thread of a process waits for an event, such as a key."""
    before = ""
    deadline_s = time.monotonic() + MAX_S
    while True:
        status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
        # The state, and how often the thread has given up or lost the processor.
        now = "".join(re.findall(r"^(?:State|.*ctxt_switches):.*$", status, re.MULTILINE))
        if now == before and "(sleeping)" in now:
            return
        assert time.monotonic() < deadline_s, f"the process was never asleep: {now}"
        before = now
        time.sleep(ASLEEP_S)
