"""The watchdog of a job: it ends all processes together when one of them is lost, stuck, stopped or failed.

Each process publishes its heartbeat. Process 0 reads all heartbeats and publishes its decision. The other processes
read only the decision, so that the traffic grows with the number of processes and not with its square. The threads
run while the main thread loads, compiles or waits in a collective operation that cannot be interrupted.

Keys: `heartbeat/INDEX`, `ended/INDEX` (a process that ends early, and why), `decision` (process 0's heartbeat, and
the end of the job), `seen/INDEX` (a process that has read the end).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Literal, Protocol

from trainer.distributed.processes import ConnectionBrokenError

STEP_PHASE = "step"
# Processes that a message names.
MAX_NAMED = 4
NO_PLACES: Mapping[int, str] = MappingProxyType({})

Kind = Literal["lost", "stuck", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Message that a process publishes at intervals while it is alive."""

    count: int  # Heartbeats of the process so far
    place: str  # Its host and process id
    phase: str  # Its current work, such as `load`, `compile`, `step 12` or `save 12`
    # Number of its phases so far. Equal on all processes at the same point of a run.
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
    """The reason why all processes of a job end."""

    # `lost` (no heartbeat), `stuck` (no progress), `failed` (an error) or `stopped` (a signal)
    kind: Kind
    process: int  # Index of the process
    what: str  # One line that names the process
    why: str  # Details, such as its error, its last phase, or the name of the signal
    code: int | None = None  # Exit code of a process that failed

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


# Seconds between two heartbeats of a process, if the two limits below allow it.
INTERVAL_S = 2.0
# A process is lost only after 5 missed heartbeats, so that a slow one does not end the job.
BEATS_PER_TIMEOUT = 5
# Process 0 receives at most 500 heartbeats per second: 4,096 processes send one each 8.2 s.
PROCESSES_PER_S = 500
# Seconds between two looks at the clock.
TICK_S = 0.25
# An error or a signal often reaches all processes at once. The main thread has this long to report
# its own, which says more than that another process has ended.
GRACE_S = 2.0
# Process 0 is lost if it does not answer this long after its connection broke.
BROKEN_S = 3.0
# Process 0 holds the keys. It waits this long for the other processes to read the end of the job.
LINGER_S = 10.0


class SharedTexts(Protocol):
    """Texts published by the processes of a job, by key."""

    index: int
    count: int

    def publish(self, key: str, text: str) -> None:
        """Store a text for all processes, in place of an earlier one."""
        ...

    def read(self, key: str) -> str | None:
        """Return the published text of a key. None if there is none."""
        ...

    def read_by_index(self, key: str) -> dict[int, str]:
        """Return the texts that processes published as `KEY/INDEX`, by index."""
        ...


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Deadlines of a job."""

    timeout_s: float  # Seconds without a heartbeat until a process is lost
    step_timeout_s: float  # Seconds after which an unfinished step is stuck. 0 means no limit.
    # Host and process id of this process and of other known ones, by index
    places: Mapping[int, str]
    # Seconds between two heartbeats of a process in a job of few processes
    beat_s: float = INTERVAL_S
    grace_s: float = GRACE_S  # Seconds for the main thread to report its own error or signal

    def interval_s(self, count: int) -> float:
        """Return the seconds between two heartbeats of each of `count` processes."""
        return min(max(self.beat_s, count / PROCESSES_PER_S), self.timeout_s / BEATS_PER_TIMEOUT)


class Watchdog:
    """Threads that send the heartbeats of this process and watch the other processes."""

    def __init__(
        self,
        texts: SharedTexts,
        settings: WatchSettings,
        *,
        is_broken: Callable[[], bool],
        on_end: Callable[[JobEnd], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a watchdog. `start` starts it.

        Args:
            texts: Texts shared by the processes.
            settings: Deadlines of the job.
            is_broken: Returns whether the runtime reported that the connection to process 0 is broken.
            on_end: Ends this process. A thread calls it when another process has ended the job.
            clock: Returns the seconds of a monotonic clock.
        """
        self.texts = texts
        self.settings = settings
        self.is_broken = is_broken
        self.on_end = on_end
        self.clock = clock
        self.interval_s = settings.interval_s(texts.count)
        self.end: JobEnd | None = None
        self._phase = "start"
        self._num_phases = 0
        self._beats = 0
        # Process 0's last heartbeat, and the time of its arrival.
        self._decision = first_heartbeat(settings.places.get(0))
        self._contact_s = clock()
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._wake = threading.Event()
        # Set while the main thread reports an error.
        self._ending = threading.Event()
        self._monitor = HeartbeatMonitor(
            texts.count,
            timeout_s=settings.timeout_s,
            step_timeout_s=settings.step_timeout_s,
            start_s=clock(),
            places=settings.places,
        )
        self._threads = [
            threading.Thread(target=run, daemon=True)
            for run in (self._send_heartbeats, self._watch_clock)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def enter(self, phase: str) -> None:
        """Set the phase of this process. All processes enter the same phases in the same order."""
        self._phase = phase
        self._num_phases = self._num_phases + 1

    def end_job(self, end: JobEnd) -> None:
        """Publish why this process ends. Return when the other processes can read it, or process 0 is gone.

        Process 0 returns when all other processes have read it, because they read through process 0.
        """
        self._ending.set()
        if not self._closed.is_set() and not self._decided.is_set():
            publisher = threading.Thread(target=self._publish_end, args=(end,), daemon=True)
            # The thread may wait forever for an answer of process 0.
            publisher.start()
            deadline_s = self.clock() + LINGER_S
            while publisher.is_alive() and not self.is_broken() and self.clock() < deadline_s:
                publisher.join(TICK_S)
            if self.texts.index == 0:
                self._decided.wait(LINGER_S + self.interval_s)
        self.close()

    def wait_for_end(self) -> None:
        """Wait until the watchdog ends this process. Return if all other processes are alive.

        Call this after a broken connection between devices. Its error does not name the lost process, but the
        watchdog finds the process by its missing heartbeats.
        """
        self._closed.wait(self.settings.timeout_s + 2 * self.interval_s + self.settings.grace_s)

    def close(self) -> None:
        """Stop watching: all processes have completed their work, or this one reports its own error."""
        self._closed.set()
        self._wake.set()

    def _publish_end(self, end: JobEnd) -> None:
        """Tell the other processes how this process ended the job."""
        with suppress(ConnectionBrokenError):
            self.texts.publish(f"ended/{self.texts.index}", end.to_json())
            self._wake.set()

    def _send_heartbeats(self) -> None:
        """Exchange heartbeats and decisions until the watchdog closes or the job ends."""
        while not self._closed.is_set():
            try:
                self._beats += 1
                beat = Heartbeat(
                    self._beats,
                    self.settings.places[self.texts.index],
                    self._phase,
                    self._num_phases,
                )
                self.texts.publish(f"heartbeat/{self.texts.index}", beat.to_json())
                end = (
                    self._publish_decision(beat) if self.texts.index == 0 else self._read_decision()
                )
            except ConnectionBrokenError:
                end = self._lost_process_0(0.0) if self.is_broken() else None
            if end is not None:
                self._end_process(end)
                return
            self._wake.wait(TICK_S if self.is_broken() else self.interval_s)
            self._wake.clear()

    def _watch_clock(self) -> None:
        """End this process if process 0 does not answer. The other thread cannot: it may wait for an answer."""
        last_s = self.clock()
        broken_s = math.inf
        while not self._closed.wait(TICK_S) and not self._decided.is_set():
            now_s = self.clock()
            # This process was suspended. Its pause must not count as silence of process 0.
            if now_s - last_s > self.settings.timeout_s / 2:
                self._contact_s += now_s - last_s
            last_s = now_s
            if self.is_broken() and broken_s == math.inf:
                broken_s = now_s
                self._wake.set()
            # `is_cut`: no heartbeat of process 0 has arrived in the BROKEN_S seconds since its
            # connection broke.
            silent_s = now_s - self._contact_s
            is_cut = self._contact_s < broken_s < now_s - BROKEN_S
            if self.texts.index and (is_cut or silent_s > self.settings.timeout_s):
                self._end_process(self._lost_process_0(0.0 if is_cut else silent_s))
                return

    def _publish_decision(self, beat: Heartbeat) -> JobEnd | None:
        """Decide in process 0 whether the job ends, and publish the decision. Return None if the job continues."""
        ended = self.texts.read_by_index("ended")
        beats = {
            index: Heartbeat.from_json(text)
            for index, text in self.texts.read_by_index("heartbeat").items()
        }
        end = (
            JobEnd.from_json(ended[min(ended)])
            if ended
            else self._monitor.check(beats, self.clock())
        )
        # The decision contains process 0's heartbeat: one read shows if process 0 is alive, and if
        # the job ends.
        self.texts.publish("decision", json.dumps([beat.to_json(), end.to_json() if end else None]))
        return end

    def _read_decision(self) -> JobEnd | None:
        """Return the end of the job as process 0 decided it, or None."""
        text = self.texts.read("decision")
        if text is None:
            return None
        beat_text, end_text = json.loads(text)
        beat = Heartbeat.from_json(beat_text)
        if self._decision is None or beat.count != self._decision.count:
            self._decision, self._contact_s = beat, self.clock()
        if end_text is None:
            return None
        # Process 0 serves the keys, so it waits for this one before it ends.
        self.texts.publish(f"seen/{self.texts.index}", "")
        return JobEnd.from_json(end_text)

    def _lost_process_0(self, silent_s: float) -> JobEnd:
        return lost_process(0, self._decision, silent_s)

    def _end_process(self, end: JobEnd) -> None:
        """End this process, once. Process 0 first waits until all have read the decision."""
        # Both threads may find an end at the same time. Only the first one ends the process.
        with self._lock:
            if self.end is not None:
                return
            self.end = end
        if self.texts.index == 0:
            self._wait_until_seen(end)
        # On process 0 this follows the wait above, because `end_job` there waits for it.
        self._decided.set()
        if self._ending.is_set() or (
            end.process == self.texts.index and end.kind in ("failed", "stopped")
        ):
            # The main thread of this process reports the error.
            return
        if end.kind in ("failed", "stopped") and self._closed.wait(self.settings.grace_s):
            # The main thread reports its own error.
            return
        if not self._closed.is_set():
            self.on_end(end)

    def _wait_until_seen(self, end: JobEnd) -> None:
        """Wait until all processes that may be alive have read the decision."""
        deadline_s = self.clock() + LINGER_S
        while self.clock() < deadline_s:
            with suppress(ConnectionBrokenError):
                done = {
                    0,
                    end.process,
                    *self.texts.read_by_index("seen"),
                    *self.texts.read_by_index("ended"),
                }
                if len(done) >= self.texts.count:
                    # Processes that have just written still wait for the service's answer.
                    time.sleep(TICK_S)
                    return
            time.sleep(TICK_S)
