"""Units of work of an output in an object store: each has all streams of its data files.

One process assembles an object, and moves every tensor with a byte in it. A unit is the smallest set of streams
and data files without a connection to the rest. Units depend on the plan alone. They are divided among processes, and a
resumed run skips the complete ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from prepcli.algebra.grids import FilePosition
from prepcli.planning.plan import Plan, Stream


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Streams, and their data files.

    Attributes:
        streams: Numbers of the streams, in reading order.
        files: Numbers of the data files, ascending. Empty if the streams are only compared.
        nbytes: Number of bytes to read.
    """

    streams: tuple[int, ...]
    files: tuple[int, ...]
    nbytes: int


def find_work_units(plan: Plan) -> tuple[WorkUnit, ...]:
    """Return the units of a plan, in the order of their data files. Tensors without elements and files have none."""
    groups = _Groups()
    file_members = [_file_member(number) for number in range(len(plan.files))]
    for member in file_members:
        groups.join(member, member)
    for stream in plan.streams:
        groups.join(stream.name, stream.name)
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
        numbers.sort(key=lambda number: _first_position(plan.streams[number]))
        nbytes = sum(plan.streams[number].nbytes for number in numbers)
        unit = WorkUnit(tuple(numbers), tuple(files.get(root, ())), nbytes)
        # A tensor without elements may have no file.
        if unit.files or unit.nbytes:
            units.append(unit)
    return tuple(units)


def divide_units(units: Sequence[WorkUnit], count: int) -> tuple[tuple[int, ...], ...]:
    """Divide units among processes: the largest first, each to the process with the fewest bytes.

    Args:
        units: The units.
        count: Number of processes.

    Returns:
        The unit numbers of each process, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, process) for process in range(count)]
    for number in sorted(range(len(units)), key=lambda number: (-units[number].nbytes, number)):
        load, process = heapq.heappop(loads)
        shares[process].append(number)
        heapq.heappush(loads, (load + units[number].nbytes, process))
    return tuple(tuple(sorted(share)) for share in shares)


def _first_position(stream: Stream) -> FilePosition:
    """Return the first written position of a stream. A stream without writes comes first."""
    # Streams of one tensor have equal positions, and keep their order: the mean of true rows needs
    # these rows before the new ones.
    first: FilePosition = (-1, 0)
    for location in stream.writes:
        position = location.position
        if first[0] < 0 or position < first:
            first = position
    return first


class _Groups:
    """Disjoint sets of names (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def root(self, name: str) -> str:
        """Return the representative of the set of a name."""
        while (parent := self._parents.get(name, name)) != name:
            # Halve the path, so that later searches are short.
            self._parents[name] = self._parents.get(parent, parent)
            name = parent
        return name

    def join(self, a: str, b: str) -> None:
        """Put two names into one set."""
        self._parents[self.root(a)] = self.root(b)


def _file_member(number: int) -> str:
    """Return the name of a data file in the sets. No tensor has it: it begins with NUL."""
    return f"\0{number}"
