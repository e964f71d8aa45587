"""Convert to a bucket: objects are assembled in memory, and no local file is written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

import numpy as np

from prepcli.core.errors import RERUN_HINT, Option, PrepError, text, usage_error
from prepcli.core.json_values import JsonObject
from prepcli.core.launchers import PARENT_VARIABLE
from prepcli.core.observer import NullProgress
from prepcli.engine.background_sync import SyncPoint
from prepcli.engine.blobs import open_blobs
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import RunReader
from prepcli.engine.object_assembler import make_object_budget
from prepcli.engine.pipeline import Pipeline, PipelineUnit
from prepcli.execution.bucket_output import (
    BucketOutput,
    check_stored_output,
    has_intact_files,
    stored_manifest,
)
from prepcli.execution.converter import Converter, ExecutionRequest
from prepcli.execution.data_checks import parse_source_state
from prepcli.execution.finalize import (
    CompressedChunks,
    locate_chunks,
    raw_chunks,
    send_small_file,
    write_last_files,
)
from prepcli.execution.object_writer import ObjectWriter, compression_threads
from prepcli.execution.output import (
    DONE_FOLDER,
    RUN_FILE,
    WORK_FOLDER,
    UnitNote,
    all_checksums,
    all_digests,
)
from prepcli.formats.codecs import codec_of
from prepcli.formats.manifest import MANIFEST_FILE, encode_manifest, foreign_output_error
from prepcli.planning.manifest_fields import FileRecord, Manifest
from prepcli.planning.object_files import OBJECT_NBYTES
from prepcli.planning.plan import SmallFile
from prepcli.planning.slabs import min_buffer_nbytes
from prepcli.planning.work_units import find_bucket_units
from prepcli.stores import object_store
from prepcli.stores.bucket_lock import BucketLock, check_lock, is_locked_by
from prepcli.stores.byte_ranges import RemoteFile, map_in_daemon_threads, retry_policy_from_env
from prepcli.stores.object_store import (
    NUM_SMALL_REQUESTS,
    RETRIES,
    Bucket,
    ObjectStoreUrl,
    part_nbytes,
)
from prepcli.stores.object_writes import (
    ObjectUploads,
    missing_object_error,
    publish_content,
)

# Units that a process claims at once. Their requests are sent concurrently.
MAX_CLAIMED = 16
# Thousands of processes that wait must not list the store every second.
LOOK_S = 0.5
LOOK_S_PER_PROCESS = 0.01
MAX_LOOK_S = 30.0
# A store may list an object later than it has written it. Up to so many missing notes are looked up by name.
MAX_LOOKED_UP = 32


class BucketConverter(Converter):
    """Writes the output of a plan below a URL. The data files of the plan are from `plan_object_files`."""

    def __init__(self, request: ExecutionRequest, url: ObjectStoreUrl) -> None:
        plan = request.plan
        self.bucket = Bucket(url, RETRIES, retry_policy_from_env(os.environ, request.say))
        memory_nbytes = request.pool.memory_nbytes
        largest_nbytes = max((file.size for file in plan.files), default=0)
        kept_nbytes = max((stream.kept_nbytes for stream in plan.streams), default=0)
        self._num_compressing = 0
        if compression := plan.compression:
            chunk_nbytes = max((leaf.chunk_nbytes for leaf in plan.leaves), default=0)
            encoder_nbytes = codec_of(compression).encoder_nbytes(compression.level, chunk_nbytes)
            self._num_compressing = compression_threads(encoder_nbytes, memory_nbytes)
            # As many contexts again for chunks of split objects, continued by a later piece
            kept_nbytes += 2 * self._num_compressing * encoder_nbytes
        budget, self._limits = make_object_budget(
            memory_nbytes,
            min_buffer_nbytes=min_buffer_nbytes(plan.streams),
            kept_nbytes=kept_nbytes,
            object_nbytes=OBJECT_NBYTES,
            largest_nbytes=largest_nbytes,
            part_nbytes=part_nbytes(largest_nbytes),
            num_compressing=self._num_compressing,
        )
        self.bucket_output = BucketOutput(self.bucket, request.plan_digest, request.say)
        super().__init__(request, self.bucket_output, find_bucket_units(plan), budget)
        self._writer: ObjectWriter | None = None
        # Objects at the last look
        self._existing: dict[str, RemoteFile] | None = None

    def read_manifest(self) -> Manifest:
        """Return the manifest of the published output. See `Converter.read_manifest`."""
        file = self.bucket.find_file(MANIFEST_FILE)
        manifest = stored_manifest(self.bucket, [] if file is None else [file])
        if manifest is None:
            raise PrepError(f"{self.bucket.name} has no {MANIFEST_FILE}", "", RERUN_HINT)
        return manifest

    # Joining

    def is_done(self) -> bool:
        """Return whether the requested output exists. See `Converter.is_done`."""
        is_restarted = self.request.options.restart
        # Another process may already have joined the unfinished conversion, except for the workers of one command.
        is_alone = len(self.pool.indices) == self.pool.share.count
        if is_restarted and not is_alone and PARENT_VARIABLE not in os.environ:
            raise usage_error(
                text("{} is not supported with several processes", Option("restart", True)),
                "another process may already write there",
                text("delete the objects below {}, then {}", self.bucket.name, RERUN_HINT),
            )
        count = len(self.plan.files) + len(self.plan.small_files) + 2 * len(self.units)
        if count > object_store.MAX_OBJECTS:
            # A listing would not have all of them.
            raise usage_error(
                f"{self.bucket.name} would have {count:,} objects",
                f"up to {object_store.MAX_OBJECTS:,} are supported",
                text("{}, or another mesh", Option("storage", "ocdbt")),
            )
        files = self.bucket.list_files()
        manifest = stored_manifest(self.bucket, files)
        if manifest is None:
            paths = {file.path for file in files}
            # A process that has not begun the conversion has written state only.
            has_others = any(not path.startswith(f"{WORK_FOLDER}/") for path in paths)
            if has_others and f"{WORK_FOLDER}/{RUN_FILE}" not in paths:
                raise foreign_output_error(self.bucket.name)
            return False
        is_joint = self.pool.share.count > 1
        is_same = manifest.plan == self.request.plan_digest and has_intact_files(
            self.bucket, files, manifest
        )
        if is_joint and is_same:
            return True
        if self.request.options.overwrite:
            return False
        check_stored_output(
            self.bucket,
            files,
            manifest,
            self.request.plan_digest,
            restart=self.request.options.restart,
        )
        return True

    def check_target(self) -> None:
        """Check that no other plan is being written there."""
        check_lock(self.bucket, self.request.plan_digest)

    def join(self, identity: Mapping[str, object], source: JsonObject) -> bool:
        """Join the conversion. Return False if the output was published meanwhile. See `Converter.join`."""
        is_worker = PARENT_VARIABLE in os.environ
        self.bucket_output.join(
            identity,
            source,
            # The parent of a worker has restarted the conversion.
            restart=self.request.options.restart and not is_worker,
            is_done=self.is_done,
            may_begin=self.pool.share.index == 0,
        )
        self.session = self.bucket_output.session
        return not self.output.is_published()

    def remove_leftovers(self) -> None:
        """Delete the state and the lock of a process killed after the publication, and late notes."""
        # The output is complete, also if they stay.
        with suppress(PrepError):
            has_state = bool(self.bucket_output.list_state())
            if has_state or is_locked_by(self.bucket, self.request.plan_digest):
                with BucketLock(self.bucket, self.request.plan_digest, say=self.say):
                    self.bucket_output.delete_state()

    # Notes

    def check_earlier_notes(self) -> None:
        """Believe no note of another session: its units are written again. Look for the objects of ended processes."""
        self._existing = None

    def read_note(self, folder: str, number: int) -> UnitNote | None:
        """Return the note of a unit in this session. See `Converter.read_note`."""
        note = super().read_note(folder, number)
        return note if note is not None and note.session == self.session else None

    def look(self) -> None:
        """Read the notes of other processes, several at a time."""
        unknown = [number for number in range(len(self.units)) if number not in self.notes]
        found = self.bucket_output.units_with(DONE_FOLDER)
        if len(unknown) <= MAX_LOOKED_UP:
            found = self.bucket_output.find_notes(unknown)
        numbers = sorted(found.intersection(unknown))
        contents = self.bucket_output.read_many(f"{DONE_FOLDER}/{number}" for number in numbers)
        num_invalid = 0
        for number, content in zip(numbers, contents):
            note = self.decode_note(number, content)
            if note is None or note.session != self.session:
                num_invalid += content is not None
            else:
                self.add_note(number, note)
        if num_invalid and not self.has_begun:
            self.say(f"{num_invalid} parts written by another run or version: writing again")
        if not self.has_begun and self.pool.share.index == 0:
            self.result.resumed_nbytes = sum(self.units[number].nbytes for number in self.notes)

    def look_s(self) -> float:
        """Return the seconds between two listings of the state. See `Converter.look_s`."""
        return min(MAX_LOOK_S, LOOK_S + LOOK_S_PER_PROCESS * self.pool.share.count)

    def find_noted(self) -> set[int]:
        """Return the believed notes that still exist. See `Converter.find_noted`."""
        return self.bucket_output.find_notes(self.notes.keys())

    def count_durable(self) -> int:
        """Return the number of bytes with known notes. See `Converter.count_durable`."""
        # A process that a signal stops does not wait for the store.
        return sum(self.units[number].nbytes for number in list(self.notes))

    # Writing

    def claim_units(self, lane: int = 0) -> Iterator[PipelineUnit]:
        """Yield the units that this process can claim. See `Converter.claim_units`."""
        pending = [number for number in self.lane_orders[lane] if number not in self.notes]
        # A unit that is checked is written alone: other processes may claim the next ones.
        max_claimed = 1 if self.checks_units else MAX_CLAIMED
        for first in range(0, len(pending), max_claimed):
            batch = pending[first : first + max_claimed]
            claims = map_in_daemon_threads(
                self.bucket_output.claim, map(str, batch), num_threads=NUM_SMALL_REQUESTS
            )
            claimed = [number for number, claim in zip(batch, claims) if claim is not None]
            if not claimed:
                continue
            # Another process may have noted them since this one has looked.
            contents = self.bucket_output.read_many(f"{DONE_FOLDER}/{number}" for number in claimed)
            if self.output.is_published():
                return
            for number, content in zip(claimed, contents):
                note = self.decode_note(number, content)
                if note is not None and note.session == self.session:
                    self.add_note(number, note)
                    continue
                yield self.prepare_unit(number)
                if self.checks_units:
                    return

    def write_units(self, units: Iterator[PipelineUnit]) -> None:
        """Assemble and send the objects of units. See `Converter.write_units`."""
        # Objects of units without a note: a kill came between them and the note. Their bytes are computed
        # again and compared, because only the note has their digests and checksums.
        if self._existing is None:
            self._existing = {file.path: file for file in self.bucket.list_files()}
        uploads = ObjectUploads(
            self.bucket, self._existing, self._limits.parts_in_flight, on_sent=self._count_sent
        )
        self._writer = ObjectWriter(
            self.plan,
            self.units,
            uploads,
            self._limits,
            on_done=self._note_sent,
            num_compressing=self._num_compressing,
        )
        assembler = self._writer.assembler
        with (
            closing(assembler),
            open_blobs(self.source.byte_sources, self.budget.cache_nbytes) as reader,
        ):
            outcome = Pipeline(
                self.plan.streams,
                reader,
                sink=assembler,
                budget=self.budget,
                progress=self.pool.progress,
                units=_expected(self._writer, units),
                observer=self,
                on_digest=self._add_digest,
            ).run()
            assembler.wait()
            self.add_result(replace(outcome, written_nbytes=0))
            self._write_missing_pieces(self._writer, reader)
        # Its memory makes room for the checks of the source.
        self._writer = None

    def _add_digest(self, number: int, digest: StreamDigest) -> None:
        self.integrity.on_digest(number, digest)
        assert self._writer is not None
        self._writer.add_digest(number, digest)

    def begin_unit(self, unit: PipelineUnit) -> None:
        """Begin to assemble the objects of a unit. See `UnitObserver`."""
        assert self._writer is not None
        self._writer.begin(unit.number)

    def complete_unit(self, number: int) -> None:
        """Wait for the objects of the unit, which complete it. See `UnitObserver`."""

    def record_durable(self, point: SyncPoint) -> None:
        """Ignore a sync: objects need none. See `UnitObserver`."""

    def _write_missing_pieces(self, writer: ObjectWriter, reader: RunReader) -> None:
        """Read the streams of the missing pieces again until all pieces are sent."""
        # Each pass assembles at least one piece, because the memory is free when it begins. The digests
        # of a pass are ignored: its streams have a part of the rows.
        while streams := writer.missing_streams(self.budget.slab_nbytes):
            outcome = Pipeline(
                streams,
                reader,
                sink=writer.assembler,
                budget=self.budget,
                progress=NullProgress(),
            ).run()
            writer.assembler.wait()
            self.add_result(replace(outcome, written_nbytes=0))
            self.pool.check()

    def _note_sent(self, number: int, note: UnitNote) -> None:
        self.note_unit(number, replace(note, session=self.session, writer=self.writer))

    def _count_sent(self, nbytes: int) -> None:
        # Several threads add to it. It is a report, so that a lost addition does no harm.
        self.result.written_nbytes += nbytes

    # Publication

    def publish(self) -> None:
        """Publish the output, and delete the state of the conversion. See `Converter.publish`.

        Raises:
            PrepError: An object is missing or was changed, or the store does not answer.
        """
        try:
            self._publish_objects()
        except PrepError:
            # A process that this one took for dead may have published, and deleted the state.
            with suppress(PrepError):
                if self.output.is_published():
                    return
            raise

    def _publish_objects(self) -> None:
        output = self.bucket_output
        notes = list(self.notes.values())
        listed = {file.path: file for file in self.bucket.list_files()}
        damaged: dict[int, str] = {}
        for number, note in self.notes.items():
            for file in note.objects:
                # Stores may list objects late.
                if listed.get(file.path) != file and self.bucket.find_file(file.path) != file:
                    damaged[number] = file.path
        if damaged:
            # The next start writes these units again.
            output.delete(f"{DONE_FOLDER}/{number}" for number in damaged)
            raise missing_object_error(self.bucket, next(iter(damaged.values())))
        digests = all_digests(self.plan, notes)
        # Units of earlier conversions, and of other processes, were read at other times.
        self.check_source(digests, parse_source_state(output.source_at_start().get("files")), notes)
        # Objects of an earlier try are compared, and not sent again.
        uploads = ObjectUploads(self.bucket, listed)

        def send(path: str, content: bytes, start: int, size: int) -> None:
            uploads.send(path, np.frombuffer(content, np.uint8), start=start, size=size)

        # A copied file may be larger than the memory budget.
        large_files = threading.Lock()

        def copy(path: str, file: SmallFile) -> FileRecord:
            return send_small_file(file, partial(send, path), large_files=large_files)

        compressed: CompressedChunks | None = None
        if self.plan.compression:
            lengths: dict[int, Sequence[int]] = {}
            for note in notes:
                lengths |= note.lengths
            paths = [file.path for file in self.plan.files]
            compressed = locate_chunks(raw_chunks(self.plan.leaves), lengths, paths)
        manifest = write_last_files(
            self.plan,
            self.identity,
            digests=digests,
            sums=all_checksums(self.num_blocks, notes),
            put=lambda path, content: send(path, content, 0, len(content)),
            copy=copy,
            compressed=compressed,
            num_threads=NUM_SMALL_REQUESTS,
        )
        output.confirm()
        publish_content(self.bucket, MANIFEST_FILE, encode_manifest(manifest))
        assert output.is_published()
        output.delete_state()


def _expected(writer: ObjectWriter, units: Iterator[PipelineUnit]) -> Iterator[PipelineUnit]:
    """Yield units after the writer expects them."""
    for unit in units:
        writer.expect(unit.number)
        yield unit
