"""Execute a plan into an object store: objects are assembled in memory, and no local file is written.

Each process writes its units of work and notes them in the store (`bucket_run`). The process with the last note
publishes the output: it writes the index, the settings and, last, the manifest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace

from prepcli.core.errors import RERUN_HINT, STOPPED, Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text, format_duration
from prepcli.core.observer import NullProgress
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import anonymous_nbytes
from prepcli.engine.files import RunReader
from prepcli.engine.fills import piece_nbytes
from prepcli.engine.low_rank import matrix_nbytes
from prepcli.engine.object_assembler import ObjectAssembler
from prepcli.engine.object_budget import make_object_budget
from prepcli.engine.pipeline import ConversionResult, Pipeline
from prepcli.execution.bucket_publication import BucketPublication
from prepcli.execution.bucket_run import RUN_OBJECT, BucketRun, UnitNote
from prepcli.execution.execute import make_run_identity
from prepcli.execution.finalize import check_small_files
from prepcli.execution.object_compressor import compression_threads
from prepcli.execution.output_urls import RETRIES
from prepcli.execution.request import ExecutionRequest
from prepcli.execution.resume import StreamReader, find_outdated
from prepcli.execution.signals import PARENT_VARIABLE
from prepcli.execution.source_checks import (
    IntegrityChecker,
    SourceState,
    read_source_state,
    source_changed_error,
    touched_files,
)
from prepcli.execution.staging import WORK_FOLDER
from prepcli.execution.stored_outputs import check_stored_output, has_intact_files, stored_manifest
from prepcli.execution.unit_progress import UnitProgress
from prepcli.formats.codecs import codec_of
from prepcli.formats.manifest import MANIFEST_FILE, foreign_output_error
from prepcli.planning import coverage
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.object_files import OBJECT_NBYTES
from prepcli.planning.object_passes import streams_of_spans
from prepcli.planning.plan import Plan
from prepcli.planning.slabs import min_buffer_nbytes, split_streams
from prepcli.planning.work_units import divide_units, find_work_units
from prepcli.restore.digest_checks import check_before_reading
from prepcli.stores import object_store
from prepcli.stores.bucket_lock import BucketLock, check_lock, is_locked_by
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.object_store import Bucket, part_nbytes
from prepcli.stores.object_url import ObjectStoreUrl
from prepcli.stores.object_writes import ObjectUploads
from prepcli.stores.retries import retry_policy_from_env

# A process that notes no unit for so long counts as missing.
PATIENCE_S = 600.0
FIRST_LOOK_S = 0.5
# Thousands of processes that wait must not list the store every second.
LOOK_S_PER_PROCESS = 0.01
MAX_LOOK_S = 30.0
# Time for the process with the last note to publish, before process 0 does it, then process 1, and so on.
PUBLICATION_S = 60.0
MAX_TURN = 9


class BucketExecutor:
    """Writes the output of a plan below a URL, together with its workers and with other processes.

    Attributes:
        request: The plan and its options. The data files of the plan are from `plan_object_files`.
        bucket: Client of the output's URL.
        patience_s: Time without a new unit until other processes count as missing.
    """

    def __init__(self, request: ExecutionRequest, url: ObjectStoreUrl) -> None:
        self.request = request
        self.plan = request.plan
        self.source = request.source
        self.pool = request.pool
        self.note = request.note
        self.bucket = Bucket(url, RETRIES, retry_policy_from_env(os.environ, request.note))
        self.patience_s = PATIENCE_S
        largest_nbytes = max((file.size for file in self.plan.files), default=0)
        kept_nbytes = max(matrix_nbytes(self.plan.streams), piece_nbytes(self.plan.streams))
        self.num_compressing = 0
        if compression := self.plan.compression:
            self.num_compressing = compression_threads(compression, self.pool.memory_nbytes)
            # As many contexts again for chunks of split objects, continued by a later piece
            encoder_nbytes = codec_of(compression).encoder_nbytes(compression.level)
            kept_nbytes += 2 * self.num_compressing * encoder_nbytes
        self.budget, self.limits = make_object_budget(
            self.pool.memory_nbytes,
            min_buffer_nbytes=min_buffer_nbytes(self.plan.streams),
            kept_nbytes=kept_nbytes,
            object_nbytes=OBJECT_NBYTES,
            largest_nbytes=largest_nbytes,
            part_nbytes=part_nbytes(largest_nbytes),
            num_compressing=self.num_compressing,
        )
        self.units = find_work_units(self.plan)
        self._identity = make_run_identity(self.plan, request.run_id)
        self._run = BucketRun(self.bucket, self._identity, self.pool.share)
        self._lock: BucketLock | None = None
        self._sent_nbytes = 0

    def run(self) -> ConversionResult:
        """Write this process's units, and wait until the output is published.

        Returns:
            The work of this process and its workers.

        Raises:
            PrepError: The source changed, the output exists and may not be replaced, another process failed, or the
                store does not answer.
        """
        self._check_restart()
        self._check_object_count()
        files = self.bucket.list_files()
        if self._is_already_done(files):
            self._delete_leftovers(files)
            return ConversionResult(already_done=True)
        start_nbytes = anonymous_nbytes()
        source_state = read_source_state(self.plan.source_files, self.source)
        check_small_files(self.plan)
        coverage.check(self.plan, lambda: split_streams(self.plan.streams, self.budget.slab_nbytes))
        # Before the first write: a refused source leaves no run, and the objects of a replaced output. One of several
        # processes checks its share only, once the others can see its error.
        if self.pool.share.count == 1:
            self._check_transformed(self.plan)
        with self._holding_lock():
            if not self._join(source_state):
                return ConversionResult(already_done=True)
            with self._run.recording_errors():
                self.pool.start()
                result = self._write_units(source_state)
                self._finish()
        result.peak_nbytes = max(0, max(result.peak_nbytes, anonymous_nbytes()) - start_nbytes)
        self.pool.add_reports(result)
        return result

    def read_manifest(self) -> Manifest:
        """Return the manifest of the published output."""
        file = self.bucket.find_file(MANIFEST_FILE)
        manifest = stored_manifest(self.bucket, [] if file is None else [file])
        if manifest is None:
            raise PrepError(f"{self.bucket.name} has no {MANIFEST_FILE}", "", RERUN_HINT)
        return manifest

    def _check_transformed(self, plan: Plan) -> None:
        """Check the tensors that a plan reads in another form than the one with a recorded digest."""
        check_before_reading(self.source, plan.streams, self.pool.memory_nbytes, self.pool.progress)

    def _check_still_needed(self) -> None:
        """Raise PrepError if a run with another plan has begun since this process joined.

        The checks of the source take a while, and another process may have failed meanwhile.
        """
        try:
            self._run.check_same_run()
        except PrepError:
            # A second process with the same share may have written it.
            if not self._is_published():
                raise

    # Joining

    def _check_restart(self) -> None:
        """Raise UsageError for a restart in several processes, except for the workers of one command."""
        # A process may join the unfinished run before process 0 deletes its objects.
        is_alone = len(self.pool.indices) == self.pool.share.count
        if self.request.restart and not is_alone and PARENT_VARIABLE not in os.environ:
            raise usage_error(
                text("{} is not supported with several processes", Option("restart", True)),
                "another process may already write there",
                text("delete the objects below {}, then {}", self.bucket.name, RERUN_HINT),
            )

    def _check_object_count(self) -> None:
        """Raise UsageError if the output and its state would have more objects than a listing may have."""
        count = len(self.plan.files) + len(self.plan.small_files) + len(self.units)
        if count > object_store.MAX_OBJECTS:
            raise usage_error(
                f"{self.bucket.name} would have {count:,} objects",
                f"up to {object_store.MAX_OBJECTS:,} are supported",
                text("{}, or another mesh", Option("storage", "ocdbt")),
            )

    def _is_already_done(self, files: Sequence[RemoteFile]) -> bool:
        """Return whether the requested output exists.

        With several processes, a late process never replaces the output of its peers.

        Raises:
            PrepError: The URL holds something else, or `--overwrite` is missing.
        """
        manifest = stored_manifest(self.bucket, files)
        run_path = f"{WORK_FOLDER}/{RUN_OBJECT}"
        if manifest is None:
            if files and all(file.path != run_path for file in files):
                raise foreign_output_error(self.bucket.name)
            return False
        is_joint = self.pool.share.count > 1
        is_same = manifest.plan == self.request.run_id and has_intact_files(
            self.bucket, files, manifest
        )
        if self.request.overwrite and not (is_joint and is_same):
            return False
        if not (is_joint and is_same):
            check_stored_output(
                self.bucket, files, manifest, self.request.run_id, restart=self.request.restart
            )
        return True

    def _delete_leftovers(self, files: Sequence[RemoteFile]) -> None:
        """Delete the state and the lock of a process killed after the publication.

        Raises:
            PrepError: A process with another plan is about to replace the output.
        """
        if self.pool.share.index:
            return
        has_state = any(file.path.startswith(f"{WORK_FOLDER}/") for file in files)
        if has_state or is_locked_by(self.bucket, self.request.run_id):
            with self._holding_lock():
                self._run.delete_state()

    def _holding_lock(self) -> AbstractContextManager[object]:
        """Hold the lock of the URL in process 0. In other processes, check that no other plan holds it."""
        if self.pool.share.index == 0:
            self._lock = BucketLock(self.bucket, self.request.run_id, note=self.note)
            return self._lock
        check_lock(self.bucket, self.request.run_id)
        return nullcontext()

    def _join(self, source_state: SourceState) -> bool:
        """Begin the run, or wait until process 0 has begun it. Return False if the output is published."""
        if self.pool.share.index == 0:
            # Another process may have written objects since the first listing.
            files = self.bucket.list_files()
            if self._is_already_done(files):
                self._run.delete_state()
                return False
            self._run.begin(files, source_state, restart=self.request.restart)
            return True
        deadline_s = time.monotonic() + self.patience_s
        while not self._run.is_open():
            if self._is_published():
                return False
            if time.monotonic() > deadline_s:
                why = f"it did not begin for {format_duration(self.patience_s)}"
                raise PrepError("process 0 is not running", why, RERUN_HINT, STOPPED)
            time.sleep(self._look_s)
        return True

    @property
    def _look_s(self) -> float:
        """Seconds between two looks at the state."""
        return min(MAX_LOOK_S, FIRST_LOOK_S + LOOK_S_PER_PROCESS * self.pool.share.count)

    def _is_published(self) -> bool:
        file = self.bucket.find_file(MANIFEST_FILE)
        if file is None:
            return False
        manifest = stored_manifest(self.bucket, [file])
        return manifest is not None and manifest.plan == self.request.run_id

    # Writing

    def _write_units(self, source_state: SourceState) -> ConversionResult:
        """Write the incomplete units of this process."""
        own = divide_units(self.units, self.pool.share.count)[self.pool.share.index]
        done = self._run.find_done(len(self.units)).intersection(own)
        invalid = self._run.delete_invalid_notes(done)
        if invalid:
            parts = count_text(len(invalid), "part")
            self.note(f"{parts} written by another run or version: writing again")
        done -= invalid
        pending = [number for number in own if number not in done]
        done_nbytes = sum(self.units[number].nbytes for number in own if number in done)
        total_nbytes = sum(self.units[number].nbytes for number in own)
        if done_nbytes:
            self.note(f"resuming {self.bucket.name}: {len(own) - len(pending)} of {len(own)} parts")
        self.pool.progress.begin(self.plan.command, total_nbytes, done_nbytes)
        try:
            result = self._write_pending(pending)
        finally:
            self.pool.progress.end()
        result.resumed_nbytes = done_nbytes
        result.written_nbytes = self._sent_nbytes
        self._check_source(result.digests, source_state)
        return result

    def _write_pending(self, pending: Sequence[int]) -> ConversionResult:
        """Write units. Return the result with digests by stream number of the plan."""
        units = {number: self.units[number] for number in pending}
        numbers: list[int] = []
        file_numbers: list[int] = []
        for unit in units.values():
            numbers += unit.streams
            file_numbers += unit.files
        # Objects of units without a note: a kill came between them and the note. Their bytes are computed
        # again and compared, because only the note has their digests and checksums.
        existing = {file.path: file for file in self.bucket.list_files()}
        uploads = ObjectUploads(
            self.bucket, existing, self.limits.parts_in_flight, on_sent=self._count_sent
        )
        progress = UnitProgress(
            self.plan,
            units,
            uploads,
            on_done=self._note_unit,
            num_compressing=self.num_compressing,
        )
        share_plan = self._share_plan(numbers)
        integrity = IntegrityChecker(
            share_plan, self.source, allow_overflow=self.request.allow_overflow
        )
        if self.pool.share.count > 1:
            self._check_transformed(share_plan)
            self._check_still_needed()

        def on_digest(position: int, digest: str) -> None:
            integrity.on_digest(position, digest)
            progress.add_digest(numbers[position], digest)

        assembler = ObjectAssembler(
            {number: self.plan.files[number] for number in file_numbers},
            self._spans(file_numbers),
            self.limits,
            send=progress.send,
            on_complete=progress.record_checksums,
        )
        with (
            closing(assembler),
            open_blobs(self.source.byte_sources, self.budget.cache_nbytes) as reader,
        ):
            result = Pipeline(
                share_plan.streams,
                reader,
                sink=assembler,
                budget=self.budget,
                progress=self.pool.progress,
                on_digest=on_digest,
            ).run()
            assembler.wait()
            self._write_missing_pieces(assembler, reader, numbers, result)
        result.digests = {numbers[position]: digest for position, digest in result.digests.items()}
        return result

    def _share_plan(self, numbers: Sequence[int]) -> Plan:
        """Return the plan with some of its streams, in this order, and the checks of their tensors."""
        streams = [self.plan.streams[number] for number in numbers]
        names = {stream.name for stream in streams}
        checks = [check for check in self.plan.checks if check.name in names]
        return replace(self.plan, streams=tuple(streams), checks=tuple(checks))

    def _spans(self, file_numbers: Collection[int]) -> dict[int, list[tuple[int, int]]]:
        """Return the byte ranges written by streams, by file."""
        spans: dict[int, list[tuple[int, int]]] = {number: [] for number in file_numbers}
        for file, start, stop in coverage.written_spans(self.plan):
            if file in spans:
                spans[file].append((start, stop))
        return spans

    def _write_missing_pieces(
        self,
        assembler: ObjectAssembler,
        reader: RunReader,
        numbers: Sequence[int],
        result: ConversionResult,
    ) -> None:
        """Read the streams of the missing pieces again until all pieces are sent."""
        streams = [self.plan.streams[number] for number in numbers]
        # Each pass assembles at least one piece, because the memory is free when it begins. The digests
        # of a pass are ignored: its streams have a part of the rows.
        while missing := assembler.missing_spans():
            assembler.begin_pass()
            again = streams_of_spans(streams, missing, slab_nbytes=self.budget.slab_nbytes)
            outcome = Pipeline(
                again, reader, sink=assembler, budget=self.budget, progress=NullProgress()
            ).run()
            assembler.wait()
            result.read_nbytes += outcome.read_nbytes
            result.copied_nbytes += outcome.copied_nbytes
            result.peak_nbytes = max(result.peak_nbytes, outcome.peak_nbytes)
            self.pool.check()

    def _note_unit(self, number: int, note: UnitNote) -> None:
        # Process 0 may have been started a second time, for example while its machine was suspended.
        if self._lock is not None:
            self._lock.check()
        self._run.write_note(number, note)

    def _count_sent(self, nbytes: int) -> None:
        # Several threads add to it. It is a report, so that a lost addition does no harm.
        self._sent_nbytes += nbytes

    def _check_source(self, digests: Mapping[int, str], before: SourceState) -> None:
        """Raise PrepError unless the source still has the bytes of `digests`."""
        now = read_source_state(self.plan.source_files, self.source)
        touched = touched_files(self.source.files, before, now=now)
        if not touched:
            return
        names = ", ".join(path.name for path in touched)
        self.note(f"{names} may have changed while it was read: comparing")
        reader = StreamReader(self.plan.streams, self.budget, self.pool.progress)
        if find_outdated(reader, digests, source=self.source):
            raise source_changed_error(touched, self.source)

    # Publication

    def _finish(self) -> None:
        """Publish the output if all units are complete, or wait until another process has done so."""
        publication = BucketPublication(
            self.plan,
            self.bucket,
            self._run,
            self._identity,
            units=self.units,
            lock=self._lock,
            # Units of earlier runs, and of other processes, were read at other times.
            check_digests=lambda digests: self._check_source(digests, self._run.source_at_start),
        )
        if len(self._run.find_done(len(self.units))) == len(self.units):
            self._publish(publication)
            return
        share = self.pool.share
        self.note(f"share {share.index} of {share.count} is done; waiting for the others")
        num_done = -1
        last_change_s = time.monotonic()
        while True:
            time.sleep(self._look_s)
            self.pool.check()
            files = self._run.list_state()
            if all(file.path != RUN_OBJECT for file in files) and self._is_published():
                # Notes of this process, written after the other one had deleted the state
                self._run.delete_state(files)
                return
            self._run.check_failures(files)
            done = self._run.find_done(len(self.units), files)
            now_s = time.monotonic()
            if len(done) != num_done:
                num_done = len(done)
                last_change_s = now_s
            # The process with the last note publishes. It may have been killed since, or the store may have
            # listed the note too late for it.
            is_complete = num_done == len(self.units)
            if is_complete and now_s - last_change_s > publication_wait_s(share.index):
                self._publish(publication)
                return
            if now_s - last_change_s > self.patience_s:
                raise self._missing_error(num_done)

    def _publish(self, publication: BucketPublication) -> None:
        """Publish the output, unless another process does so at the same time."""
        try:
            publication.publish()
        except PrepError:
            # The other process deletes the state that this one reads.
            if not self._is_published():
                raise

    def _missing_error(self, num_done: int) -> PrepError:
        why = (
            f"{num_done} of {len(self.units)} parts are written, and none was added for "
            f"{format_duration(self.patience_s)}"
        )
        return PrepError("a process is not running", why, RERUN_HINT, STOPPED)


def publication_wait_s(index: int) -> float:
    """Return the seconds after the last note until process `index` publishes the output.

    Thousands of processes must not read all notes at the same time.

    >>> publication_wait_s(0), publication_wait_s(1), publication_wait_s(4095)
    (60.0, 120.0, 540.0)
    """
    return PUBLICATION_S * min(1 + index, MAX_TURN)
