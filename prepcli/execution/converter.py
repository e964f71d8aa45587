"""A converter writes the output of a plan, together with its workers and with any number of other processes.

Each process claims units without a note, writes them, and notes them once they are durable. It then waits for the units
of other processes, and takes over the units of an ended process. After all units are noted, one process gets the claim
`publish` and gives the output its name. `output` describes the shared state.
"""

from __future__ import annotations

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.json_values import JsonObject
from prepcli.core.launchers import PARENT_VARIABLE
from prepcli.core.signals import note_durable_work
from prepcli.engine.budget import Budget, anonymous_nbytes
from prepcli.engine.conversion_result import ConversionResult
from prepcli.engine.digest import StreamDigest, record_digest
from prepcli.engine.pipeline import PipelineUnit
from prepcli.execution.data_checks import (
    IntegrityChecker,
    SourceChangedError,
    SourceState,
    StreamReader,
    find_outdated,
    read_source_state,
    source_changed_error,
    touched_files,
)
from prepcli.execution.finalize import check_small_files
from prepcli.execution.output import (
    DONE_FOLDER,
    PART_FOLDER,
    PUBLISH,
    Claim,
    Output,
    UnitNote,
    host_identity,
    make_identity,
)
from prepcli.execution.workers import ExecutionOptions, WorkerPool
from prepcli.planning import coverage
from prepcli.planning.chunk_placement import chunk_extents, count_blocks
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan
from prepcli.planning.work_units import WorkUnit, order_units
from prepcli.restore.digest_checks import check_before_reading, find_transformed
from prepcli.sources.source import Source
from prepcli.stores.paths import AnyPath

LOOK_S = 0.2
# Thousands of processes that wait must not list the notes all the time.
LOOK_S_PER_PROCESS = 0.005


class Converter(ABC):
    """The part of one process in a conversion. Subclasses define how units become durable.

    Attributes:
        request: The plan and its options.
        output: The output, with the state of the conversion.
        units: All units of the plan.
        budget: How the memory is divided among buffers.
        identity: Identity of the conversion, in the manifest. `run.json` has it with the number of units.
        session: Session of this process. A note of another one is checked before it is believed.
        notes: The believed notes, by unit.
        earlier_notes: The notes of other sessions, by unit.
        result: The work of this process.
        lane_orders: The order in which each lane of this process claims units. A lane is a pipeline that runs together
            with others.
    """

    def __init__(
        self,
        request: ExecutionRequest,
        output: Output,
        units: Sequence[WorkUnit],
        budget: Budget,
        num_lanes: int = 1,
    ) -> None:
        self.request = request
        self.plan = request.plan
        self.source = request.source
        self.pool = request.pool
        self.say = request.say
        self.output = output
        self.units = units
        self.budget = budget
        self.identity = make_identity(self.plan, request.plan_digest)
        self.session = ""
        self.notes: dict[int, UnitNote] = {}
        self.earlier_notes: dict[int, UnitNote] = {}
        self.result = ConversionResult()
        self.source_at_join: SourceState = []
        self.source_digest = ""
        self.num_blocks = count_blocks(chunk_extents(self.plan.leaves))
        self.readback = StreamReader(self.plan.streams, budget, self.pool.progress)
        self.integrity = IntegrityChecker(
            self.plan, self.source, allow_overflow=request.options.allow_overflow
        )
        self.writer = f"{host_identity()}:{os.getpid()}"
        self.lane_orders: list[list[int]] = []
        # As if each lane was a process: lanes begin in other data files, because writes to one file take turns.
        for lane in self.pool.share.split(num_lanes):
            self.lane_orders.append(order_units(units, count=lane.count, index=lane.index))
        self._claims: dict[int, Claim] = {}
        # Files that are open during the conversion
        self.opened = ExitStack()
        self.checks_units = False
        self.has_begun = False
        self._shows_progress = False
        self._has_said_waiting = False

    def run(self) -> ConversionResult:
        """Write units until all are noted, and return once the output is published.

        Returns:
            The work of this process and its workers.

        Raises:
            PrepError: The source changed, the output exists and may not be replaced, or the system refused to read or
                write.
        """
        try:
            if self.is_done():
                self.remove_leftovers()
                return ConversionResult(already_done=True)
            start_nbytes = anonymous_nbytes()
            self._check_before_writing()
            with closing(self):
                record = {**self.identity, "units": record_digest(repr(self.units).encode())}
                source_record: JsonObject = {
                    "files": [list(entry) for entry in self.source_at_join]
                }
                self.result.already_done = not self.join(record, source_record)
                if not self.result.already_done:
                    with note_durable_work(self._describe_durable):
                        self.pool.start()
                        while not self.output.is_published():
                            self.write_all()
                            with self.claim_publication() as may_publish:
                                if may_publish:
                                    self.publish()
                peaks = self.result.peak_nbytes, self.readback.peak_nbytes, anonymous_nbytes()
                peak_nbytes = max(peaks)
            self.remove_leftovers()
        except PrepError as error:
            raise self.error_for_user(error) from error.__cause__
        if self.result.already_done:
            return self.result
        self.result.peak_nbytes = max(0, peak_nbytes - start_nbytes)
        self.pool.add_reports(self.result)
        return self.result

    def _check_before_writing(self) -> None:
        """Check the source and the plan, before the first change: a refused plan leaves no files."""
        self.source_at_join = read_source_state(self.plan.source_files, self.source)
        self.source_digest = record_digest(repr(self.source_at_join).encode())
        check_small_files(self.plan)
        self.check_target()
        coverage.check(self.plan, self.budget.slab_nbytes)
        streams = self.plan.streams
        if not any(tensor.digests or tensor.made_from for tensor in self.source.all_tensors):
            # No digest is recorded.
            return
        if self.pool.share.count == 1:
            check_before_reading(self.source, streams, self.pool.memory_nbytes, self.pool.progress)
        else:
            # Each process checks the units that it writes.
            self.checks_units = bool(find_transformed(self.source, streams))

    def error_for_user(self, error: PrepError) -> PrepError:
        """Return the error of a conversion as users see it."""
        return error

    # What depends on the kind of output

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether the requested output exists.

        With several processes, a late process never replaces the output of its peers. Raise PrepError if something
        else is there.
        """

    @abstractmethod
    def check_target(self) -> None:
        """Raise PrepError if the output cannot be stored."""

    @abstractmethod
    def join(self, identity: Mapping[str, object], source: JsonObject) -> bool:
        """Join the conversion. Return False if the output was published meanwhile.

        Args:
            identity: Identity of the conversion. Processes of one conversion agree on the units.
            source: State of the source when this process began.
        """

    @abstractmethod
    def check_earlier_notes(self) -> None:
        """Check the notes of other sessions that no other process checks. Delete the notes of damaged units."""

    @abstractmethod
    def write_units(self, units: Iterator[PipelineUnit]) -> None:
        """Write units, and note them by `note_unit`."""

    @abstractmethod
    def publish(self) -> None:
        """Check the output, complete its files, and give it its name. This process has the claim `publish`."""

    @abstractmethod
    def read_manifest(self) -> Manifest:
        """Return the manifest of the published output."""

    @abstractmethod
    def remove_leftovers(self) -> None:
        """Remove the state of a conversion from a published output."""

    def close(self) -> None:
        """Close the open files, release all claims, and leave the conversion."""
        self.opened.close()
        while self._claims:
            _, claim = self._claims.popitem()
            claim.__exit__(None, None, None)
        self.output.leave()

    # Units

    def write_all(self) -> None:
        """Write units until all are noted, or the output is published."""
        self.look()
        self.check_earlier_notes()
        total_nbytes = sum(unit.nbytes for unit in self.units)
        done_nbytes = self._durable_nbytes(self.notes.keys())
        if done_nbytes and not self.has_begun:
            sizes = f"{format_bytes(done_nbytes)} of {format_bytes(total_nbytes)}"
            self.say(f"resuming {self.output.name}: {sizes} are durable")
        self.pool.progress.begin(self.plan.command, total_nbytes, done_nbytes)
        self._shows_progress = True
        self.has_begun = True
        try:
            while len(self.notes) < len(self.units) and not self.output.is_published():
                units = self.claim_units()
                first = next(units, None)
                if first is None:
                    self._wait()
                    self.check_earlier_notes()
                else:
                    self.write_units(itertools.chain([first], units))
                    self.look()
        finally:
            self._shows_progress = False
            self.pool.progress.end()
        if not self.output.is_published():
            self._check_own_units()

    def look(self) -> None:
        """Read the notes of other processes."""
        for number in self.output.units_with(DONE_FOLDER):
            if number in self.notes or number >= len(self.units):
                continue
            note = self.read_note(DONE_FOLDER, number)
            if note is None:
                continue
            if note.session != self.session:
                self.earlier_notes[number] = note
                continue
            self.earlier_notes.pop(number, None)
            self.add_note(number, note)

    def add_note(self, number: int, note: UnitNote) -> None:
        """Add a believed note of another process."""
        self.notes[number] = note
        # The parent of a worker reads the notes itself. The progress has the bytes of this process and its workers.
        host, _, _ = self.writer.rpartition(":")
        pids = [os.getpid(), *self.pool.worker_pids()]
        is_counted = note.writer in {f"{host}:{pid}" for pid in pids}
        if self._shows_progress and not is_counted and PARENT_VARIABLE not in os.environ:
            self.pool.progress.advance(self.units[number].nbytes)

    def find_noted(self) -> AbstractSet[int]:
        """Return the units with an existing note."""
        return self.output.units_with(DONE_FOLDER)

    def read_note(self, folder: str, number: int) -> UnitNote | None:
        """Return the note of a unit, or None if it is missing, damaged or of another conversion."""
        return self.decode_note(number, self.output.read(f"{folder}/{number}"))

    def decode_note(self, number: int, content: bytes | None) -> UnitNote | None:
        """Return the note of a unit from its content, or None if it is not a note of this unit."""
        if content is None:
            return None
        note = UnitNote.decode(content, self.request.plan_digest)
        if note is None or number >= len(self.units):
            return None
        streams = {*note.digests} | ({note.prefix.stream_number} if note.prefix else set())
        is_of_unit = streams <= {*self.units[number].streams}
        return note if is_of_unit and all(note.blocks < self.num_blocks) else None

    def claim(self, number: int) -> bool:
        """Claim a unit. Return False if another process has it."""
        claim = self.output.claim(str(number))
        if claim is None:
            return False
        self._claims[number] = claim
        return True

    def release(self, number: int) -> None:
        """Release the claim of a unit."""
        self._claims.pop(number).__exit__(None, None, None)

    def claim_units(self, lane: int = 0) -> Iterator[PipelineUnit]:
        """Yield the units that this process can claim, in the order of one of its lanes."""
        for number in self.lane_orders[lane]:
            if number in self.notes or number in self.earlier_notes or not self.claim(number):
                continue
            # Another process may have noted the unit since this one has looked. The order counts: the state is
            # removed after the publication, so that the missing note of a complete unit is never taken for an
            # unwritten unit.
            note = self.read_note(DONE_FOLDER, number)
            if note is not None or self.output.is_published():
                self.release(number)
                continue
            yield self.prepare_unit(number)
            if self.checks_units:
                # The next unit is checked before the buffers of its pipeline exist.
                return

    def prepare_unit(self, number: int) -> PipelineUnit:
        """Return a claimed unit. Raise DamagedError if one of its tensors is damaged."""
        streams = self.units[number].streams
        if self.checks_units:
            check_before_reading(
                self.source,
                [self.plan.streams[stream] for stream in streams],
                self.pool.memory_nbytes,
                self.pool.progress,
            )
        return PipelineUnit(number, streams)

    def note_unit(self, number: int, note: UnitNote) -> None:
        """Write the note of a durable unit. Called in one of several threads."""
        self.notes[number] = self.write_note(DONE_FOLDER, number, note)

    def write_note(self, folder: str, number: int, note: UnitNote) -> UnitNote:
        """Write the note of a unit, or of its durable part, with its size and the state of the source. Return it."""
        nbytes = sum(self.plan.streams[stream].nbytes for stream in note.digests)
        if note.prefix:
            nbytes += note.prefix.nbytes
        note = replace(note, nbytes=nbytes, source=self.source_digest)
        self.output.write(f"{folder}/{number}", note.encode(self.request.plan_digest))
        return note

    def add_result(self, result: ConversionResult) -> None:
        """Add the bytes and the times of a pipeline to the result."""
        self.result.add(result)
        # The pipelines run in one process, whose memory each of them sees.
        self.result.peak_nbytes = max(self.result.peak_nbytes, result.peak_nbytes)

    def _wait(self) -> None:
        """Wait a moment for other processes, and read their notes."""
        self.pool.check()
        count = len(self.units) - len(self.notes)
        if count and not self._has_said_waiting:
            self.say(f"waiting for {count_text(count, 'part')} of other processes")
            self._has_said_waiting = True
        time.sleep(self.look_s())
        self.look()

    def look_s(self) -> float:
        """Return the seconds between two looks at the notes of other processes."""
        return LOOK_S + LOOK_S_PER_PROCESS * self.pool.share.count

    # Checks

    def _check_own_units(self) -> None:
        """Raise PrepError if the source has changed while this process read it. Its notes are then deleted."""
        own = [number for number, note in self.notes.items() if note.writer == self.writer]
        digests: dict[int, StreamDigest] = {}
        for number in own:
            digests |= self.notes[number].digests
        try:
            self.check_source(digests, self.source_at_join)
        except PrepError as error:
            # The source may be deleted as soon as another process has published the output.
            if self.output.is_published():
                return
            # After a signal, or if a file cannot be read, the next start compares the notes.
            if isinstance(error, SourceChangedError):
                self.output.delete(f"{DONE_FOLDER}/{number}" for number in own)
            raise

    def find_touched(
        self, baseline: SourceState, now: SourceState, notes: Iterable[UnitNote] = ()
    ) -> list[AnyPath]:
        """Return the files of the source that may have changed between two looks, or for the writer of a note."""
        touched = touched_files(self.source.files, baseline, now=now)
        # The source of a note may have been in its place for a time, and then the one before again.
        if touched or all(note.source == self.source_digest for note in notes):
            return touched
        return list(self.source.files)

    def check_source(
        self,
        digests: Mapping[int, StreamDigest],
        baseline: SourceState,
        notes: Iterable[UnitNote] = (),
    ) -> None:
        """Raise PrepError if the source has changed since it was read.

        If the inode or change time of any file differs from `baseline`, or from those that the writer of a note saw,
        all streams in `digests` are read again.
        """
        now = read_source_state(self.plan.source_files, self.source)
        touched = self.find_touched(baseline, now, notes)
        if touched:
            names = ", ".join(path.name for path in touched)
            self.say(f"{names} may have changed while it was read: comparing")
            if find_outdated(self.readback, digests, source=self.source):
                raise source_changed_error(touched, self.source)

    @contextmanager
    def claim_publication(self) -> Iterator[bool]:
        """Wait for the claim `publish`. Yield whether the output is complete, and no other process has published it."""
        claim: Claim | None = None
        while claim is None and not self.output.is_published():
            claim = self.output.claim(PUBLISH)
            if claim is None:
                self._wait()
        with claim or nullcontext():
            is_missing = not self.output.is_published()
            if is_missing:
                # A process that has found its source changed deletes its notes.
                noted = self.find_noted()
                self.notes = {number: self.notes[number] for number in self.notes.keys() & noted}
            yield is_missing and len(self.notes) == len(self.units)

    def count_durable(self) -> int:
        """Return the number of durable bytes of the output."""
        done = self.output.units_with(DONE_FOLDER)
        return self._durable_nbytes({number for number in done if number < len(self.units)})

    def _describe_durable(self) -> str:
        """Describe the durable part of the output, for the message of a stop. Empty if there is none."""
        done_nbytes = self.count_durable()
        if not done_nbytes:
            return ""
        total_nbytes = sum(unit.nbytes for unit in self.units)
        sizes = f"{format_bytes(done_nbytes)} of {format_bytes(total_nbytes)}"
        return f"{sizes} are kept in {self.output.name}"

    def _durable_nbytes(self, done: AbstractSet[int]) -> int:
        """Return the bytes of complete units, and of the durable parts of others."""
        nbytes = sum(self.units[number].nbytes for number in done)
        for number in self.output.units_with(PART_FOLDER) - done:
            if part := self.read_note(PART_FOLDER, number):
                nbytes += part.nbytes
        return nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRequest:
    """A plan to execute in a folder or below a URL.

    Attributes:
        plan: The plan of the whole output.
        plan_digest: Digest of the plan. It identifies the conversion in notes and manifests.
        source: The opened source of the plan.
        pool: The workers of this process, its share of the plan, its memory and its progress.
        options: How the output is written.
        say: Prints a line for the user.
    """

    plan: Plan
    plan_digest: str
    source: Source
    pool: WorkerPool
    options: ExecutionOptions
    say: Callable[[str], None]
