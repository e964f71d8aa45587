"""Convert to a folder with compressed chunks.

The length of a compressed chunk is unknown until it is compressed, so its place cannot be planned. A unit therefore has
whole chunks, a raw file in `.prep/raw` and output files of its own. Once its raw bytes are complete, its chunks are
compressed one after another, the output files are synced, and the unit is noted. Its raw file is then deleted. The disk
needs room for the output and for raw units of two sync points, and several processes compress at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from prepcli.algebra.grids import Chunks, FilePosition
from prepcli.core.errors import PrepError
from prepcli.engine.background_sync import SYNC_INTERVAL_S
from prepcli.engine.checksum_recorder import compute_unknown
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import Files, RunReader, allocated_size
from prepcli.engine.pipeline import MOST_UNSYNCED_NBYTES, PipelineUnit
from prepcli.engine.write_policy import allocate
from prepcli.execution.converter import ExecutionRequest
from prepcli.execution.data_checks import changed_error, file_holes
from prepcli.execution.finalize import CompressedChunks, locate_chunks, raw_chunks
from prepcli.execution.folder_converter import FolderConverter
from prepcli.execution.folder_output import RAW_FOLDER, check_free_space
from prepcli.execution.object_writer import block_numbers
from prepcli.execution.output import DONE_FOLDER, PART_FOLDER, UnitNote
from prepcli.formats.codecs import codec_of
from prepcli.planning.chunk_placement import ChunkExtent, replace_chunks
from prepcli.planning.plan import OutputFile, OutputLeaf, PlacedChunks, Plan
from prepcli.planning.slabs import PAGE
from prepcli.planning.work_units import WorkUnit, find_bucket_units, min_unit_nbytes
from prepcli.stores.buffers import allocate_buffer
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.files import check_no_symlinks, io_error, open_no_follow, sync_paths

PIECE_NBYTES = 1 << 20
# A stopped conversion still compresses complete units for so long, so that less work is lost.
STOP_S = 2.0
# Output files that are synced together: a unit may have very many.
MAX_SYNCED_FILES = 1000


class PackedFolderConverter(FolderConverter):
    """Writes the compressed output of a plan to a folder."""

    # Its unsynced files are those of one sync.
    max_lanes = 1

    def __init__(self, request: ExecutionRequest, out: Path) -> None:
        plan, units = plan_unit_files(request.plan)
        assert plan.compression is not None
        self._codec = codec_of(plan.compression)
        self._level = plan.compression.level
        chunk_nbytes = max((leaf.chunk_nbytes for leaf in plan.leaves), default=0)
        super().__init__(
            replace(request, plan=plan),
            out,
            units,
            encoder_nbytes=self._codec.encoder_nbytes(self._level, chunk_nbytes) + PIECE_NBYTES,
        )
        work = self.folder_output.work
        self.files = [work / RAW_FOLDER / file.path for file in plan.files]
        self._raw = RawFiles(self.files, [file.size for file in plan.files])
        # Boxes of chunks in each raw file, in the order of their offsets, with their blocks of checksums
        self._boxes: dict[int, list[tuple[OutputLeaf, PlacedChunks]]] = {}
        for leaf in plan.leaves:
            for box in leaf.placed_chunks:
                self._boxes.setdefault(box.chunks.file, []).append((leaf, box))
        for boxes in self._boxes.values():
            boxes.sort(key=lambda entry: entry[1].chunks.offset)
        self._extents: dict[int, list[ChunkExtent]] = {}
        for extent in self.extents:
            self._extents.setdefault(extent.file, []).append(extent)
        self._unsynced_paths: list[Path] = []
        self._sync_error: PrepError | None = None
        self._stop_s = 0.0

    def check_target(self) -> None:
        """Raise PrepError if the disk has no room for the remaining units. See `Converter.check_target`."""
        # The compressed size is unknown. Each process has raw units on disk, too: of one point that is compressed, of
        # the next one, and one in progress.
        noted = self.output.units_with(DONE_FOLDER)
        sizes: list[int] = []
        allocated_nbytes = 0
        for number, unit in enumerate(self.units):
            if number not in noted:
                sizes.append(sum(self.plan.files[file].size for file in unit.files))
                allocated_nbytes += sum(allocated_size(self.files[file]) for file in unit.files)
        raw_nbytes = 2 * MOST_UNSYNCED_NBYTES + max(sizes, default=0)
        needed_nbytes = sum(sizes) + min(sum(sizes), raw_nbytes * len(self.pool.indices))
        check_free_space(self.folder_output.folder, max(0, needed_nbytes - allocated_nbytes))

    # Notes of earlier sessions

    def read_note(self, folder: str, number: int) -> UnitNote | None:
        """Return the note of a unit, or None without the lengths of its chunks. See `Converter.read_note`."""
        note = super().read_note(folder, number)
        if note is None or folder == PART_FOLDER:
            return note
        lengths = {file: len(lengths) for file, lengths in note.lengths.items()}
        counts: dict[int, int] = {}
        for file in self.units[number].files:
            counts[file] = sum(extent.chunk_count for extent in self._extents.get(file, ()))
        return note if lengths == counts and len(note.objects) == len(counts) else None

    @contextlib.contextmanager
    def open_written(self, folder: str, batch: Mapping[int, UnitNote]) -> Iterator[RunReader]:
        """Open the raw files of units that are partly written. See `FolderConverter.open_written`."""
        self._open_files()
        files: list[int] = []
        if folder == PART_FOLDER:
            for number in batch:
                files += self.units[number].files
        for file in files:
            self._raw.open_file(file)
        yield self._raw
        for file in files:
            self._raw.close_file(file)

    def find_damaged(
        self, folder: str, batch: Mapping[int, UnitNote], written: RunReader
    ) -> set[int]:
        """Return the streams of units with damaged output files. See `FolderConverter.find_damaged`."""
        if folder == PART_FOLDER:
            return super().find_damaged(folder, batch, written)
        damaged: set[int] = set()
        for note in batch.values():
            if not self._is_intact(note):
                damaged |= note.digests.keys()
        return damaged

    def _is_intact(self, note: UnitNote) -> bool:
        """Return whether the output files of a unit have the bytes of its note."""
        for file, stored in zip(note.lengths, note.objects, strict=True):
            state = xxhash.xxh3_128()
            for path, size in self._stored_files(file, note.lengths[file]):
                try:
                    fd = open_no_follow(path, os.O_RDONLY)
                except FileNotFoundError:
                    return False
                except OSError as error:
                    raise io_error(path, error) from error
                with open(fd, "rb") as content:
                    if os.fstat(fd).st_size != size:
                        return False
                    while piece := content.read(PIECE_NBYTES):
                        state.update(piece)
            if state.hexdigest() != stored.digest:
                return False
        return True

    def keep_part(self, folder: str, number: int, note: UnitNote) -> None:
        """Forget a damaged unit. No raw file is left with its intact tensors. See `FolderConverter.keep_part`."""
        if folder == DONE_FOLDER:
            self.output.delete([f"{PART_FOLDER}/{number}", f"{DONE_FOLDER}/{number}"])
        else:
            super().keep_part(folder, number, note)

    # Writing

    def open_sink(self) -> Files:
        """Return the raw files. See `FolderConverter.open_sink`."""
        check_no_symlinks(self.folder_output.folder)
        return self._raw

    def begin_unit(self, unit: PipelineUnit) -> None:
        """Open the raw file of a unit. See `UnitObserver`."""
        # Another process may have completed a partly written unit, and deleted its raw file. A new file would have
        # zeros in place of the part.
        is_partly_written = bool(unit.digests or unit.prefix)
        for file in self.units[unit.number].files:
            self._raw.open_file(file, must_exist=is_partly_written)

    def note_durable(self, notes: Mapping[int, UnitNote]) -> None:
        """Compress complete units, note them, and delete their raw files. See `FolderConverter.note_durable`."""
        packed: dict[int, UnitNote] = {}
        since_s = time.monotonic()
        for number, note in notes.items():
            try:
                packed[number] = self._compress_unit(number, note)
            except BaseException:
                # A stop or a full disk keeps the units before. Their deleted raw files make room.
                with contextlib.suppress(PrepError):
                    self._note_packed(packed)
                raise
            if time.monotonic() - since_s >= SYNC_INTERVAL_S:
                self._note_packed(packed)
                packed = {}
                since_s = time.monotonic()
        self._note_packed(packed)

    def _note_packed(self, notes: Mapping[int, UnitNote]) -> None:
        """Sync the output files of compressed units, note the units, and delete their raw files."""
        self._sync_output()
        super().note_durable(notes)
        # A part goes before its bytes: another process of this session would believe it.
        self.output.delete(f"{PART_FOLDER}/{number}" for number in notes)
        for number in notes:
            for file in self.units[number].files:
                self._raw.remove_file(file)

    def _sync_output(self) -> None:
        """Make the written output files durable. After a failure no later call succeeds."""
        # The kernel reports a failed writeback once: a second sync would succeed without the bytes.
        if self._sync_error is not None:
            raise self._sync_error
        try:
            sync_paths(self._unsynced_paths)
        except OSError as error:
            self._sync_error = io_error(Path(error.filename or self._unsynced_paths[0]), error)
            raise self._sync_error from error
        self._unsynced_paths.clear()

    def _compress_unit(self, number: int, note: UnitNote) -> UnitNote:
        """Compress the chunks of a complete unit. Return its note with their lengths, and the digest of their bytes."""
        blocks: list[int] = []
        lengths: dict[int, list[int]] = {}
        objects: list[RemoteFile] = []
        for file in self.units[number].files:
            compute_unknown(self.sums, self._extents[file], self._raw)
            blocks += block_numbers(self._extents[file])
            state = xxhash.xxh3_128()
            lengths[file] = []
            chunks = self._raw_chunks(file)
            for path, chunks_of_file in itertools.groupby(chunks, key=lambda chunk: chunk[0]):
                ranges = ((offset, nbytes) for _, offset, nbytes in chunks_of_file)
                try:
                    # Not the folder of the conversion, which may be gone
                    folder = self.folder_output.folder
                    *parents, _ = path.relative_to(folder).parents
                    for parent in reversed(parents):
                        (folder / parent).mkdir(exist_ok=True)
                    lengths[file] += self._write_file(file, path, ranges, state)
                except FileNotFoundError as error:
                    raise changed_error(path) from error
                except OSError as error:
                    raise io_error(path, error) from error
                self._unsynced_paths.append(path)
                if len(self._unsynced_paths) == MAX_SYNCED_FILES:
                    self._sync_output()
            objects.append(RemoteFile("", sum(lengths[file]), state.hexdigest()))
        return replace(
            note,
            blocks=np.array(blocks, np.uint64),
            sums=self.sums[blocks],
            objects=tuple(objects),
            lengths=lengths,
        )

    def _write_file(
        self, file: int, path: Path, chunks: Iterable[tuple[int, int]], state: xxhash.xxh3_128
    ) -> list[int]:
        """Write the compressed chunks of an output file one after another. Return their lengths. Raises OSError."""
        buffer = allocate_buffer(PIECE_NBYTES)
        lengths: list[int] = []
        with open(open_no_follow(path, os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as output:

            def write(data: bytes) -> int:
                state.update(data)
                view = memoryview(data)
                while view:
                    view = view[output.write(view) :]
                return len(data)

            for offset, nbytes in chunks:
                encoder = self._codec.open_encoder(self._level, nbytes)
                length = 0
                for start in range(0, nbytes, PIECE_NBYTES):
                    self._check_stopped()
                    piece = buffer[: min(PIECE_NBYTES, nbytes - start)]
                    self._raw.read_at(file, offset + start, piece)
                    length += write(encoder.compress(piece.data))
                lengths.append(length + write(encoder.flush()))
            # The file is cut at its end only: another process that took this one for dead writes equal bytes.
            output.truncate(sum(lengths))
        return lengths

    def _check_stopped(self) -> None:
        """Raise the error of the pipeline a moment after it has stopped: a high level may take minutes for a unit."""
        error = self.lanes[0].pipeline.error
        if error is None:
            return
        now_s = time.monotonic()
        self._stop_s = self._stop_s or now_s + STOP_S
        if now_s >= self._stop_s:
            raise error

    def _raw_chunks(self, file: int) -> Iterator[tuple[Path, int, int]]:
        """Yield the output file, the offset and the size of each chunk of a raw file, in the order of offsets."""
        folder = self.folder_output.folder / self.plan.item
        packed_path = folder / _packed_path(file)
        for leaf, box in self._boxes[file]:
            for index in box.indices():
                path = packed_path
                if self.plan.storage.has_chunk_files:
                    path = folder / self.plan.storage.chunk_path(leaf.name, index)
                yield path, box.chunks.find(index)[1], leaf.chunk_nbytes

    # Publication

    def _stored_files(self, file: int, lengths: Sequence[int]) -> Iterator[tuple[Path, int]]:
        """Yield the output files of a raw file, and their sizes."""
        if not self.plan.storage.has_chunk_files:
            yield self.folder_output.folder / self.plan.item / _packed_path(file), sum(lengths)
            return
        for (path, _, _), nbytes in zip(self._raw_chunks(file), lengths, strict=True):
            yield path, nbytes

    def compressed_chunks(self) -> CompressedChunks:
        """Return the locations of the compressed chunks. See `FolderConverter.compressed_chunks`."""
        plan = self.plan
        lengths: dict[int, Sequence[int]] = {}
        for note in self.notes.values():
            lengths |= note.lengths
        chunk_paths: list[str] | None = None
        if plan.storage.has_chunk_files:
            chunk_paths = []
            for chunk in raw_chunks(plan.leaves):
                name = plan.leaves[chunk.array].name
                chunk_paths.append(plan.storage.chunk_path(name, chunk.chunk_index))
        paths = [_packed_path(file) for file in range(len(plan.files))]
        return locate_chunks(raw_chunks(plan.leaves), lengths, paths, chunk_paths)

    def check_data(self, digests: Mapping[int, StreamDigest]) -> None:
        """Raise PrepError if another program has changed the output files. See `FolderConverter.check_data`."""
        for note in self.notes.values():
            for file, lengths in note.lengths.items():
                for path, size in self._stored_files(file, lengths):
                    if any(file_holes(path, size)) and not self._is_intact(note):
                        raise changed_error(path)


class RawFiles(Files):
    """Numbered raw files. Each is open while its unit is in progress, and deleted afterwards."""

    is_read_back = True

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int]) -> None:
        """Open no file yet."""
        super().__init__(())
        self.paths = tuple(paths)
        self._sizes = tuple(sizes)
        self._direct = [-1] * len(self.paths)
        # No paced writeback, which would keep descriptors of closed files.
        self._is_kept_open = False
        self._opened: dict[int, int] = {}

    def open_file(self, file: int, *, must_exist: bool = False) -> None:
        """Open a file with its planned size. Bytes of an earlier conversion stay.

        Args:
            file: Number of the file.
            must_exist: Whether it has bytes of an earlier conversion.

        Raises:
            PrepError: The file cannot be written, or must exist and does not.
        """
        path = self.paths[file]
        try:
            if must_exist:
                self._opened[file] = fd = open_no_follow(path, os.O_RDWR)
            else:
                path.parent.mkdir(exist_ok=True)
                self._opened[file] = fd = open_no_follow(path, os.O_RDWR | os.O_CREAT)
            if os.fstat(fd).st_size != self._sizes[file]:
                if must_exist:
                    raise changed_error(path)
                allocate(fd, self._sizes[file])
        except FileNotFoundError as error:
            raise changed_error(path) from error
        except OSError as error:
            raise io_error(path, error) from error

    def close_file(self, file: int) -> None:
        """Close a file. Its bytes stay."""
        os.close(self._opened.pop(file))

    def remove_file(self, file: int) -> None:
        """Close and delete a file. A process on another host may have deleted it."""
        self.close_file(file)
        try:
            self.paths[file].unlink(missing_ok=True)
        except OSError as error:
            raise io_error(self.paths[file], error) from error

    def close(self) -> None:
        """Close all files."""
        for file in [*self._opened]:
            self.close_file(file)

    def check_unchanged(self) -> None:
        """Do nothing: the chunks are compressed from the open files, also if another process has deleted these."""

    def _acquire(self, file: int) -> int:
        return self._opened[file]

    def _release(self, fd: int) -> None:
        pass


def _packed_path(file: int) -> str:
    """Return the path in the item of the compressed chunks of a raw file."""
    # OCDBT names a data file by 32 hexadecimal digits.
    name = hashlib.md5(f"prep packed file {file}".encode(), usedforsecurity=False)
    return f"d/{name.hexdigest()}"


def plan_unit_files(plan: Plan) -> tuple[Plan, tuple[WorkUnit, ...]]:
    """Return the plan with a raw data file for each unit, and its units. A unit has whole chunks."""
    groups: list[tuple[OutputLeaf, PlacedChunks]] = []
    for leaf in plan.leaves:
        for box in leaf.placed_chunks:
            groups.append((leaf, box))
    groups.sort(key=lambda group: (group[1].chunks.file, group[1].chunks.offset))
    # With a file for each group of chunks, tensors with bytes in one group are in one unit.
    positions: dict[Chunks, FilePosition] = {}
    for number, (_, box) in enumerate(groups):
        positions[box.chunks] = number, 0
    units = find_bucket_units(_place_groups(plan, positions, [0] * len(groups)))
    sizes: list[int] = []
    joined: list[WorkUnit] = []
    for members in _join_small(units, min_unit_nbytes(plan)):
        streams: list[int] = []
        files: tuple[int, ...] = ()
        size = 0
        for unit in members:
            streams += unit.streams
            for number in unit.files:
                leaf, box = groups[number]
                # A tensor that stays one run keeps the page offset of its source, as in `place_chunks`.
                offset = -(-size // PAGE) * PAGE + box.chunks.offset % PAGE
                positions[box.chunks] = len(sizes), offset
                # From the first to the last byte of the group
                last_offset = box.chunks.find([stop - 1 for stop in box.stop])[1]
                size = offset + last_offset - box.chunks.offset + leaf.chunk_nbytes
                files = (len(sizes),)
        if files:
            sizes.append(size)
        nbytes = sum(plan.streams[number].nbytes for number in streams)
        joined.append(WorkUnit(tuple(streams), files, nbytes))
    return _place_groups(plan, positions, sizes), tuple(joined)


def _join_small(units: Iterable[WorkUnit], min_nbytes: int) -> list[list[WorkUnit]]:
    """Return consecutive units, joined until they have `min_nbytes` bytes."""
    joined: list[list[WorkUnit]] = []
    nbytes = min_nbytes
    for unit in units:
        if nbytes >= min_nbytes:
            joined.append([])
            nbytes = 0
        joined[-1].append(unit)
        nbytes += unit.nbytes
    if len(joined) > 1 and nbytes < min_nbytes:
        rest = joined.pop()
        joined[-1] += rest
    return joined


def _place_groups(
    plan: Plan, positions: Mapping[Chunks, FilePosition], sizes: Sequence[int]
) -> Plan:
    """Return the plan with groups of chunks at other places, and with data files of these sizes."""
    moved: dict[Chunks, Chunks] = {}
    boxes: dict[str, list[PlacedChunks]] = {}
    for leaf in plan.leaves:
        boxes[leaf.name] = []
        for box in leaf.placed_chunks:
            file, offset = positions[box.chunks]
            chunks = replace(box.chunks, file=file, offset=offset)
            moved[box.chunks] = chunks
            boxes[leaf.name].append(replace(box, chunks=chunks))
    files = tuple(OutputFile(str(number), size) for number, size in enumerate(sizes))
    return replace(replace_chunks(plan, moved, boxes), files=files)
