"""Names of incomplete folders: they tell which process writes them, so that no other process removes them.

Only names and renames are atomic on every file system of a cluster; locks are not.
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
ABANDONED_AFTER_S = 24 * 60 * 60  # without a write, by a process of another host; more than clocks differ
NO_PROCESS = "0-1"  # process id and start time that no process has
START_TIME_FIELD = 19  # of /proc/PID/stat, counted from the field after the command


def partial_name(identity: str) -> str:
    """Return a new name for an incomplete folder of this process."""
    process = f"{os.getpid()}-{_start_time(os.getpid())}"
    return f"{identity}.{_host()}-{process}-{uuid.uuid4().hex[:8]}.partial"


def released_name(identity: str) -> str:
    """Return a new name for an incomplete folder of this host that no process writes any more."""
    return f"{identity}.{_host()}-{NO_PROCESS}-{uuid.uuid4().hex[:8]}.partial"


def is_abandoned(folder: Path) -> bool:
    """Return whether no process writes an incomplete folder any more; False for other folders."""
    match = PARTIAL_NAME.fullmatch(folder.name)
    if match is None:
        return False
    if match["host"] is None:  # of an earlier version, whose lock the caller holds
        return True
    return has_ended(folder) or (match["host"] != _host() and time.time() - _last_write_s(folder) > ABANDONED_AFTER_S)


def has_ended(folder: Path) -> bool:
    """Return whether the process that writes an incomplete folder has certainly ended: it was of this host."""
    match = PARTIAL_NAME.fullmatch(folder.name)
    if match is None or match["host"] != _host():
        return False
    return match["process"] != f"{match['pid']}-{_start_time(int(match['pid']))}"


def _host() -> str:
    """Return this host and the namespace of its process ids."""
    return f"{machine_id()}-{os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> int:
    """Return the start time of a process, which differs from those of later processes with its id; 0 if it ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[START_TIME_FIELD])


def _last_write_s(folder: Path) -> float:
    """Return the time of the last write to a folder or its files; now if it is gone."""
    times: list[float] = []
    with suppress(FileNotFoundError):
        times = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    return max(times, default=time.time())
