"""Write a training step to an object store: each process uploads a data file of its own chunks, from memory.

A file is uploaded while its chunks are copied from the shards, so that no disk is needed. Tensors of one process are
digested on the way. The others are divided among the processes, which read them back from the store.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from prepcli.console.progress import NullProgress
from prepcli.engine import pipeline
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import make_budget
from prepcli.engine.checksum_recorder import ChecksumArray, ChecksumRecorder
from prepcli.engine.digest import CHECKSUM_DTYPE
from prepcli.engine.files import ByteArray, RunReader
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.host_leaves import HostLeafReader
from prepcli.engine.pipeline import PipelineResult
from prepcli.errors import RESUME_HINT, DamagedError
from prepcli.execution.block_checksums import checksum_recorder
from prepcli.execution.execute import identify_run
from prepcli.execution.finalize import finalize_output
from prepcli.execution.joint_work import joint_work
from prepcli.execution.resume import readback_stream
from prepcli.execution.run_notes import decode_note, encode_note
from prepcli.execution.run_place import StepSave
from prepcli.execution.staging import WORK_FOLDER, Staging
from prepcli.execution.step_writer import MEMORY_NBYTES
from prepcli.execution.uploads import COMMIT_MARKER
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.planning.boxes import Box, intersect, slices, volume
from prepcli.planning.plan import OutputLeaf, Stream
from prepcli.planning.process_files import ChunkIndex, LeafGroup, ProcessFiles
from prepcli.planning.shares import Division, divide_streams, subplan
from prepcli.planning.strided_copies import StridedCopy
from prepcli.remote.object_store import Bucket
from prepcli.remote.placeholders import read_all
from prepcli.remote.remote_files import ReadAheadCache, RemoteBlob, RemoteFile
from prepcli.remote.retries import map_in_daemon_threads
from trainer.models.checkpoint_store import HostLeaf, HostShard

NOTE_STEM = "written"  # `.prep/written-I` of an incomplete step holds the digests and checksums of process I
NUM_THREADS = 8  # concurrent requests for small objects

Shards = list[tuple[Box, np.ndarray]]  # fetched shards of a leaf, with their boxes


@dataclass(frozen=True, slots=True)
class BucketStep:
    """A step that all processes of a run write to a bucket.

    Attributes:
        save: The step, with the shards of this process.
        files: The data files of all processes.
        bucket: Client of the step's URL.
        store_run_files: Uploads the files of the run; called before the step becomes visible.
        check_lock: Raises PrepError if another run has taken the URL over; process 0 calls it.
    """

    save: StepSave
    files: ProcessFiles
    bucket: Bucket
    store_run_files: Callable[[], None]
    check_lock: Callable[[], None]

    def write(self) -> None:
        """Write the step; it becomes visible with its manifest, which is uploaded last.

        Raises:
            PrepError: One of the processes cannot write its part.
        """
        group, name = self.save.group, self.save.name
        with TemporaryDirectory(prefix="prep-save-") as folder:
            stage = Staging(Path(folder) / str(self.save.step))
            stage.work.mkdir(parents=True)
            checksums = checksum_recorder(self.files.plan, stage, index=group.index)
            assert checksums is not None  # the plan has leaves
            digests: dict[int, str] = {}
            with joint_work(group, f"{name}-written"):
                self._upload_own_file(checksums, digests)
                self.store_run_files()
            with joint_work(group, f"{name}-digested"):
                self._read_back(digests)
                if group.index:
                    self._upload_note(digests, checksums.sums)
            with joint_work(group, f"{name}-published"):
                if group.index == 0:
                    self._collect_notes(digests, checksums.sums)
                    checksums.save()
                    self.check_lock()
                    self._publish(stage, PipelineResult(digests))

    def _upload_own_file(self, checksums: ChecksumRecorder, digests: dict[int, str]) -> None:
        """Upload the chunks of this process; add the digests of the tensors that it has as a whole."""
        plan, index = self.files.plan, self.save.group.index
        file = plan.files[index]
        pieces = self._own_pieces(checksums, digests)
        if file.size:
            self.bucket.write_pieces(f"{plan.item}/{file.path}", pieces, size=file.size)

    def _own_pieces(self, checksums: ChecksumRecorder, digests: dict[int, str]) -> Iterator[bytes | memoryview]:
        """Yield the bytes of this process's data file, in order. The shards of one leaf group are in memory."""
        plan, index = self.files.plan, self.save.group.index
        leaves, chunks = {leaf.name: leaf for leaf in plan.leaves}, self.files.chunks[index]
        stop = 0
        for group in self.files.groups:
            shards = {name: _fetch_shards(name, self.save.leaves[name]) for name in group.leaves}
            for name in group.leaves:
                for chunk_index, offset in chunks[name]:
                    data = _chunk_bytes(leaves[name], chunk_index, shards[name])
                    checksums.record((StridedCopy(0, index, offset, data.size),), data)
                    yield bytes(offset - stop)
                    yield data.data
                    stop = offset + data.size
            if group.owner == index:
                digests |= self._digest_group(group, shards)

    def _digest_group(self, group: LeafGroup, shards: Mapping[str, Shards]) -> dict[int, str]:
        """Return the digests of a group's tensors, of which this process has all elements."""
        fetched = {name: _fetched_leaf(self.save.leaves[name], values) for name, values in shards.items()}
        leaves = [fetched.get(name, leaf) for name, leaf in self.save.leaves.items()]
        return _digest({number: self.files.plan.streams[number] for number in group.streams}, HostLeafReader(leaves))

    def _read_back(self, digests: dict[int, str]) -> None:
        """Add the digests of this process's part of the tensors that several processes wrote."""
        plan, process_group = self.files.plan, self.save.group
        numbers = sorted(n for group in self.files.groups if group.owner is None for n in group.streams)
        if not numbers:
            return
        share = divide_streams(subplan(plan, numbers), Division(process_group.count))[process_group.index]
        uploaded, cache = {file.path: file for file in self.bucket.list_files()}, ReadAheadCache(self.bucket)
        paths = [f"{plan.item}/{file.path}" for file in plan.files]
        blobs = [RemoteBlob(uploaded.get(path, RemoteFile(path, 0, "")), cache) for path in paths]
        with open_blobs(blobs) as reader:
            digests |= _digest({numbers[n]: readback_stream(plan.streams[numbers[n]]) for n in share}, reader)

    def _upload_note(self, digests: Mapping[int, str], sums: ChecksumArray) -> None:
        """Upload the digests and checksums of this process for process 0."""
        blocks = np.flatnonzero(sums)
        known = np.stack([blocks.astype(CHECKSUM_DTYPE), sums[blocks].astype(CHECKSUM_DTYPE)])
        content = {"digests": dict(digests), "checksums": base64.b64encode(known.tobytes()).decode()}
        data = encode_note(content)
        self.bucket.write_pieces(_note_path(self.save.group.index), [data], size=len(data))

    def _collect_notes(self, digests: dict[int, str], sums: ChecksumArray) -> None:
        """Add the digests and checksums of the other processes, and delete their notes."""
        if self.save.group.count == 1:
            return
        listed = {file.path: file for file in self.bucket.list_files()}
        files = [listed[_note_path(index)] for index in range(1, self.save.group.count)]
        notes = map_in_daemon_threads(partial(read_all, self.bucket), files, num_threads=NUM_THREADS)
        for file, data in zip(files, notes):
            content = self._decode_note(file, data)
            digests |= {int(number): digest for number, digest in content["digests"].items()}
            known = np.frombuffer(base64.b64decode(content["checksums"]), CHECKSUM_DTYPE).reshape(2, -1)
            sums[known[0].astype(np.int64)] = known[1]
        self.bucket.delete_files([file.path for file in files])

    def _decode_note(self, file: RemoteFile, data: bytes) -> dict[str, Any]:
        try:
            return decode_note(data)
        except ValueError as error:
            raise DamagedError(f"{file.path} of {self.bucket.name} is damaged", str(error), RESUME_HINT) from error

    def _publish(self, stage: Staging, outcome: PipelineResult) -> None:
        """Upload the index, the settings and the checksums; then the manifest."""
        plan = self.files.plan
        (stage.folder / plan.item).mkdir()
        run_identity = identify_run(replace(plan, small_files=()))  # their paths may differ
        finalize_output(plan, stage, run_identity=run_identity, outcome=outcome)
        names = [path.relative_to(stage.folder).as_posix() for path in stage.folder.rglob("*") if path.is_file()]
        last_names = [f"{plan.item}/{COMMIT_MARKER}", MANIFEST_FILE]
        first_names = [name for name in names if name not in last_names and not name.startswith(f"{WORK_FOLDER}/")]

        def upload(name: str) -> RemoteFile:
            return self.bucket.write(name, stage.folder / name)

        map_in_daemon_threads(upload, first_names, num_threads=NUM_THREADS)
        self.check_lock()
        for name in last_names:
            upload(name)


def _note_path(index: int) -> str:
    return f"{WORK_FOLDER}/{NOTE_STEM}-{index}"


def _digest(streams: Mapping[int, Stream], reader: RunReader) -> dict[int, str]:
    """Return the digests of streams by number."""
    read_only = [replace(stream, writes=()) for stream in streams.values()]
    outcome = pipeline.run(read_only, reader, sink=None, budget=make_budget(MEMORY_NBYTES), progress=NullProgress())
    return {number: outcome.digests[position] for position, number in enumerate(streams)}


def _fetch_shards(name: str, leaf: HostLeaf) -> Shards:
    """Fetch the shards of a leaf; raise ValueError if one has another shape or dtype than its box."""
    shards = [(shard.box, shard.fetch()) for shard in leaf.shards]
    for box, values in shards:
        shape = tuple(stop - start for start, stop in box)
        if (values.shape, values.dtype) != (shape, numpy_dtype(leaf.dtype)):
            raise ValueError(f"a shard of {name} was fetched as {values.shape} {values.dtype}, not {shape}")
    return shards


def _fetched_leaf(leaf: HostLeaf, shards: Shards) -> HostLeaf:
    """Return a leaf that hands out shards that were fetched already."""
    return replace(leaf, shards=tuple(HostShard(box, partial(np.asarray, values)) for box, values in shards))


def _chunk_bytes(leaf: OutputLeaf, index: ChunkIndex, shards: Shards) -> ByteArray:
    """Return the bytes of a chunk, copied from the shards; elements beyond the leaf's edges are zero."""
    chunk = tuple((i * length, (i + 1) * length) for i, length in zip(index, leaf.grid.chunk_shape))
    values = np.zeros(leaf.grid.chunk_shape, numpy_dtype(leaf.dtype))
    for box, shard in shards:
        part = tuple(intersect(box_range, chunk_range) for box_range, chunk_range in zip(box, chunk))
        if not volume(part):
            continue
        piece = shard[slices(part, box)]
        if piece.shape == values.shape:
            values = np.ascontiguousarray(piece)  # without a copy if the shard has the layout of the chunk
            break
        values[slices(part, chunk)] = piece
    return values.reshape(-1).view(np.uint8)
