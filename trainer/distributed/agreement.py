"""Facts that the processes of a job compare: their hosts, the folders that they see, and their settings."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from prepcli.core.errors import Option, PrepError, Text, join_texts, text
from prepcli.core.process_group import ProcessGroup
from prepcli.stores.files import ACCESS_HINT
from trainer.distributed.rendezvous import index_ranges

# Prefix of a file that exists while processes look for it.
PROBE_PREFIX = ".seen-"
# Seconds. An older probe belongs to a killed process.
PROBE_S = 60 * 60
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
    """The writing processes of a folder and the first processes of the hosts, in a job."""

    # Process 0, and the first process of each host without the folder of process 0
    writers: list[int]
    host_leaders: list[int]  # The first process of each host

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
    """Return process 0, and the first process of each host that cannot see process 0's folder."""
    first_of_host: dict[str, int] = {}
    for index, (host, sees_folder) in enumerate(answers):
        if not sees_folder:
            first_of_host.setdefault(host, index)
    return sorted({0, *first_of_host.values()})


# Comparison of facts that all processes of a run must share, before they compute together.

# Larger differences make file times and logs of several hosts misleading.
MAX_CLOCK_DIFFERENCE_S = 5.0
# Facts that an error names.
MAX_NAMED_FACTS = 5


def check_agreement(
    group: ProcessGroup,
    facts: Mapping[str, str],
    *,
    hint: str,
    options: Mapping[str, Option] | None = None,
    warn: Callable[[str], None] | None = None,
) -> None:
    """Compare facts between all processes. Every process raises the same error if one differs.

    The processes exchange digests. They exchange the facts themselves only if a digest differs.

    Args:
        group: Processes of the run.
        facts: Values by name.
        hint: Advice in the error.
        options: Option for a fact, by name of the fact. The error shows the option in place of the
            fact.
        warn: Receives a warning on process 0 about clocks that differ. None skips the comparison.

    Raises:
        PrepError: A fact differs between processes. The error names the facts, their values and the processes.
    """
    if group.count == 1:
        return
    facts_text = json.dumps(dict(facts), sort_keys=True)
    # Processes arrive at different times. After the barrier they read their clocks at nearly the
    # same moment.
    group.barrier("clock")
    reports = group.gather(
        "agreement", f"{hashlib.sha256(facts_text.encode()).hexdigest()} {time.time()}"
    )
    if reports and warn is not None:
        _warn_of_clocks([float(report.split()[1]) for report in reports], warn)
    is_equal = len({report.split()[0] for report in reports}) == 1
    # Only process 0 has the reports. Its verdict makes all processes raise, or none.
    if group.broadcast("agreement", str(is_equal)) == str(True):
        return
    texts = group.gather("facts", json.dumps({"host": socket.gethostname(), "facts": dict(facts)}))
    differences = json.loads(group.broadcast("facts", json.dumps(_find_differences(texts))))
    what, why = _describe_differences(differences, options or {})
    raise PrepError(what, why, hint)


def _warn_of_clocks(times: list[float], warn: Callable[[str], None]) -> None:
    """Warn if the clocks of two processes differ. They report their times at the same moment."""
    first = times.index(min(times))
    last = times.index(max(times))
    difference_s = times[last] - times[first]
    if difference_s > MAX_CLOCK_DIFFERENCE_S:
        warn(
            f"the clock of process {last} is {difference_s:.0f} s ahead of the clock of process {first}"
        )


def _find_differences(texts: list[str]) -> dict[str, str]:
    """Return the facts that differ, each with its values by process."""
    reports = [json.loads(report) for report in texts]
    # A fact may be missing in some processes. A dict keeps the order of the first report of each.
    names: dict[str, None] = {}
    for report in reports:
        names |= dict.fromkeys(report["facts"])
    values: dict[str, str] = {}
    for name in names:
        if line := _values_by_process(name, reports):
            values[name] = line
    return values


def _describe_differences(
    differences: Mapping[str, str], options: Mapping[str, Option]
) -> tuple[Text, Text]:
    """Return a summary of the facts that differ, and a line for each."""
    labels: list[str] = []
    lines: list[str] = []
    for name in list(differences)[:MAX_NAMED_FACTS]:
        labels.append(text("{}", options.get(name, f"`{name}`")))
        lines.append(text("{}: {}", options.get(name, name), differences[name]))
    what = text("the processes differ in {}", join_texts(", ", labels))
    if len(differences) > len(labels):
        what = text("{} and {} more", what, len(differences) - len(labels))
    return what, join_texts("\n", lines)


def _values_by_process(name: str, reports: list[dict[str, dict[str, str]]]) -> str:
    """Return the values of a fact and their processes, the most frequent value first."""
    # Empty if all processes have the same value. A value names the host of its first process.
    indices: dict[str, list[int]] = {}
    for index, report in enumerate(reports):
        indices.setdefault(report["facts"].get(name, "not set"), []).append(index)
    if len(indices) == 1:
        return ""
    by_frequency = sorted(indices.items(), key=lambda item: -len(item[1]))
    return "; ".join(
        f"{value} in process{'es' if len(processes) > 1 else ''} {index_ranges(processes)} "
        f"(host {reports[processes[0]]['host']})"
        for value, processes in by_frequency
    )
