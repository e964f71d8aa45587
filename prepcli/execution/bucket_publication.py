"""Publish an output in an object store: check its objects, write index and settings, and the manifest last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

import numpy as np

from prepcli.engine.checksum_recorder import ChecksumArray
from prepcli.engine.digest import digest
from prepcli.engine.pipeline import EMPTY_DIGEST
from prepcli.execution.bucket_run import NUM_THREADS, BucketRun, UnitNote
from prepcli.execution.compress import CompressedChunks, locate_chunks
from prepcli.execution.finalize import (
    build_manifest,
    encode_metadata,
    header_records,
    output_path,
    raw_chunks,
    read_small_file,
)
from prepcli.formats.checksums import CHECKSUMS_FILE, encode_checksums
from prepcli.formats.manifest import MANIFEST_FILE, encode_manifest
from prepcli.formats.orbax import COMMIT_MARKER
from prepcli.planning.chunk_placement import chunk_extents, count_blocks
from prepcli.planning.manifest_fields import FileRecord, Manifest
from prepcli.planning.plan import Plan
from prepcli.planning.work_units import WorkUnit
from prepcli.stores.bucket_lock import BucketLock
from prepcli.stores.byte_ranges import RemoteFile, map_in_daemon_threads
from prepcli.stores.object_store import Bucket
from prepcli.stores.object_writes import ObjectUploads, missing_object_error, publish_content


def write_last_objects(
    plan: Plan,
    identity: dict[str, object],
    *,
    digests: Mapping[int, str],
    sums: ChecksumArray,
    put: Callable[[str, bytes], object],
    compressed: CompressedChunks | None = None,
) -> bytes:
    """Write all objects of an output except its data and its manifest: index, settings, checksums and marker.

    Args:
        plan: The plan of the output.
        identity: Identity of the run, for the manifest.
        digests: Digests of all streams, by number.
        sums: Checksums of all blocks.
        put: Writes an object, given its path and content, in one of several threads.
        compressed: Locations of compressed chunks. None if the chunks are raw.

    Returns:
        The manifest.

    Raises:
        PrepError: A file cannot be read, or the store does not answer.
    """
    metadata = encode_metadata(plan, compressed)
    markers: dict[str, bytes] = {}
    for item in plan.items:
        path = output_path(plan, PurePosixPath(item or "", COMMIT_MARKER).as_posix())
        if path in metadata:
            markers[path] = metadata.pop(path)
    writes: list[tuple[str, Callable[[], bytes]]] = []
    for path, content in metadata.items():
        writes.append((path, partial(bytes, content)))
    for file in plan.small_files:
        writes.append((output_path(plan, file.path), partial(read_small_file, file)))

    def write(entry: tuple[str, Callable[[], bytes]]) -> tuple[str, FileRecord]:
        path, read_content = entry
        content = read_content()
        put(path, content)
        return path, _record(content)

    records = dict(map_in_daemon_threads(write, writes, num_threads=NUM_THREADS))
    manifest = build_manifest(plan, identity, digests)
    if compressed is not None:
        manifest |= Manifest(packed=dict(zip(compressed.files, compressed.sizes)))
    if plan.leaves:
        assert sums.all()  # each block was recorded as it was sent
        content, record = encode_checksums(sums)
        manifest |= Manifest(checksums=record)
        put(CHECKSUMS_FILE, content)
    # Readers of Orbax look for the markers, and prep for its manifest.
    for path, content in markers.items():
        put(path, content)
        records[path] = _record(content)
    files = header_records(plan) | dict(sorted(records.items()))
    return encode_manifest(manifest | Manifest(files=files))


def _record(content: bytes) -> FileRecord:
    return {"bytes": len(content), "xxh3": digest(content)}


class BucketPublication:
    """Writes the last objects of an output with complete units.

    Several processes may publish one output at the same time. They write equal objects.
    """

    def __init__(
        self,
        plan: Plan,
        bucket: Bucket,
        run: BucketRun,
        identity: dict[str, object],
        *,
        units: Sequence[WorkUnit],
        lock: BucketLock | None,
        check_digests: Callable[[Mapping[int, str]], None],
    ) -> None:
        """Describe the publication without any request.

        Args:
            plan: The plan of the output.
            bucket: Client of the output's URL.
            run: State of the run.
            identity: Identity of the run, for the manifest.
            units: All units of work.
            lock: Lock of the URL, if this process holds it.
            check_digests: Called with the digests of all streams before the first write. Raises PrepError if the source
                has changed.
        """
        self._plan = plan
        self._bucket = bucket
        self._run = run
        self._identity = identity
        self._units = units
        self._lock = lock
        self._check_digests = check_digests
        self._uploads = ObjectUploads(bucket, {})

    def publish(self) -> None:
        """Publish the output, and delete the state of the run.

        Raises:
            PrepError: An object is missing or was changed, or the store does not answer.
        """
        notes = self._run.read_notes(len(self._units))
        listed = {file.path: file for file in self._bucket.list_files()}
        self._check_objects(notes, listed)
        digests = self._all_digests(notes)
        self._check_digests(digests)
        # Objects of an earlier try are compared, and not sent again.
        self._uploads = ObjectUploads(self._bucket, listed)
        manifest = write_last_objects(
            self._plan,
            self._identity,
            digests=digests,
            sums=self._all_checksums(notes),
            put=self._put,
            compressed=self._compressed_chunks(notes),
        )
        self._check_owner()
        publish_content(self._bucket, MANIFEST_FILE, manifest)
        self._run.delete_state()

    def _check_objects(self, notes: Sequence[UnitNote], listed: Mapping[str, RemoteFile]) -> None:
        """Raise PrepError if a data object is missing or differs from the note of its unit.

        The notes of damaged units are deleted. The next run writes these units again.
        """
        damaged: dict[int, str] = {}
        for number, note in enumerate(notes):
            for file in note.objects:
                if listed.get(file.path) != file and not self._is_stored(file):
                    damaged[number] = file.path
        if damaged:
            self._run.delete_notes([*damaged])
            raise missing_object_error(self._bucket, next(iter(damaged.values())))

    def _is_stored(self, file: RemoteFile) -> bool:
        """Ask for an object missing in a listing, because stores may list objects late."""
        return self._bucket.find_file(file.path) == file

    def _put(self, path: str, content: bytes) -> None:
        data = np.frombuffer(content, np.uint8)
        self._uploads.send(path, data, start=0, size=data.size)

    def _all_digests(self, notes: Sequence[UnitNote]) -> Mapping[int, str]:
        digests: dict[int, str] = {}
        for number, stream in enumerate(self._plan.streams):
            if not stream.nbytes:
                digests[number] = EMPTY_DIGEST
        for note in notes:
            digests |= note.digests
        return digests

    def _all_checksums(self, notes: Sequence[UnitNote]) -> ChecksumArray:
        sums: ChecksumArray = np.zeros(count_blocks(chunk_extents(self._plan.leaves)), np.uint64)
        for note in notes:
            sums[note.blocks.astype(np.int64)] = note.sums
        return sums

    def _compressed_chunks(self, notes: Sequence[UnitNote]) -> CompressedChunks | None:
        """Return the locations of compressed chunks, or None if the chunks are raw."""
        if not self._plan.compression:
            return None
        lengths: dict[int, Sequence[int]] = {}
        for note in notes:
            lengths |= note.lengths
        paths = [file.path for file in self._plan.files]
        return locate_chunks(raw_chunks(self._plan.leaves), lengths, paths)

    def _check_owner(self) -> None:
        """Raise PrepError if another plan has taken the URL over."""
        if self._lock is not None:
            self._lock.confirm()
        self._run.check_same_run()
