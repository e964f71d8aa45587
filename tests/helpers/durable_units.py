"""A memory of what a pipeline reports as durable, from which another pipeline continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prepcli.engine.background_sync import SyncPoint, UnitPart
from prepcli.engine.pipeline import PipelineUnit
from prepcli.planning.plan import Stream


@dataclass
class DurableUnit:
    """A `UnitObserver` of one unit with all streams.

    Attributes:
        streams: The streams.
        points: The recorded sync points.
    """

    streams: Sequence[Stream]
    points: list[SyncPoint] = field(default_factory=list)

    def begin_unit(self, unit: PipelineUnit) -> None:
        """Ignore the unit."""

    def complete_unit(self, number: int) -> None:
        """Ignore the unit."""

    def record_durable(self, point: SyncPoint) -> None:
        """Remember a point."""
        self.points.append(point)

    @property
    def is_complete(self) -> bool:
        """Whether the unit is durable."""
        return bool(self.points) and self.points[-1].complete == (0,)

    def part_nbytes(self, part: UnitPart) -> int:
        """Return the number of durable bytes of a part."""
        nbytes = sum(self.streams[number].nbytes for number in part.digests)
        return nbytes + (part.prefix.nbytes if part.prefix else 0)

    def marks(self) -> list[int]:
        """Return the number of durable bytes at each point."""
        total_nbytes = sum(stream.nbytes for stream in self.streams)
        marks: list[int] = []
        for point in self.points:
            marks.append(self.part_nbytes(point.part) if point.part else total_nbytes)
        return marks

    def resumed(self) -> list[PipelineUnit]:
        """Return the unit with its durable part."""
        part = self.points[-1].part if self.points else None
        if part is None:
            return [PipelineUnit(0, range(len(self.streams)))]
        return [PipelineUnit(0, range(len(self.streams)), part.digests, part.prefix)]
