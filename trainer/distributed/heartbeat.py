"""Heartbeats of the processes of a job, and the decision that one of them is lost. Pure: no jax, clock or threads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Literal

STEP_PHASE = "step"
# Processes that a message names.
MAX_NAMED = 4
NO_PLACES: Mapping[int, str] = MappingProxyType({})

Kind = Literal["lost", "stuck", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Message that a process publishes at intervals while it is alive.

    Attributes:
        count: Heartbeats of the process so far.
        place: Its host and process id.
        phase: Its current work, such as `load`, `compile`, `step 12` or `save 12`.
        num_phases: Number of its phases so far. Equal on all processes at the same point of a run.
    """

    count: int
    place: str
    phase: str
    num_phases: int

    def to_json(self) -> str:
        """Return the heartbeat as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Heartbeat:
        """Parse a heartbeat from JSON."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The reason why all processes of a job end.

    Attributes:
        kind: `lost` (no heartbeat), `stuck` (no progress), `failed` (an error) or `stopped` (a signal).
        process: Index of the process.
        what: One line that names the process.
        why: Details, such as its error, its last phase, or the name of the signal.
        code: Exit code of a process that failed.
    """

    kind: Kind
    process: int
    what: str
    why: str
    code: int | None = None

    def to_json(self) -> str:
        """Return the reason as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobEnd:
        """Parse a reason from JSON."""
        return cls(**json.loads(text))


def first_heartbeat(place: str | None) -> Heartbeat | None:
    """Return the state of a process before its first heartbeat arrives. None if its place is unknown."""
    return Heartbeat(0, place, "start", 0) if place else None


def lost_process(process: int, beat: Heartbeat | None, silent_s: float) -> JobEnd:
    """Return the `JobEnd` for a lost process.

    Args:
        process: Index of the process.
        beat: Its last heartbeat, with count 0 if none has arrived. None if its place is also unknown.
        silent_s: Seconds since the last heartbeat. 0 if its connection broke.
    """
    if silent_s:
        silence = f"no heartbeat for {silent_s:.0f} s"
    else:
        silence = "its connection broke"
    phase = (
        f"its last phase was `{beat.phase}`"
        if beat and beat.count
        else "no heartbeat of it arrived"
    )
    return JobEnd("lost", process, f"{_process_text(process, beat)} is lost", f"{silence}; {phase}")


@dataclass(frozen=True, slots=True)
class _Observed:
    """The last heartbeat of a process, and when its count and its phase were first observed."""

    beat: Heartbeat | None
    beat_s: float
    phase_s: float


class HeartbeatMonitor:
    """Heartbeats of all processes, as process 0 observes them."""

    def __init__(
        self,
        count: int,
        *,
        timeout_s: float,
        step_timeout_s: float,
        start_s: float,
        places: Mapping[int, str] = NO_PLACES,
    ) -> None:
        """Create a monitor that has observed no heartbeat.

        Args:
            count: Number of processes.
            timeout_s: Seconds without a heartbeat until a process is lost.
            step_timeout_s: Seconds after which an unfinished step is stuck. 0 means no limit.
            start_s: Time now.
            places: Host and process id of the known processes, by index.
        """
        self.timeout_s = timeout_s
        self.step_timeout_s = step_timeout_s
        self._observed = {
            index: _Observed(first_heartbeat(places.get(index)), start_s, start_s)
            for index in range(count)
        }
        self._checked_s = start_s

    def check(self, beats: Mapping[int, Heartbeat], now_s: float) -> JobEnd | None:
        """Return why the job must end, if a process is lost or stuck. Return None otherwise.

        Args:
            beats: The last heartbeat of each process.
            now_s: Time now.
        """
        pause_s = now_s - self._checked_s
        # This process was suspended and observed no heartbeats meanwhile. Its pause must not count as
        # silence of the other processes.
        if pause_s > self.timeout_s / 2:
            self._observed = {
                index: replace(seen, beat_s=seen.beat_s + pause_s, phase_s=seen.phase_s + pause_s)
                for index, seen in self._observed.items()
            }
        self._checked_s = now_s
        self._observed |= {
            index: _updated_observation(self._observed[index], beat, now_s)
            for index, beat in beats.items()
        }
        return self._find_lost(now_s) or self._find_stuck(now_s)

    def _find_lost(self, now_s: float) -> JobEnd | None:
        """Return the end of the job if a process is silent for too long, else None."""
        index = min(self._observed, key=lambda index: self._observed[index].beat_s)
        seen = self._observed[index]
        silent_s = now_s - seen.beat_s
        if silent_s <= self.timeout_s:
            return None
        return lost_process(index, seen.beat, silent_s)

    def _find_stuck(self, now_s: float) -> JobEnd | None:
        """Return the end of the job if a process takes too long for a step, else None."""
        beats = {
            index: seen.beat
            for index, seen in self._observed.items()
            if seen.beat is not None and seen.beat.count
        }
        overdue_s = max(
            (self._step_s(seen, now_s) for seen in self._observed.values()), default=0.0
        )
        # Before the first heartbeat of every process the slowest one is unknown.
        if (
            not self.step_timeout_s
            or overdue_s <= self.step_timeout_s
            or len(beats) < len(self._observed)
        ):
            return None
        # All processes count the same phases in the same order. The ones with the lowest count hold
        # up the job.
        slowest = min(beat.num_phases for beat in beats.values())
        behind = [index for index, beat in beats.items() if beat.num_phases == slowest]
        phase = beats[behind[0]].phase
        first = behind[0]
        if len(behind) == len(beats):
            return JobEnd(
                "stuck",
                first,
                f"`{phase}` is stuck",
                f"no process has finished it in {overdue_s:.0f} s",
            )
        names = ", ".join(_process_text(index, beats[index]) for index in behind[:MAX_NAMED])
        if len(behind) > MAX_NAMED:
            names += f" and {len(behind) - MAX_NAMED} more"
        furthest = max(beats.values(), key=lambda beat: beat.num_phases).phase
        why = f"a step takes more than {self.step_timeout_s:g} s: it is in `{phase}`, others are in `{furthest}`"
        return JobEnd("stuck", first, f"{names} is stuck", why)

    @staticmethod
    def _step_s(seen: _Observed, now_s: float) -> float:
        """Return the seconds since a process began its step. 0 outside of steps."""
        is_step = seen.beat is not None and seen.beat.phase.startswith(STEP_PHASE)
        return now_s - seen.phase_s if is_step else 0.0


def _updated_observation(seen: _Observed, beat: Heartbeat, now_s: float) -> _Observed:
    """Return what is known of a process after a heartbeat."""
    if seen.beat is not None and seen.beat.count == beat.count:
        return seen
    is_same_phase = seen.beat is not None and seen.beat.num_phases == beat.num_phases
    return _Observed(beat, now_s, seen.phase_s if is_same_phase else now_s)


def _process_text(process: int, beat: Heartbeat | None) -> str:
    """Return e.g. `process 3 (host-2, pid 71)`."""
    if beat is None:
        return f"process {process}"
    return f"process {process} ({beat.place})"
