"""Units of work of an output: streams that one process moves together. Units depend on the plan alone.

In an object store, one process assembles an object, and moves every tensor with a byte in it. A unit is then the
smallest set of streams and data files without a connection to the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prepcli.algebra.grids import FilePosition
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.shares import stream_groups

# Smaller tensors of a folder are joined to units of 1/256 of the output, within these limits: a kill loses little, and
# the notes cost less than the bytes.
JOINED_SHARE = 256
MIN_JOINED_NBYTES = 16 << 10
MAX_JOINED_NBYTES = 64 << 20


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


def find_stream_units(plan: Plan) -> tuple[WorkUnit, ...]:
    """Return the units of a plan with shared data files: each writes at offsets of them.

    All streams of a tensor are in one unit, together with the tensors to compare with it. Consecutive small tensors are
    joined.
    """
    total_nbytes = sum(stream.nbytes for stream in plan.streams)
    min_nbytes = min(max(total_nbytes // JOINED_SHARE, MIN_JOINED_NBYTES), MAX_JOINED_NBYTES)
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
