"""Write a training step to an object store: each process uploads a data file of its own chunks, from memory.

A file is uploaded while its chunks are copied from the shards, without a disk. Tensors of one process are
digested on the way. The remaining tensors are divided among the processes, and read back from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from prepcli.algebra.boxes import Box, intersect, slices, volume
from prepcli.algebra.grids import ChunkIndex
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.blobs import open_blobs
from prepcli.engine.checkpoint_store import HostLeaf, HostShard
from prepcli.engine.checksum_recorder import ChecksumArray, ChecksumRecorder
from prepcli.engine.files import RunReader
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.host_leaves import HostLeafReader
from prepcli.execution.bucket_store import NUM_THREADS
from prepcli.execution.finalize import (
    WORK_FOLDER,
    write_last_files,
)
from prepcli.execution.step_writer import NOTE_STEM, step_reader
from prepcli.execution.training_storage import StepSave
from prepcli.formats.manifest import MANIFEST_FILE, encode_manifest
from prepcli.planning.object_files import LeafGroup, ProcessFiles
from prepcli.planning.plan import OutputLeaf, Plan
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import RemoteFile, map_in_daemon_threads
from prepcli.stores.object_store import Bucket, part_nbytes
from prepcli.stores.object_writes import publish_content
from prepcli.stores.paths import StoreListing, read_all

# Memory for the parts of the data file in flight, and their maximum number
PARTS_NBYTES = 64 << 20
MAX_PARTS_IN_FLIGHT = 8

Shards = list[tuple[Box, np.ndarray]]  # fetched shards of a leaf, with their boxes


@dataclass(frozen=True, slots=True)
class BucketStep:
    """A step of all processes of a run in a bucket.

    Attributes:
        save: The step, with the shards of this process.
        files: The data files of all processes.
        bucket: Client of the step's URL.
        store_run_files: Uploads the files of the run. Called before the step becomes visible.
        check_lock: Raises PrepError if another run has taken the URL over. Process 0 calls it.
    """

    save: StepSave
    files: ProcessFiles
    bucket: Bucket
    store_run_files: Callable[[], None]
    check_lock: Callable[[], None]

    @property
    def plan(self) -> Plan:
        """The plan of the step, with a data file for each process."""
        return self.files.plan

    def write_own(self, checksums: ChecksumRecorder) -> Mapping[int, str]:
        """Upload the chunks of this process. See `StepOutput.write_own`."""
        # Objects are visible at once, but no reader opens a step without its manifest.
        file = self.plan.files[self.save.group.index]
        digests: dict[int, str] = {}
        pieces = self._data_file_pieces(checksums, digests)
        if file.size:
            num_parts = min(MAX_PARTS_IN_FLIGHT, PARTS_NBYTES // part_nbytes(file.size))
            self.bucket.write_pieces(
                f"{self.plan.item}/{file.path}",
                pieces,
                size=file.size,
                parts_in_flight=max(2, num_parts),
            )
        self.store_run_files()
        return digests

    def _data_file_pieces(
        self, checksums: ChecksumRecorder, digests: dict[int, str]
    ) -> Iterator[bytes | memoryview]:
        """Yield the bytes of this process's data file, in order.

        The leaves are written in groups, and only the shards of one group are in memory at a time.
        """
        index = self.save.group.index
        leaves = {leaf.name: leaf for leaf in self.files.plan.leaves}
        chunks = self.files.chunks[index]
        stop = 0  # end of the bytes yielded so far
        for group in self.files.groups:
            shards = {name: _fetch_shards(name, self.save.leaves[name]) for name in group.leaves}
            for name in group.leaves:
                for chunk_index, offset in chunks.get(name, ()):
                    data = _chunk_bytes(leaves[name], chunk_index, shards[name])
                    checksums.record((StridedCopy(0, index, offset, data.size),), data)
                    yield bytes(offset - stop)  # zeros up to the aligned start of the chunk
                    yield data.data
                    stop = offset + data.size
            if group.owner == index:
                digests |= self._digest_group(group, shards)

    def _digest_group(self, group: LeafGroup, shards: Mapping[str, Shards]) -> dict[int, str]:
        """Return the digest of each tensor in a group of leaves. This process must have all shards of the group."""
        # Streams refer to leaves by position, so all leaves are passed. Only the group's are read.
        leaves: list[HostLeaf] = []
        for name, leaf in self.save.leaves.items():
            if name in shards:
                leaves.append(_fetched_leaf(leaf, shards[name]))
            else:
                leaves.append(leaf)
        plan = self.plan
        streams = {number: replace(plan.streams[number], writes=()) for number in group.streams}
        return step_reader(plan).digest_streams(streams, HostLeafReader(leaves))

    def shared_streams(self) -> Sequence[int]:
        """Return the streams of tensors with shards of several processes."""
        numbers: list[int] = []
        for group in self.files.groups:
            if group.owner is None:
                numbers += group.streams
        return sorted(numbers)

    def open_written(self) -> AbstractContextManager[RunReader]:
        """Open the data files of all processes to read them."""
        plan = self.plan
        uploaded = {file.path: file for file in self.bucket.list_files()}
        paths = [f"{plan.item}/{planned.path}" for planned in plan.files]
        # A process without chunks has uploaded no file.
        files = [uploaded.get(path, RemoteFile(path, 0, "")) for path in paths]
        root = StoreListing(self.bucket.name, self.bucket, files).root
        return open_blobs([root / path for path in paths])

    def write_note(self, index: int, content: bytes) -> None:
        """Upload the note of a process."""
        self._put(_note_path(index), content)

    def take_notes(self, indices: Sequence[int]) -> Sequence[bytes | None]:
        """Return the notes of processes, and delete them."""
        if not indices:
            return []
        listed = {file.path: file for file in self.bucket.list_files()}
        files = [listed[_note_path(index)] for index in indices]
        contents = map_in_daemon_threads(
            partial(read_all, self.bucket), files, num_threads=NUM_THREADS
        )
        self.bucket.delete_files([file.path for file in files])
        return contents

    def publish(
        self, identity: dict[str, object], digests: Mapping[int, str], sums: ChecksumArray
    ) -> None:
        """Upload the index, the settings and the checksums, then the manifest."""
        # Another start of the recipe may have taken the lock over. It deletes the objects of
        # invisible steps, such as this one.
        self.check_lock()
        manifest = write_last_files(
            self.plan,
            identity,
            digests=digests,
            sums=sums,
            put=self._put,
            num_threads=NUM_THREADS,
        )
        self.check_lock()
        publish_content(self.bucket, MANIFEST_FILE, encode_manifest(manifest))

    def _put(self, path: str, content: bytes) -> None:
        self.bucket.write_pieces(path, [content], size=len(content))


def _note_path(index: int) -> str:
    return f"{WORK_FOLDER}/{NOTE_STEM}-{index}"


def _fetch_shards(name: str, leaf: HostLeaf) -> Shards:
    """Fetch the shards of a leaf from its device to host memory.

    Raise ValueError if the shape of a shard is not the shape of its box, or its dtype is not the leaf's.
    """
    # A fetch copies from the device. A wrong shape would shift all bytes behind it in the file.
    shards: Shards = []
    for shard in leaf.shards:
        shards.append((shard.box, shard.fetch()))
    for box, values in shards:
        shape = tuple(stop - start for start, stop in box)
        if values.shape != shape or values.dtype != numpy_dtype(leaf.dtype):
            raise ValueError(
                f"a shard of {name} was fetched as {values.shape} {values.dtype}, not {shape}"
            )
    return shards


def _fetched_leaf(leaf: HostLeaf, shards: Shards) -> HostLeaf:
    """Return the leaf with fetched shards."""
    fetched = [HostShard(box, partial(np.asarray, values)) for box, values in shards]
    return replace(leaf, shards=tuple(fetched))


def _chunk_bytes(leaf: OutputLeaf, index: ChunkIndex, shards: Shards) -> ByteArray:
    """Return the bytes of a chunk, copied from the shards.

    Elements beyond the leaf's edges are zero.
    """
    # Chunk [1, 0] of chunks [2, 4] is the box ((2, 4), (0, 4)) of the leaf.
    lengths = leaf.grid.chunk_shape
    chunk = tuple((i * length, (i + 1) * length) for i, length in zip(index, lengths))
    values = np.zeros(lengths, numpy_dtype(leaf.dtype))
    for box, shard in shards:
        part = tuple(map(intersect, box, chunk))
        if not volume(part):
            continue
        piece = shard[slices(part, box)]
        if piece.shape == values.shape:
            # No copy if the shard has the layout of the chunk
            values = np.ascontiguousarray(piece)
            break
        values[slices(part, chunk)] = piece
    return values.reshape(-1).view(np.uint8)
