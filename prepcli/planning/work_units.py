"""Divide the work of an output: into units, which depend on the plan alone, or into one share per process.

A unit has the streams that one process moves together. In an object store, one process assembles an object, and moves
every tensor with a byte in it. A unit is then the smallest set of streams and data files without a connection to the
rest.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prepcli.algebra.grids import FilePosition
from prepcli.core.errors import Option, text, usage_error
from prepcli.core.launchers import JAX_VARIABLES, MAX_PROCESSES, SLURM, detect_launcher
from prepcli.planning.plan import Plan

Member = TypeVar("Member", str, int)
# Smaller tensors of a folder are joined to units of 1/256 of the output, within these limits: a kill loses little, and
# the notes cost less than the bytes.
JOINED_SHARE = 256
MIN_JOINED_NBYTES = 16 << 10
MAX_JOINED_NBYTES = 64 << 20
# Launchers of processes that share a folder. TPU pods, e.g., often have a disk per host.
SHARING_LAUNCHERS = (JAX_VARIABLES, SLURM)


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Streams, and their data files.

    Attributes:
        streams: Numbers of the streams, in reading order.
        files: Numbers of the data files of this unit alone, ascending.
        nbytes: Number of bytes to read.
    """

    streams: tuple[int, ...]
    files: tuple[int, ...]
    nbytes: int


def find_bucket_units(plan: Plan) -> tuple[WorkUnit, ...]:
    """Return the units of a plan, in the order of their data files. Tensors without elements and files have none."""
    groups = DisjointSets[str]()
    # No tensor has the name of a data file in the sets: it begins with NUL.
    file_members = [f"\0{number}" for number in range(len(plan.files))]
    for member in file_members:
        groups.join(member, member)
    for stream in plan.streams:
        for location in stream.writes:
            for file, _ in location.array.chunks.positions():
                groups.join(stream.name, file_members[file])
    # Only the process that reads both tensors of a check can compare their digests.
    for check in plan.checks:
        groups.join(check.name, check.duplicate_of)
    streams: dict[str, list[int]] = {}
    files: dict[str, list[int]] = {}
    for number, stream in enumerate(plan.streams):
        streams.setdefault(groups.root(stream.name), []).append(number)
    for number, member in enumerate(file_members):
        files.setdefault(groups.root(member), []).append(number)
    units: list[WorkUnit] = []
    # Units in the order of their files, so that the source is read nearly in order. Streams without a
    # file come last.
    for root in dict.fromkeys([*files, *streams]):
        numbers = streams.get(root, [])
        # Streams of one tensor have equal positions, and keep their order: the mean of true rows needs these rows
        # before the new ones. A stream without writes comes first.
        first_positions: dict[int, FilePosition] = {}
        for number in numbers:
            writes = plan.streams[number].writes
            positions = (location.position for location in writes)
            first_positions[number] = min(positions, default=(-1, 0))
        numbers.sort(key=first_positions.__getitem__)
        nbytes = sum(plan.streams[number].nbytes for number in numbers)
        unit = WorkUnit(tuple(numbers), tuple(files.get(root, ())), nbytes)
        # A tensor without elements may have no file.
        if unit.files or unit.nbytes:
            units.append(unit)
    return tuple(units)


def find_folder_units(plan: Plan) -> tuple[WorkUnit, ...]:
    """Return the units of a plan with shared data files: each writes at offsets of them.

    All streams of a tensor are in one unit, together with the tensors to compare with it. Consecutive small tensors are
    joined.
    """
    min_nbytes = min_unit_nbytes(plan)
    units: list[WorkUnit] = []
    streams: list[int] = []
    nbytes = 0
    for group in stream_groups(plan):
        streams += group
        nbytes += sum(plan.streams[number].nbytes for number in group)
        if nbytes >= min_nbytes:
            units.append(WorkUnit(tuple(streams), (), nbytes))
            streams = []
            nbytes = 0
    if nbytes:
        units.append(WorkUnit(tuple(streams), (), nbytes))
    return tuple(units)


def min_unit_nbytes(plan: Plan) -> int:
    """Return the size of a unit of joined small tensors of a folder."""
    total_nbytes = sum(stream.nbytes for stream in plan.streams)
    return min(max(total_nbytes // JOINED_SHARE, MIN_JOINED_NBYTES), MAX_JOINED_NBYTES)


def order_units(units: Sequence[WorkUnit], *, count: int, index: int) -> list[int]:
    """Return the order in which process `index` of about `count` processes tries to get units.

    Each process begins at another place, so that they write different files. Units of a quarter of a process's work
    come first, in descending size: a large unit that begins last would keep all processes waiting.
    """
    total_nbytes = sum(unit.nbytes for unit in units)
    large: list[int] = []
    others: list[int] = []
    begin = 0
    nbytes = 0
    for number, unit in enumerate(units):
        if count > 1 and unit.nbytes * count * 4 >= total_nbytes:
            large.append(number)
            continue
        others.append(number)
        nbytes += unit.nbytes
        if nbytes * count <= total_nbytes * index:
            begin = len(others)
    large.sort(key=lambda number: -units[number].nbytes)
    large_begin = index * len(large) // count
    return [*large[large_begin:], *large[:large_begin], *others[begin:], *others[:begin]]


class DisjointSets(Generic[Member]):
    """Disjoint sets of numbers or names (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[Member, Member] = {}

    def root(self, member: Member) -> Member:
        """Return the representative of the set of a member."""
        while (parent := self._parents.get(member, member)) != member:
            # Halve the path, so that later searches are short.
            self._parents[member] = self._parents.get(parent, parent)
            member = parent
        return member

    def join(self, a: Member, b: Member) -> None:
        """Put two members into one set."""
        self._parents[self.root(a)] = self.root(b)


@dataclass(frozen=True, slots=True)
class Share:
    """The place of a process in the work on one output: process number `index`, from 0, of `count`.

    It says where a process begins to claim units. Any process may write any unit.
    """

    count: int = 1
    index: int = 0

    def __str__(self) -> str:
        return f"{self.count}/{self.index}"

    def split(self, workers: int) -> tuple[Share, ...]:
        """Return the shares of `workers` processes that replace this one."""
        first = self.index * workers
        return tuple(Share(self.count * workers, first + worker) for worker in range(workers))


SINGLE_PROCESS = Share()


def parse_share(value: str) -> Share:
    """Parse the value of `--processes`.

    Args:
        value: `N/I`: process I, from 0, of N.

    Returns:
        The share.

    Raises:
        UsageError: The value has another form, or I is not below N.
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value.strip(), re.ASCII)
    if match is None:
        why = "the expected form is N/I: process I, from 0, of N"
        what = text("{} is invalid", Option("processes", value))
        hint = text("write as process 0 of 4 with {}", Option("processes", "4/0"))
        raise usage_error(what, why, hint)
    count = int(match[1])
    index = int(match[2])
    if not 0 <= index < count <= MAX_PROCESSES:
        hint = text(
            "number the processes of 4 from {} to {}",
            Option("processes", "4/0"),
            Option("processes", "4/3"),
        )
        if count < index:
            swapped = Option("processes", f"{index}/{count}")
            hint = text("write as process {} of {} with {}", count, index, swapped)
        why = f"N is at most {MAX_PROCESSES:,}, and I is at least 0 and below N"
        raise usage_error(text("{} is out of range", Option("processes", value)), why, hint)
    return Share(count, index)


def launcher_share(environ: Mapping[str, str]) -> tuple[Share, str]:
    """Return the share assigned to this process by a launcher, and the launcher's name.

    Without a launcher there is one process, and the name is empty.
    """
    process = detect_launcher(environ, SHARING_LAUNCHERS)
    if process is None:
        return SINGLE_PROCESS, ""
    return Share(process.count, process.index), process.launcher


def requested_share(value: str | None, environ: Mapping[str, str]) -> tuple[Share, str]:
    """Return the share given by `--processes`, or else by a launcher, and the launcher's name."""
    if value is None:
        return launcher_share(environ)
    return parse_share(value), ""


def divide_streams(plan: Plan, count: int) -> tuple[tuple[int, ...], ...]:
    """Divide the streams of a plan among processes.

    All streams of a tensor go to one process, together with the tensors to compare with it. The largest groups are
    assigned first, each to the process with the fewest bytes, e.g. groups of 5, 4, 3 and 2 bytes -> 5 + 2 and 4 + 3.

    Returns:
        The stream numbers of each process, ascending. They depend on the arguments alone.
    """
    sized_groups: list[tuple[int, list[int]]] = []
    for group in stream_groups(plan):
        nbytes = sum(plan.streams[number].nbytes for number in group)
        # Groups are sorted by descending size, then by their first stream number.
        sized_groups.append((-nbytes, group))
    sized_groups.sort()
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, process) for process in range(count)]
    for negative_nbytes, group in sized_groups:
        load, process = heapq.heappop(loads)
        shares[process] += group
        heapq.heappush(loads, (load - negative_nbytes, process))
    return tuple(tuple(sorted(share)) for share in shares)


def stream_groups(plan: Plan) -> list[list[int]]:
    """Return the groups of stream numbers to keep together: all streams of a tensor and of tensors equal to it."""
    # Only the process that reads both tensors of a check can compare their digests.
    sets = DisjointSets[str]()
    for check in plan.checks:
        sets.join(check.name, check.duplicate_of)
    groups: dict[str, list[int]] = {}
    for number, stream in enumerate(plan.streams):
        groups.setdefault(sets.root(stream.name), []).append(number)
    return list(groups.values())


def subplan(plan: Plan, stream_numbers: Container[int]) -> Plan:
    """Return a plan with some of a plan's streams and the checks of their tensors. Files and leaves stay the same."""
    streams = [stream for number, stream in enumerate(plan.streams) if number in stream_numbers]
    names = {stream.name for stream in streams}
    checks = [check for check in plan.checks if check.name in names]
    return dataclasses.replace(plan, streams=tuple(streams), checks=tuple(checks))
