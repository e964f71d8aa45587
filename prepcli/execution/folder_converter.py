"""Convert to a folder: units are written at offsets of data files that many units share."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from prepcli.core.errors import Option, OutputExistsError, PrepError, text
from prepcli.core.json_values import JsonObject
from prepcli.core.observer import LockedProgress, Progress
from prepcli.engine.background_sync import StreamPrefix, SyncPoint
from prepcli.engine.blobs import can_share_reader, open_blobs
from prepcli.engine.budget import make_budget
from prepcli.engine.checksum_recorder import ChecksumArray, ChecksumRecorder, compute_unknown
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import Files, RunReader, missing_nbytes, open_data_files
from prepcli.engine.lanes import MAX_LANES, count_lanes, lanes_have_threads, run_pipelines
from prepcli.engine.pipeline import Pipeline, PipelineUnit
from prepcli.execution.converter import Converter, ExecutionRequest
from prepcli.execution.data_checks import (
    check_data_files,
    check_unchanged,
    find_damaged,
    find_outdated,
    parse_source_state,
    read_stamps,
    zero_gaps,
)
from prepcli.execution.finalize import CompressedChunks, write_last_files, write_small_file
from prepcli.execution.folder_output import FolderOutput, check_free_space, remove_work_folder
from prepcli.execution.output import (
    DONE_FOLDER,
    PART_FOLDER,
    UnitNote,
    all_checksums,
    all_digests,
)
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    NO_MANIFEST,
    are_files_intact,
    encode_manifest,
    foreign_output_error,
    read_manifest,
)
from prepcli.formats.ocdbt import OCDBT_MANIFEST
from prepcli.planning.chunk_placement import chunk_extents
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan
from prepcli.planning.slabs import min_buffer_nbytes
from prepcli.planning.work_units import WorkUnit, find_folder_units
from prepcli.stores.files import check_no_symlinks, io_error

# A unit has a note of its durable part if it is larger than this, divided by the number of lanes. A kill then loses
# about a second of work.
LARGE_UNIT_NBYTES = 1 << 30
# Notes of an earlier session that are checked together
CHECKED_NBYTES = 1 << 30
MAX_CHECKED = 64


class FolderConverter(Converter):
    """Writes the output of a plan to a folder.

    Attributes:
        max_lanes: Pipelines that may run at the same time.
        sums: Checksums of the output's blocks, by block number. 0 for an unknown one.
    """

    max_lanes: ClassVar[int] = MAX_LANES

    def __init__(
        self,
        request: ExecutionRequest,
        out: Path,
        units: Sequence[WorkUnit] | None = None,
        encoder_nbytes: int = 0,
    ) -> None:
        """Open no file yet.

        Args:
            request: The plan and its options.
            out: Path of the output.
            units: All units of the plan. None for units that share data files.
            encoder_nbytes: Memory of the compression.
        """
        plan = request.plan
        # The matrices of a low-rank update and the pieces of new tokens stay in memory until the end, in addition to
        # the buffers.
        kept_nbytes = max((stream.kept_nbytes for stream in plan.streams), default=0)
        kept_nbytes += encoder_nbytes
        buffer_nbytes = min_buffer_nbytes(plan.streams)
        num_lanes = 1
        # Other processes of this machine have the other cores, and check each unit with all the memory.
        is_alone = request.pool.share.count == 1
        if is_alone and can_share_reader(request.source.byte_sources):
            moved_nbytes = sum(stream.nbytes for stream in plan.streams)
            most_lanes = count_lanes(
                moved_nbytes,
                request.pool.memory_nbytes,
                min_buffer_nbytes=buffer_nbytes,
                kept_nbytes=kept_nbytes,
            )
            num_lanes = min(self.max_lanes, most_lanes)
        budget = make_budget(
            request.pool.memory_nbytes // num_lanes, buffer_nbytes, kept_nbytes=kept_nbytes
        )
        self.folder_output = FolderOutput(out)
        all_units = units or find_folder_units(plan)
        super().__init__(request, self.folder_output, all_units, budget, num_lanes)
        self.out = out
        folder = self.folder_output.folder / plan.item
        self.files = [folder / file.path for file in plan.files]
        self.extents = chunk_extents(plan.leaves)
        self.sums: ChecksumArray = np.zeros(self.num_blocks, np.uint64)
        self._sink: Files | None = None
        self.lanes: list[Lane] = []
        # Set if this process has published the output
        self._manifest: Manifest | None = None

    def error_for_user(self, error: PrepError) -> PrepError:
        """Name the output in the error of a full disk. See `Converter.error_for_user`."""
        # A user knows the output, but not its data files. These are on one disk.
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return io_error(self.out, cause)
        return error

    def is_done(self) -> bool:
        """Return whether the requested output exists. See `Converter.is_done`."""
        if not os.path.lexists(self.out):
            return False
        _check_replaceable(self.out)
        try:
            manifest = read_manifest(self.out)
        except PrepError:
            if self.request.options.overwrite:
                return False
            raise
        is_same_plan = manifest is not None and manifest.plan == self.request.plan_digest
        is_complete = is_same_plan and _is_complete(self.plan, self.out, manifest or NO_MANIFEST)
        is_joint = self.pool.share.count > 1
        if is_complete and (
            is_joint or not (self.request.options.restart or self.request.options.overwrite)
        ):
            return True
        if self.request.options.overwrite:
            return False
        hint = text("{} or {}", Option("out", "NAME"), Option("overwrite", True))
        if is_same_plan:
            why = "this command created it, but its files are damaged"
            if is_complete:
                why = "this command created it earlier"
            raise OutputExistsError(f"{self.out} already exists", why, hint)
        if manifest is None:
            why = "it is empty"
        elif manifest.request != self.plan.request:
            why = f"made by `{manifest.request}`, asked for `{self.plan.request}`"
        else:
            request = self.plan.request
            why = f"made by the same `{request}` from a source that has changed since"
        raise OutputExistsError(f"{self.out} exists and is something else", why, hint)

    def read_manifest(self) -> Manifest:
        """Return the manifest of the published output. See `Converter.read_manifest`."""
        return self._manifest or read_manifest(self.out) or NO_MANIFEST

    def check_target(self) -> None:
        """Raise PrepError if the disk has no room for the remaining bytes."""
        folder = self.folder_output.folder
        check_free_space(folder, missing_nbytes(self.plan, folder))

    def join(self, identity: Mapping[str, object], source: JsonObject) -> bool:
        """Join the conversion. Return False if another process has published the output since the first check."""
        output = self.folder_output
        output.join(identity, source, restart=self.request.options.restart)
        self.session = output.session
        try:
            is_done = self.is_done()
        except PrepError:
            # An empty folder of this conversion would block the next command for the same output.
            if output.is_new:
                output.discard()
            raise
        if is_done:
            output.discard()
        return not is_done

    def remove_leftovers(self) -> None:
        """Remove the work folder from the output."""
        remove_work_folder(self.out)

    # Notes of earlier sessions

    def check_earlier_notes(self) -> None:
        """Read back what other sessions have noted. See `Converter.check_earlier_notes`."""
        output = self.folder_output
        if output.is_published():
            return
        parts: dict[int, UnitNote] = {}
        noted = self.notes.keys() | self.earlier_notes.keys()
        for number in output.units_with(PART_FOLDER) - noted:
            part = self.read_note(PART_FOLDER, number)
            if part and part.session != self.session:
                parts[number] = part
        is_damaged = False
        for folder, notes in ((DONE_FOLDER, self.earlier_notes), (PART_FOLDER, parts)):
            while notes and (batch := self._claim_notes(folder, notes)):
                is_damaged |= self._check_notes(folder, batch)
                for number in batch:
                    notes.pop(number)
                    self.release(number)
        if is_damaged:
            self.look()

    def _claim_notes(self, folder: str, notes: dict[int, UnitNote]) -> dict[int, UnitNote]:
        """Claim units with notes of other sessions, up to CHECKED_NBYTES. Other processes may check the rest."""
        batch: dict[int, UnitNote] = {}
        nbytes = 0
        for number in [*notes]:
            if nbytes >= CHECKED_NBYTES or len(batch) == MAX_CHECKED:
                break
            if not self.claim(number):
                continue
            note = self.read_note(folder, number)
            if note is None or note.session == self.session:
                # Another process has checked it, or has published the output.
                del notes[number]
                self.release(number)
                continue
            batch[number] = note
            nbytes += self.units[number].nbytes
        return batch

    def _check_notes(self, folder: str, batch: dict[int, UnitNote]) -> bool:
        """Compare the bytes of claimed units with their notes. Renew the notes, or delete them.

        Returns:
            Whether bytes were damaged.
        """
        source_at_start = parse_source_state(self.folder_output.source_at_start().get("files"))
        touched = self.find_touched(source_at_start, self.source_at_join, batch.values())
        if touched:
            names = ", ".join(path.name for path in touched)
            self.say(f"{names} may have changed since {self.output.name} was started: comparing")
        digests: dict[int, StreamDigest] = {}
        for note in batch.values():
            digests |= note.digests
        with self.open_written(folder, batch) as written:
            damaged = self.find_damaged(folder, batch, written)
            if touched:
                damaged |= find_outdated(self.readback, digests, source=self.source)
            num_damaged = len(damaged)
            for number, note in batch.items():
                prefix = note.prefix
                if prefix and (touched or not self.readback.has_prefix(prefix, written)):
                    # A prefix has no digest of the source's bytes to compare with a changed source.
                    num_damaged += 1
                    note = replace(note, prefix=None)
                intact = {key: value for key, value in note.digests.items() if key not in damaged}
                note = replace(note, digests=intact, session=self.session)
                streams = [self.plan.streams[stream] for stream in self.units[number].streams]
                num_streams = sum(stream.nbytes > 0 for stream in streams)
                if folder == DONE_FOLDER and len(note.digests) == num_streams:
                    self.note_unit(number, note)
                    self.result.resumed_nbytes += self.units[number].nbytes
                else:
                    self.keep_part(folder, number, note)
        if num_damaged:
            count = len(digests) + sum(note.prefix is not None for note in batch.values())
            self.say(
                f"{num_damaged} of {count} tensors in {self.output.name} are damaged:"
                " writing them again"
            )
        return bool(num_damaged)

    def open_written(
        self, folder: str, batch: Mapping[int, UnitNote]
    ) -> AbstractContextManager[RunReader]:
        """Open the written bytes of units with notes in a folder of the conversion."""
        # A missing or short file is made whole, with zeros.
        self._open_files()
        return Files(self.files)

    def find_damaged(
        self, folder: str, batch: Mapping[int, UnitNote], written: RunReader
    ) -> set[int]:
        """Return the noted streams whose written bytes differ from their notes."""
        digests: dict[int, StreamDigest] = {}
        for note in batch.values():
            digests |= note.digests
        return find_damaged(self.readback, digests, written)

    def keep_part(self, folder: str, number: int, note: UnitNote) -> None:
        """Make the intact streams of a damaged unit its part."""
        # The part comes before the deletion: a kill between the two leaves the note of an older session.
        self.write_note(PART_FOLDER, number, self.part_note(note.digests, note.prefix))
        self.output.delete([f"{DONE_FOLDER}/{number}"])

    # Writing

    def _open_files(self) -> Files:
        """Open the output's data files, once."""
        if self._sink is None:
            self._sink = self.opened.enter_context(self.open_sink())
        return self._sink

    def open_sink(self) -> Files:
        """Open the data files to write."""
        return open_data_files(self.plan, self.folder_output.folder)

    def write_units(self, units: Iterator[PipelineUnit]) -> None:
        """Write units at their offsets. See `Converter.write_units`."""
        sink = self._open_files()
        progress = LockedProgress(self.pool.progress)
        lane_units = [units]
        for lane in range(1, len(self.lane_orders)):
            lane_units.append(self.claim_units(lane))
        with open_blobs(self.source.byte_sources, self.budget.cache_nbytes) as reader:
            has_threads = lanes_have_threads(
                [unit.nbytes for unit in self.units],
                len(lane_units),
                are_in_memory=reader.are_in_memory and sink.are_in_memory,
            )
            for units in lane_units:
                lane = Lane(
                    self,
                    units,
                    reader=reader,
                    sink=sink,
                    progress=progress,
                    has_threads=has_threads,
                )
                self.lanes.append(lane)
            pipelines = [lane.pipeline for lane in self.lanes]
            try:
                run_pipelines(pipelines)
            finally:
                for pipeline in pipelines:
                    self.add_result(pipeline.result)
                self.lanes = []
        sink.check_unchanged()

    def prepare_unit(self, number: int) -> PipelineUnit:
        """Return a claimed unit with its durable part, if there is any. See `Converter.prepare_unit`."""
        unit = super().prepare_unit(number)
        part = self.read_note(PART_FOLDER, number)
        # A process of this session may have read another source, before it has found that and deleted its notes.
        if part is None or part.session != self.session or part.source != self.source_digest:
            return unit
        return replace(unit, digests=part.digests, prefix=part.prefix)

    def begin_unit(self, unit: PipelineUnit) -> None:
        """Prepare the data files for a unit, in the thread that writes it."""

    def part_note(
        self, digests: Mapping[int, StreamDigest], prefix: StreamPrefix | None
    ) -> UnitNote:
        """Return the note of the durable part of a unit."""
        # Without checksums: the next process may write other values to a part of a block. Blocks without a checksum
        # are read back before the publication.
        return UnitNote(digests, session=self.session, writer=self.writer, prefix=prefix)

    def note_durable(self, notes: Mapping[int, UnitNote]) -> None:
        """Note complete units after the sync of their bytes."""
        for number, note in notes.items():
            self.note_unit(number, note)
            self.release(number)

    # Publication

    def publish(self) -> None:
        """Verify and publish the output. See `Converter.publish`."""
        output = self.folder_output
        notes = list(self.notes.values())
        digests = all_digests(self.plan, notes)
        # Each process has read the source at another time. Older notes were compared in this session.
        self.check_source(digests, parse_source_state(output.source_at_session.get("files")), notes)
        compressed = self.compressed_chunks()
        files = self.files
        if compressed is not None:
            files = [output.folder / self.plan.item / path for path in compressed.files]
        # Bytes between tensors have no digest, so that a resumed conversion would keep whatever an earlier session left
        # there. In new files they are zero.
        if compressed is None and not output.is_first_session:
            zero_gaps(self.plan, files)
        stamps = read_stamps(files)
        self.check_data(digests)
        # A kill leaves an incomplete output, and the next start writes all of these files again. The folders are
        # checked here. Each file is opened without following links.
        check_no_symlinks(output.folder)
        sums = all_checksums(self.num_blocks, notes)
        if not sums.all():
            with Files(self.files) as written:
                compute_unknown(sums, self.extents, written)
        self._manifest = write_last_files(
            self.plan,
            self.identity,
            digests=digests,
            sums=sums,
            put=output.put,
            copy=lambda path, file: write_small_file(file, output.folder / path),
            compressed=compressed,
        )
        output.put(MANIFEST_FILE, encode_manifest(self._manifest))
        # The stamps were read before the check of the data. Equal stamps show that no file has changed since.
        check_unchanged(stamps)
        # Another program may have created the output meanwhile.
        _check_replaceable(self.out)
        output.publish(overwrite=self.request.options.overwrite)

    def compressed_chunks(self) -> CompressedChunks | None:
        """Return the locations of compressed chunks, or None if the chunks are raw."""
        return None

    def check_data(self, digests: Mapping[int, StreamDigest]) -> None:
        """Raise PrepError if another program has changed the data files.

        Args:
            digests: Digests of all streams, by number.
        """
        check_data_files(self.plan, self.files, digests=digests, reader=self.readback)


class Lane:
    """A pipeline that writes units, and notes them once they are durable. It is the observer of its pipeline."""

    def __init__(
        self,
        converter: FolderConverter,
        units: Iterable[PipelineUnit],
        *,
        reader: RunReader,
        sink: Files,
        progress: Progress,
        has_threads: bool,
    ) -> None:
        self._converter = converter
        self._recorder = ChecksumRecorder(converter.extents, converter.sums)
        # Notes of units that are not synced yet
        self._unsynced: dict[int, UnitNote] = {}
        self.pipeline = Pipeline(
            converter.plan.streams,
            reader,
            sink=sink,
            budget=converter.budget,
            progress=progress,
            units=units,
            observer=self,
            on_digest=converter.integrity.on_digest,
            checksums=self._recorder if converter.plan.leaves else None,
            has_threads=has_threads,
        )

    def begin_unit(self, unit: PipelineUnit) -> None:
        """Prepare the data files for a unit. See `UnitObserver`."""
        self._converter.begin_unit(unit)

    def complete_unit(self, number: int) -> None:
        """Make the note of a unit, to be written after the next sync. See `UnitObserver`."""
        converter = self._converter
        blocks = self._recorder.take_new()
        sums = converter.sums[blocks.astype(np.int64)]
        digests: dict[int, StreamDigest] = {}
        for stream in converter.units[number].streams:
            if converter.plan.streams[stream].nbytes and stream in self.pipeline.result.digests:
                digests[stream] = self.pipeline.result.digests[stream]
        self._unsynced[number] = UnitNote(
            digests, blocks, sums, converter.session, converter.writer
        )

    def record_durable(self, point: SyncPoint) -> None:
        """Write the notes of durable units, and of the durable part of a large one. See `UnitObserver`."""
        converter = self._converter
        converter.note_durable({number: self._unsynced.pop(number) for number in point.complete})
        part = point.part
        # Each lane has a unit in progress.
        min_nbytes = LARGE_UNIT_NBYTES // len(converter.lane_orders)
        if part and converter.units[part.unit].nbytes >= min_nbytes:
            converter.write_note(
                PART_FOLDER, part.unit, converter.part_note(part.digests, part.prefix)
            )


def _check_replaceable(out: Path) -> None:
    """Raise PrepError if the path is neither free, nor an empty folder, nor an output of prep."""
    try:
        # This is a single call, because another process may be replacing the output.
        names = os.listdir(out)
    except FileNotFoundError:
        is_replaceable = not out.is_symlink()
    except NotADirectoryError:
        is_replaceable = False
    except OSError as error:
        raise io_error(out, error) from error
    else:
        is_replaceable = not names or MANIFEST_FILE in names
    if not is_replaceable:
        raise foreign_output_error(str(out))


def _is_complete(plan: Plan, out: Path, manifest: Manifest) -> bool:
    """Return whether all files of an output exist, its listed files are intact, and data files have their sizes."""
    folder = out / plan.item
    if plan.compression:
        sizes_by_path = manifest.packed
    else:
        sizes_by_path = {file.path: file.size for file in plan.files}
    small_files = [file.path for file in plan.small_files]
    for item in plan.items:
        small_files.append(str(Path(item or "", plan.storage.metadata_file)))
        if not plan.storage.has_chunk_files:
            small_files.append(str(Path(item or "", OCDBT_MANIFEST)))
    for path, size in sizes_by_path.items():
        data_file = folder / path
        if not data_file.is_file() or data_file.stat().st_size != size:
            return False
    for path in small_files:
        if not (folder / path).is_file():
            return False
    if manifest.checksums is not None and not (out / CHECKSUMS_FILE).is_file():
        return False
    return are_files_intact(out, manifest)
