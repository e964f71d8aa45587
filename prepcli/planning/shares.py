"""Divide the streams of a plan among the processes that write one output. Pure."""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from prepcli.errors import usage_error
from prepcli.planning.plan import Plan
from trainer.models.launchers import JAX_VARIABLES, MAX_PROCESSES, SLURM, detect_launcher


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one output that process number `index`, from 0, of `count` processes writes."""

    count: int = 1
    index: int = 0

    def __str__(self) -> str:
        return f"{self.count}/{self.index}"

    def split(self, workers: int) -> tuple[Share, ...]:
        """Return the shares of `workers` processes that replace this one."""
        return tuple(Share(self.count * workers, self.index * workers + worker) for worker in range(workers))


SINGLE_PROCESS = Share()
SHARING_LAUNCHERS = (JAX_VARIABLES, SLURM)  # others, such as TPU pods, often start processes without a shared folder


def parse_share(text: str) -> Share:
    """Parse the value of `--processes`.

    Args:
        text: `N/I`: process I, from 0, of N.

    Returns:
        The share.

    Raises:
        UsageError: The text has another form, or I is not below N.
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip(), re.ASCII)
    if match is None:
        why = "the expected form is N/I: process I, from 0, of N"
        raise usage_error(f"`--processes {text}` is invalid", why, "`--processes 4/0`")
    count, index = int(match[1]), int(match[2])
    if not 0 <= index < count <= MAX_PROCESSES:
        hint = f"`--processes {index}/{count}`" if count < index else "`--processes 4/0` to `--processes 4/3`"
        why = f"N is at most {MAX_PROCESSES:,}, and I is at least 0 and below N"
        raise usage_error(f"`--processes {text}` is out of range", why, hint)
    return Share(count, index)


def launcher_share(environ: Mapping[str, str]) -> tuple[Share, str]:
    """Return the share assigned to this process by a launcher, and the launcher's name; one process without one."""
    process = detect_launcher(environ, SHARING_LAUNCHERS)
    return (SINGLE_PROCESS, "") if process is None else (Share(process.count, process.index), process.launcher)


def requested_share(text: str | None, environ: Mapping[str, str]) -> tuple[Share, str]:
    """Return the share given by `--processes`, or else by a launcher, and the launcher's name."""
    return launcher_share(environ) if text is None else (parse_share(text), "")


@dataclass(frozen=True, slots=True)
class Division:
    """How the streams of a plan are divided among processes.

    Attributes:
        count: Number of processes.
        durable_digests: Digests, by stream number, of streams that were durable before the division was made. These
            streams are only read back.
    """

    count: int = 1
    durable_digests: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """Text that identifies the division in journals."""
        return f"{self.count} without {','.join(map(str, sorted(self.durable_digests)))}"


def divide_streams(plan: Plan, division: Division) -> tuple[tuple[int, ...], ...]:
    """Divide the streams of a plan among processes.

    All streams of a tensor go to one process, together with the tensors to compare with it. The largest groups are
    assigned first, each to the process with the fewest bytes. Durable streams are divided separately in the same way.

    Args:
        plan: The plan.
        division: The number of processes and the durable streams.

    Returns:
        The stream numbers of each process, ascending. They depend on the arguments alone.
    """
    groups_by_durability: tuple[list[list[int]], list[list[int]]] = [], []  # pending groups, durable groups
    for group in _stream_groups(plan):
        groups_by_durability[all(number in division.durable_digests for number in group)].append(group)
    pending_shares, durable_shares = (_balance_groups(plan, groups, division.count) for groups in groups_by_durability)
    return tuple(
        tuple(sorted([*pending_share, *durable_share]))
        for pending_share, durable_share in zip(pending_shares, durable_shares)
    )


def _balance_groups(plan: Plan, groups: Iterable[list[int]], count: int) -> list[list[int]]:
    """Assign groups of streams to `count` processes, the largest first, each to the process with the fewest bytes."""
    sized_groups = sorted(((sum(plan.streams[n].nbytes for n in group), group) for group in groups), key=_largest_first)
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, process) for process in range(count)]
    for nbytes, group in sized_groups:
        load, process = heapq.heappop(loads)
        shares[process] += group
        heapq.heappush(loads, (load + nbytes, process))
    return shares


def _largest_first(sized_group: tuple[int, list[int]]) -> tuple[int, int]:
    """Return a sort key of (nbytes, stream numbers): by descending size, then by the first stream number."""
    nbytes, stream_numbers = sized_group
    return -nbytes, stream_numbers[0]


def _stream_groups(plan: Plan) -> list[list[int]]:
    """Return the groups of stream numbers to keep together: all streams of a tensor and of tensors equal to it."""
    parents: dict[str, str] = {}  # union-find: tensor name -> another tensor of the same group

    def root(name: str) -> str:
        while parents.get(name, name) != name:
            name = parents[name]
        return name

    for check in plan.checks:
        parents[root(check.name)] = root(check.duplicate_of)
    groups: dict[str, list[int]] = {}
    for number, stream in enumerate(plan.streams):
        groups.setdefault(root(stream.name), []).append(number)
    return list(groups.values())


def subplan(plan: Plan, stream_numbers: Container[int]) -> Plan:
    """Return a plan with some of a plan's streams and the checks of their tensors; files and leaves stay the same."""
    streams = tuple(stream for number, stream in enumerate(plan.streams) if number in stream_numbers)
    names = {stream.name for stream in streams}
    return dataclasses.replace(plan, streams=streams, checks=tuple(c for c in plan.checks if c.name in names))
