"""Results of `bench.evidence`, their ratios and the table that states them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from prepcli.core.tables import format_table

# The target is the larger one of two times: these factors times the fastest cp, and times the floor.
CP_TARGET, FLOOR_TARGET = (
    0.9,
    1.1,
)


@dataclass(frozen=True, slots=True)
class EvidenceRow:
    """Results of a case with a memory budget: seconds of each run, median CPU seconds, peak memory."""

    case: str
    memory: str
    source_nbytes: int
    seconds: tuple[float, ...]
    cp_seconds: tuple[float, ...]
    cpu_s: float
    cp_cpu_s: float
    peak_nbytes: int
    inspect_nbytes: int  # peak of `prep inspect`, already subtracted from peak_nbytes
    floor_seconds: tuple[float, ...] = ()  # runs of all plain copies
    floor_means: str = ""  # method of the fastest plain copy

    @property
    def to_fastest(self) -> float:
        """Return the ratio of the fastest run to the fastest cp."""
        return min(self.seconds) / min(self.cp_seconds)

    @property
    def to_median(self) -> float:
        """Return the ratio of the median run to the median cp."""
        return statistics.median(self.seconds) / statistics.median(self.cp_seconds)

    @property
    def to_floor(self) -> float | None:
        """Return the ratio of the fastest run to the fastest plain copy, or None without plain copies."""
        return min(self.seconds) / min(self.floor_seconds) if self.floor_seconds else None

    @property
    def to_target(self) -> float | None:
        """Return the ratio of the fastest run to the target (met up to 1), or None without plain copies."""
        if not self.floor_seconds:
            return None
        return min(self.seconds) / max(
            CP_TARGET * min(self.cp_seconds), FLOOR_TARGET * min(self.floor_seconds)
        )


def evidence_text(rows: Sequence[EvidenceRow], file_system: str) -> str:
    """Return the published table of results."""
    header = (
        *(
            "case",
            "memory",
            "seconds",
            "cp, seconds",
            "/ fastest",
            "/ median",
            "CPU s",
            "cp CPU s",
            "peak MiB",
            "fs",
        ),
        *("floor, seconds", "/ floor", "/ target"),
    )
    lines = [
        (
            row.case,
            row.memory,
            _join_seconds(row.seconds),
            _join_seconds(row.cp_seconds),
            f"{row.to_fastest:.2f}",
            f"{row.to_median:.2f}",
            f"{row.cpu_s:.1f}",
            f"{row.cp_cpu_s:.1f}",
            f"{row.peak_nbytes / (1 << 20):.0f}",
            file_system,
            f"{min(row.floor_seconds):.1f} {row.floor_means}" if row.floor_seconds else "",
            f"{row.to_floor:.2f}" if row.to_floor else "",
            f"{row.to_target:.2f}" if row.to_target else "",
        )
        for row in rows
    ]
    return format_table(lines, header, right_aligned=(*header[4:9], *header[11:]))


def _join_seconds(seconds: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in seconds)
