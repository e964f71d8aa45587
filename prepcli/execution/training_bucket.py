"""A training run in an object store: `URL/STEP/state/…` with `URL/STEP/prep-manifest.json`.

An object store has no rename. A step exists if its manifest does: the manifest is uploaded last, and deleted first. The
recipe and the metrics are written to a local folder and uploaded from there. Process 0 holds the lock of the URL.

Each process uploads a data file of its own chunks while they are copied from the shards, without a disk. Tensors of one
process are digested on the way. The remaining tensors are divided among the processes, and read back from the store.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, ClassVar

import numpy as np

from prepcli.algebra.boxes import Box, intersect, slices, volume
from prepcli.algebra.grids import ChunkIndex
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.errors import Option, PrepError, text
from prepcli.core.process_group import ProcessGroup
from prepcli.engine.blobs import HostLeaf, HostLeafReader, HostShard, fetch_shard, open_blobs
from prepcli.engine.checksum_recorder import ChecksumRecorder
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import RunReader
from prepcli.engine.fills import numpy_dtype
from prepcli.execution.training_storage import (
    StepOutput,
    StepSave,
    joint_work,
    note_path,
    step_reader,
)
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    RECIPE_FILE,
    RECREATE_HINT,
    listed_step,
    listed_steps,
)
from prepcli.planning.object_files import LeafBoxes, LeafGroup, ProcessFiles, plan_process_files
from prepcli.planning.plan import OutputLeaf
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.sources.locate import locate
from prepcli.sources.open_folder import Access
from prepcli.sources.opening import open_source
from prepcli.stores.addresses import ObjectStoreUrl
from prepcli.stores.bucket_lock import BucketLock
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import RemoteFile, RetryPolicy, map_in_daemon_threads
from prepcli.stores.files import io_error, open_regular_file
from prepcli.stores.object_store import NUM_SMALL_REQUESTS, RETRIES, Bucket, part_nbytes
from prepcli.stores.object_writes import publish_content
from prepcli.stores.paths import StoreListing, read_all

# Memory for the parts of the data file in flight, and their maximum number
PARTS_NBYTES = 64 << 20
MAX_PARTS_IN_FLIGHT = 8
STORED_PIECE_NBYTES = 8 << 20  # bytes of a file read at a time for its upload

Shards = list[tuple[Box, np.ndarray]]  # fetched shards of a leaf, with their boxes


class BucketStorage:
    """RunStorage below a URL of an object store."""

    is_on_disk = False

    def __init__(
        self, url: ObjectStoreUrl, local_folder: Path, retry_policy: RetryPolicy, recipe_digest: str
    ) -> None:
        """Set the URL.

        Args:
            url: URL of the run.
            local_folder: Folder of the recipe, the metrics and the tokens. Each host may have a
                different one.
            retry_policy: Time-out of requests, and the receiver of notes about retries.
            recipe_digest: Digest of the recipe. A run with another digest cannot take the lock over.
        """
        self.local_folder = local_folder
        self._url = url
        self._retry_policy = retry_policy
        self._bucket = Bucket(url, RETRIES, retry_policy)
        self._recipe_digest = recipe_digest
        self._lock: BucketLock | None = None
        self.is_saving = False
        self._known_steps: list[int] | None = None
        # The data files of the last plan, with the leaves that they were planned for
        self._files: tuple[tuple[OutputLeaf, ...], ProcessFiles] | None = None
        self._stored: list[str] = []  # files of the run that this process uploads with each step

    @property
    def name(self) -> str:
        """The URL."""
        return str(self._url)

    def check(self) -> None:
        """Check the objects below the URL before a run writes there.

        Raises:
            PrepError: Other objects are there, or the store cannot be reached.
        """
        paths = [file.path for file in self._list_files()]
        if paths and RECIPE_FILE not in paths and not self._known_steps:
            raise PrepError(
                f"{self.name} already exists and is not a run",
                f"it has no {RECIPE_FILE}",
                text("{}", Option("out", "URL")),
            )

    def _list_files(self) -> tuple[RemoteFile, ...]:
        """List all objects, and remember the steps."""
        files = self._bucket.list_files()
        self._known_steps = listed_steps(file.path for file in files)
        return files

    def steps(self, *, refresh: bool = True) -> list[int]:
        """Return the steps with a manifest, ascending. See `RunStorage.steps`."""
        if refresh:
            self._list_files()
        return list(self._known_steps or [])

    def step_name(self, step: int) -> str:
        """Return the URL of a step."""
        return self._step_bucket(step).name

    def _step_bucket(self, step: int) -> Bucket:
        url = replace(self._url, path=self._url.key(str(step)))
        return Bucket(url, RETRIES, self._retry_policy)

    def open_step(self, step: int, verify: bool = True, hint: str = RECREATE_HINT) -> ItemReader:
        """Open a step to read its tensors from the store. See `open_reader`."""
        name = self.step_name(step)
        located = locate(name, access=Access(allow_urls=True, retry_policy=self._retry_policy))
        # This checks the recorded files.
        open_source(located)
        # A process that has not listed the run learns of the step here.
        self._known_steps = sorted({*self.steps(refresh=False), step})
        return open_reader(located.files.path, verify, hint)

    def acquire(self, say: Callable[[str], None]) -> None:
        """Lock the URL, then delete the objects of steps without a manifest. Killed processes left them.

        If this process holds the lock already, the call has no effect.

        Raises:
            PrepError: A run with another recipe writes there, or the store does not answer.
        """
        if self._lock is not None:
            return
        lock = BucketLock(self._bucket, self._recipe_digest, say=say)
        lock.acquire()
        try:
            files = self._list_files()
            complete = {None, *self.steps(refresh=False)}  # None: not in the folder of a step
            leftovers = [file.path for file in files if listed_step(file.path) not in complete]
            self._bucket.delete_files(leftovers)
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    def release(self, *, after_error: bool = False) -> None:
        """Release the lock. Objects of an incomplete step are left to the next start.

        After an error, the lock stays while a step is still being saved, and expires once this process has ended.
        """
        if after_error and self.is_saving:
            return
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def _check_lock(self) -> None:
        # The same recipe takes the lock over at once, and deletes the objects of a step without a manifest.
        if self._lock is not None:
            self._lock.confirm()

    @contextmanager
    def step_output(self, save: StepSave) -> Iterator[StepOutput]:
        """Yield where a step is written. After an error its objects stay invisible. See `RunStorage.step_output`."""
        files = self._plan_files(save)
        save = replace(save, plan=files.plan)
        bucket = self._step_bucket(save.step)
        yield BucketStep(save, files, bucket, self._store_files, self._check_lock)
        self._known_steps = [*self.steps(refresh=False), save.step]

    def _plan_files(self, save: StepSave) -> ProcessFiles:
        """Return the data files of all processes, planned once for all steps."""
        if self._files is not None and self._files[0] is save.plan.leaves:
            files = self._files[1]
            planned = files.plan
            plan = replace(
                save.plan, streams=planned.streams, files=planned.files, leaves=planned.leaves
            )
            return replace(files, plan=plan)
        boxes = exchange_boxes(save.group, save.name, save.leaves)
        with joint_work(save.group, f"{save.name}-planned"):
            files = plan_process_files(save.plan, [*save.leaves], boxes)
        self._files = save.plan.leaves, files
        return files

    def remove_step(self, step: int) -> None:
        """Delete the manifest of a step, then its other objects."""
        self._check_lock()
        bucket = self._step_bucket(step)
        # From here on the step does not exist. A kill leaves objects without a manifest, which the next `acquire`
        # deletes.
        bucket.delete(MANIFEST_FILE)
        self._known_steps = [known for known in self.steps(refresh=False) if known != step]
        bucket.delete_files([file.path for file in bucket.list_files()])

    def fetch_file(self, name: str, folder: Path) -> Path:
        """Download a file of the run to a folder, or remove it there if the run has none."""
        path = folder / name
        for file in self._bucket.list_files():
            if file.path == name:
                self._bucket.download(file, path)
                return path
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise io_error(path, error) from error
        return path

    def store_file(self, name: str) -> None:
        """Upload a file of the local folder now, and again with each step."""
        if name not in self._stored:
            self._stored.append(name)
        self._check_lock()
        path = self.local_folder / name
        try:
            with open_regular_file(path) as file:
                # The file may grow meanwhile.
                nbytes = os.fstat(file.fileno()).st_size
                self._bucket.write_pieces(name, _read_pieces(file, nbytes), size=nbytes)
        except FileNotFoundError:
            return
        except OSError as error:
            raise io_error(path, error) from error

    def _store_files(self) -> None:
        for name in self._stored:
            self.store_file(name)


def exchange_boxes(
    group: ProcessGroup, name: str, leaves: Mapping[str, HostLeaf]
) -> Sequence[LeafBoxes]:
    """Exchange the boxes of shards with all processes. Return each process's boxes by leaf name.

    Args:
        group: The processes.
        name: Start of the names of the exchanges.
        leaves: Leaves with the shards of this process, by name.
    """
    own: dict[str, list[Box]] = {}
    for leaf_name, leaf in leaves.items():
        # Most leaves have no shard of a process among thousands.
        if leaf.shards:
            own[leaf_name] = [shard.box for shard in leaf.shards]
    gathered = group.gather(f"{name}-boxes", encode_boxes([own]))
    # Only process 0 has the texts of all processes after a gather, so that it sends them to the others.
    collected: list[LeafBoxes] = []
    for encoded in gathered:
        collected += decode_boxes(encoded)
    return decode_boxes(group.broadcast(f"{name}-all-boxes", encode_boxes(collected)))


def encode_boxes(processes: Sequence[LeafBoxes]) -> str:
    """Return the boxes of processes as compressed JSON: the coordination service limits the size of a text."""
    return base64.b64encode(zlib.compress(json.dumps(processes).encode())).decode()


def decode_boxes(encoded: str) -> list[LeafBoxes]:
    """Return the boxes of processes from `encode_boxes`."""
    processes: list[LeafBoxes] = []
    for process in json.loads(zlib.decompress(base64.b64decode(encoded))):
        leaf_boxes: dict[str, list[Box]] = {}
        for name, boxes in process.items():
            # JSON has lists instead of tuples.
            leaf_boxes[name] = [tuple((first, stop) for first, stop in box) for box in boxes]
        processes.append(leaf_boxes)
    return processes


def _read_pieces(file: BinaryIO, nbytes: int) -> Iterator[bytes]:
    """Yield the first bytes of a file in pieces."""
    while nbytes and (piece := file.read(min(nbytes, STORED_PIECE_NBYTES))):
        nbytes -= len(piece)
        yield piece


@dataclass(frozen=True, slots=True)
class BucketStep:
    """A step of all processes of a run in a bucket.

    Attributes:
        save: The step, with the shards of this process. Its plan has a data file for each process.
        files: The data files of all processes.
        bucket: Client of the step's URL.
        store_run_files: Uploads the files of the run. Called before the step becomes visible.
        check_lock: Raises PrepError if another run has taken the URL over. Process 0 calls it.
    """

    num_threads: ClassVar[int] = NUM_SMALL_REQUESTS
    save: StepSave
    files: ProcessFiles
    bucket: Bucket
    store_run_files: Callable[[], None]
    check_lock: Callable[[], None]

    def write_own(self, checksums: ChecksumRecorder) -> Mapping[int, StreamDigest]:
        """Upload the chunks of this process. See `StepOutput.write_own`."""
        # Objects are visible at once, but no reader opens a step without its manifest.
        plan = self.save.plan
        file = plan.files[self.save.group.index]
        digests: dict[int, StreamDigest] = {}
        pieces = self._data_file_pieces(checksums, digests)
        if file.size:
            num_parts = min(MAX_PARTS_IN_FLIGHT, PARTS_NBYTES // part_nbytes(file.size))
            self.bucket.write_pieces(
                f"{plan.item}/{file.path}",
                pieces,
                size=file.size,
                parts_in_flight=max(2, num_parts),
            )
        self.store_run_files()
        return digests

    def _data_file_pieces(
        self, checksums: ChecksumRecorder, digests: dict[int, StreamDigest]
    ) -> Iterator[bytes | memoryview]:
        """Yield the bytes of this process's data file, in order.

        The leaves are written in groups, and only the shards of one group are in memory at a time.
        """
        index = self.save.group.index
        leaves = {leaf.name: leaf for leaf in self.save.plan.leaves}
        chunks = self.files.chunks[index]
        stop = 0  # end of the bytes yielded so far
        for group in self.files.groups:
            shards: dict[str, Shards] = {}
            for name in group.leaves:
                shards[name] = []
                for shard in self.save.leaves[name].shards:
                    values = fetch_shard(name, leaves[name].dtype, shard)
                    shards[name].append((shard.box, values))
            for name in group.leaves:
                for chunk_index, offset in chunks.get(name, ()):
                    data = _chunk_bytes(leaves[name], chunk_index, shards[name])
                    checksums.record((StridedCopy(0, index, offset, data.size),), data)
                    yield bytes(offset - stop)  # zeros up to the aligned start of the chunk
                    yield data.data
                    stop = offset + data.size
            if group.owner == index:
                digests |= self._digest_group(group, shards)

    def _digest_group(
        self, group: LeafGroup, shards: Mapping[str, Shards]
    ) -> dict[int, StreamDigest]:
        """Return the digests of each tensor in a group of leaves. This process must have all shards of the group."""
        # Streams refer to leaves by position, so all leaves are passed. Only the group's are read.
        leaves: list[HostLeaf] = []
        for name, leaf in self.save.leaves.items():
            if name in shards:
                fetched = [HostShard(box, partial(np.asarray, data)) for box, data in shards[name]]
                leaves.append(replace(leaf, shards=tuple(fetched)))
            else:
                leaves.append(leaf)
        plan = self.save.plan
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
        plan = self.save.plan
        uploaded = {file.path: file for file in self.bucket.list_files()}
        paths = [f"{plan.item}/{planned.path}" for planned in plan.files]
        # A process without chunks has uploaded no file.
        files = [uploaded.get(path, RemoteFile(path, 0, "")) for path in paths]
        root = StoreListing(self.bucket.name, self.bucket, files).root
        return open_blobs([root / path for path in paths])

    def put(self, path: str, content: bytes) -> object:
        """Upload a file of the step."""
        return self.bucket.write_pieces(path, [content], size=len(content))

    def take_notes(self, indices: Sequence[int]) -> Sequence[bytes | None]:
        """Check the lock of the run. Return the notes of processes, and delete them."""
        # Another start of the recipe may have taken the lock over. It deletes the objects of
        # invisible steps, such as this one.
        self.check_lock()
        if not indices:
            return []
        listed = {file.path: file for file in self.bucket.list_files()}
        files = [listed[note_path(index)] for index in indices]
        contents = map_in_daemon_threads(
            partial(read_all, self.bucket), files, num_threads=NUM_SMALL_REQUESTS
        )
        self.bucket.delete_files([file.path for file in files])
        return contents

    def complete(self, manifest: bytes) -> None:
        """Upload the manifest, which makes the step visible."""
        self.check_lock()
        publish_content(self.bucket, MANIFEST_FILE, manifest)


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
