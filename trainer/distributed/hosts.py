"""The hosts of a job: which processes share a machine, and which of them see the same folder."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import xxhash

from trainer.distributed.process_group import ProcessGroup

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_place() -> str:
    """Return the host and the id of this process, as messages show them."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def machine_id() -> str:
    """Return a unique identifier of this host; containers with different host names count as different hosts."""
    try:
        boot_id = BOOT_ID.read_text()
    except OSError:
        boot_id = str(uuid.getnode())
    return xxhash.xxh3_64_hexdigest(f"{socket.gethostname()} {boot_id}".encode())


def processes_per_host(group: ProcessGroup) -> int:
    """Return the largest number of processes on one host; all processes call it together."""
    hosts = Counter(group.gather("host", machine_id()))
    return int(group.broadcast("processes per host", str(max(hosts.values(), default=1))))


def writes_shared_folder(folder: Path, group: ProcessGroup) -> bool:
    """Return whether this process writes to a folder for the processes that see it; all processes call it together.

    Process 0 writes if the hosts share the folder. On each host without that folder, its first process writes.

    Args:
        folder: The folder. It must exist for process 0.
        group: The processes of the job.
    """
    probe = folder / f"probe-{uuid.uuid4().hex}"
    if group.index == 0:
        probe.touch()
    name = group.broadcast("probe", probe.name)
    answers = group.gather("probe seen", json.dumps([machine_id(), (folder / name).exists()]))
    if group.index == 0:
        probe.unlink(missing_ok=True)
    writers = json.loads(group.broadcast("writers", json.dumps(_writers([json.loads(answer) for answer in answers]))))
    return group.index in writers


def _writers(answers: Sequence[tuple[str, bool]]) -> list[int]:
    """Return process 0, and the first process of each host that does not see its folder.

    Args:
        answers: Host of each process, and whether it sees the folder of process 0.
    """
    first_of_host: dict[str, int] = {}
    for index, (host, sees_folder) in enumerate(answers):
        if not sees_folder:
            first_of_host.setdefault(host, index)
    return sorted({0, *first_of_host.values()})
