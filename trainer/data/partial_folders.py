"""Names of incomplete folders. Each name contains the process that writes the folder.

No other process removes a folder while its writer runs.

Names are used instead of locks: renames are atomic on every file system of a cluster, but some
shared file systems have no locks, or locks that other hosts do not see.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path

from trainer.distributed.hosts import machine_id

# IDENTITY.HOST-PID_NAMESPACE-PID-START_TIME-RANDOM.partial; earlier versions wrote IDENTITY.partial
PARTIAL_NAME = re.compile(
    r"[0-9a-f]{32}(?:\.(?P<host>[0-9a-f]+-\d+)-(?P<process>(?P<pid>\d+)-\d+)-[0-9a-f]+)?\.partial"
)
# A process of another host counts as ended if it wrote nothing for this time. Whether it still runs
# cannot be seen from here. The time is far above the difference of two clocks.
ABANDONED_AFTER_S = 24 * 60 * 60
# Process id and start time in the names of released folders. No process has the id 0.
NO_PROCESS = "0-1"
# Field 22 of /proc/PID/stat (proc(5)), counted from the field after the command.
START_TIME_FIELD = 19


def partial_name(identity: str) -> str:
    """Return a new name for an incomplete folder of this process."""
    process = f"{os.getpid()}-{_start_time(os.getpid())}"
    return f"{identity}.{_host_id()}-{process}-{uuid.uuid4().hex[:8]}.partial"


def unowned_partial_name(identity: str) -> str:
    """Return a new name for an incomplete folder of this host without a running process."""
    return f"{identity}.{_host_id()}-{NO_PROCESS}-{uuid.uuid4().hex[:8]}.partial"


def is_abandoned(folder: Path) -> bool:
    """Return whether no process writes an incomplete folder any more. False for other folders."""
    match = PARTIAL_NAME.fullmatch(folder.name)
    if match is None:
        return False
    if match["host"] is None:
        # An earlier version made the folder. It held the lock of the cache, which the caller holds
        # now.
        return True
    return writer_has_ended(folder) or (
        match["host"] != _host_id() and time.time() - _last_write_s(folder) > ABANDONED_AFTER_S
    )


def writer_has_ended(folder: Path) -> bool:
    """Return whether a process of this host wrote an incomplete folder and has ended."""
    match = PARTIAL_NAME.fullmatch(folder.name)
    if match is None or match["host"] != _host_id():
        return False
    return match["process"] != f"{match['pid']}-{_start_time(int(match['pid']))}"


def _host_id() -> str:
    """Return this host and the namespace of its process ids."""
    return f"{machine_id()}-{os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> int:
    """Return the start time of a process, or 0 if it has ended.

    A later process with the same id has another start time.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command in parentheses may contain spaces and parentheses, so fields count from the last
    # one.
    return int(stat.rpartition(")")[2].split()[START_TIME_FIELD])


def _last_write_s(folder: Path) -> float:
    """Return the time of the last write to a folder or its files, or now if it is gone."""
    times: list[float] = []
    with suppress(FileNotFoundError):
        times = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    return max(times, default=time.time())
