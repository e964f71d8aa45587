"""What a conversion did: its bytes, times and memory, their sum over pipelines and workers, and their JSON fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from prepcli.core.json_values import JsonObject
from prepcli.engine.digest import StreamDigest


@dataclass(slots=True)
class ConversionResult:
    """Result of a conversion, or of one of its pipelines.

    Attributes:
        digests: Digests of each stream, by stream number.
        read_nbytes: Bytes read.
        written_nbytes: Bytes written.
        copied_nbytes: Bytes copied in memory, to another order or dtype.
        resumed_nbytes: Durable bytes of an earlier start.
        peak_nbytes: Of a pipeline, the largest anonymous memory seen. Of a conversion, its peak minus the memory
            before it.
        seconds: Busy time of each stage in seconds.
        already_done: The output existed before, and no bytes were moved.
    """

    digests: dict[int, StreamDigest] = field(default_factory=dict)
    read_nbytes: int = 0
    written_nbytes: int = 0
    copied_nbytes: int = 0
    resumed_nbytes: int = 0
    peak_nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=partial(dict, read=0.0, move=0.0, write=0.0))
    already_done: bool = False

    def add(self, other: ConversionResult) -> None:
        """Add the bytes and the times of another pipeline or process.

        The caller adds the peak: pipelines share the memory of their process, and processes do not.
        """
        self.read_nbytes += other.read_nbytes
        self.written_nbytes += other.written_nbytes
        self.copied_nbytes += other.copied_nbytes
        self.resumed_nbytes += other.resumed_nbytes
        for stage, seconds in other.seconds.items():
            self.seconds[stage] += seconds

    def json_fields(self, memory_nbytes: int) -> JsonObject:
        """Return the fields of the result for JSON, with the limit of the memory."""
        return {
            "bytes": {
                "read": self.read_nbytes,
                "written": self.written_nbytes,
                # All moved bytes
                "moved": self.read_nbytes + self.copied_nbytes + self.written_nbytes,
                "resumed": self.resumed_nbytes,
            },
            "memory": {"budget": memory_nbytes, "peak": self.peak_nbytes},
            "time": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
        }

    @classmethod
    def from_json(cls, report: JsonObject) -> ConversionResult | None:
        """Return the result in the JSON fields of a process, or None if they are malformed."""
        match report:
            case {
                "bytes": {
                    "read": int(read_nbytes),
                    "written": int(written_nbytes),
                    "moved": int(moved_nbytes),
                    "resumed": int(resumed_nbytes),
                },
                "memory": {"peak": int(peak_nbytes)},
                "time": {
                    "read": float(read_s),
                    "move": float(move_s),
                    "write": float(write_s),
                },
            }:
                return cls(
                    read_nbytes=read_nbytes,
                    written_nbytes=written_nbytes,
                    copied_nbytes=moved_nbytes - read_nbytes - written_nbytes,
                    resumed_nbytes=resumed_nbytes,
                    peak_nbytes=peak_nbytes,
                    seconds={"read": read_s, "move": move_s, "write": write_s},
                )
            case _:
                return None
