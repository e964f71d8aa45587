"""The hosts of a job: which processes share a machine, and which of them see the same folder."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from prepcli.core.errors import PrepError
from prepcli.core.process_group import ProcessGroup
from prepcli.stores.files import ACCESS_HINT

# Prefix of a file that exists while processes look for it.
PROBE_PREFIX = ".seen-"
# Seconds. An older probe belongs to a killed process.
PROBE_S = 60 * 60
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_place() -> str:
    """Return the host and the id of this process, as messages show them."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def machine_id() -> str:
    """Return a unique identifier of this host. Containers with different host names count as different hosts."""
    return xxhash.xxh3_64_hexdigest(f"{socket.gethostname()} {kernel_id()}".encode())


def kernel_id() -> str:
    """Return a unique identifier of the running kernel, which all containers of a host share."""
    try:
        return BOOT_ID.read_text()
    except OSError:
        return str(uuid.getnode())


def processes_per_host(group: ProcessGroup) -> int:
    """Return the largest number of processes on one host. All processes call it together."""
    hosts = Counter(group.gather("host", machine_id()))
    return int(group.broadcast("processes per host", str(max(hosts.values(), default=1))))


@dataclass(frozen=True, slots=True)
class FolderProcesses:
    """The writing processes of a folder and the first processes of the hosts, in a job.

    Attributes:
        writers: Process 0, and the first process of each host without the folder of process 0.
        host_leaders: The first process of each host.
    """

    writers: list[int]
    host_leaders: list[int]

    @property
    def is_shared(self) -> bool:
        """Whether all hosts see the folder of process 0."""
        return self.writers == [0]


def folder_processes(folder: Path, group: ProcessGroup) -> FolderProcesses:
    """Return the writing processes of a folder. All processes call it together.

    Args:
        folder: The folder.
        group: The processes of the job.

    Raises:
        PrepError: Process 0 cannot write to the folder.
    """
    texts = group.gather("folder seen", json.dumps([machine_id(), sees_folder(folder, group)]))
    answers = [json.loads(text) for text in texts]
    lists = [_folder_writers(answers), _host_leaders(answers)]
    writers, leaders = json.loads(group.broadcast("writers", json.dumps(lists)))
    return FolderProcesses(writers, leaders)


def _host_leaders(answers: Sequence[tuple[str, bool]]) -> list[int]:
    """Return the first process of each host. The answers are as for `_folder_writers`."""
    first_of_host: dict[str, int] = {}
    for index, (host, _) in enumerate(answers):
        first_of_host.setdefault(host, index)
    return sorted(first_of_host.values())


def sees_folder(folder: Path, group: ProcessGroup) -> bool:
    """Return whether this process sees the folder of process 0, which creates it. All processes call it together.

    Process 0 writes a probe file there, and all processes look for it.

    Args:
        folder: The folder.
        group: The processes of the job.

    Raises:
        PrepError: Process 0 cannot write to the folder.
    """
    probe = folder / f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    why = ""
    if group.index == 0:
        try:
            _create_probe(probe)
        except OSError as error:
            why = error.strerror or str(error)
    # A failure is broadcast too, so that all processes raise instead of waiting at the next call.
    name, why = json.loads(group.broadcast("probe", json.dumps([probe.name, why])))
    if why:
        raise PrepError(f"process 0 cannot write to {folder}", why, ACCESS_HINT)
    is_seen = os.path.exists(folder / name)
    # Process 0 deletes the probe only after all processes have looked for it.
    group.barrier("probe seen")
    if group.index == 0:
        probe.unlink(missing_ok=True)
    return is_seen


def _create_probe(probe: Path) -> None:
    """Create an empty file and its folder. Remove probes of killed processes."""
    probe.parent.mkdir(parents=True, exist_ok=True)
    for leftover in probe.parent.glob(f"{PROBE_PREFIX}*"):
        # Another job may remove the file first, or own it.
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > PROBE_S:
                leftover.unlink()
    probe.touch()


def _folder_writers(answers: Sequence[tuple[str, bool]]) -> list[int]:
    """Return process 0, and the first process of each host that cannot see process 0's folder.

    Args:
        answers: Host of each process, and whether it sees the folder of process 0.
    """
    first_of_host: dict[str, int] = {}
    for index, (host, sees_folder) in enumerate(answers):
        if not sees_folder:
            first_of_host.setdefault(host, index)
    return sorted({0, *first_of_host.values()})
