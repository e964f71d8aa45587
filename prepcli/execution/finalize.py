"""Finish an output after its tensors are written: index, settings, checksums and manifest."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.core.errors import GET_AGAIN_HINT, RERUN_HINT, DamagedError, PrepError
from prepcli.engine.casts import Scale, report_casts
from prepcli.engine.checksum_recorder import ChecksumArray
from prepcli.engine.digest import (
    StreamDigest,
    record_digest,
    record_digest_of_pieces,
)
from prepcli.engine.write_policy import clone_range
from prepcli.formats.checksums import CHECKSUMS_FILE, encode_checksums
from prepcli.formats.manifest import record_file
from prepcli.formats.orbax import (
    COMMIT_MARKER,
    OrbaxNonArray,
    encode_item_metadata,
    encode_step_metadata,
)
from prepcli.formats.orbax_chunks import WrittenChunk, unplaced_array
from prepcli.planning.arrays import Array
from prepcli.planning.manifest_fields import (
    FileRecord,
    LeafRecord,
    Manifest,
    QuantizedRecord,
    ScaleRecord,
    TensorRecord,
)
from prepcli.planning.plan import OutputLeaf, Plan, SmallFile
from prepcli.planning.tensors import PARAMS, is_quantization_tensor, qualify, split_name
from prepcli.stores.byte_ranges import map_in_daemon_threads
from prepcli.stores.files import (
    MAX_LFS_POINTER_NBYTES,
    check_not_lfs_pointer,
    io_error,
    not_regular_error,
    open_no_follow,
    write_no_follow,
)

# Small files are written from their first byte again, also after an interruption.
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
# Larger files are sent one at a time, in pieces.
LARGE_FILE_NBYTES = 1 << 20
PIECE_NBYTES = 8 << 20
# [chunks, 3]: file, offset, bytes. An object per chunk would need too much memory.
_ChunkTable = npt.NDArray[np.int64]


def write_last_files(
    plan: Plan,
    identity: dict[str, object],
    *,
    digests: Mapping[int, StreamDigest],
    sums: ChecksumArray,
    put: Callable[[str, bytes], object],
    copy: Callable[[str, SmallFile], FileRecord] | None = None,
    compressed: CompressedChunks | None = None,
    num_threads: int = 1,
) -> Manifest:
    """Write all files of an output except its data and its manifest: index, settings, checksums and marker.

    Args:
        plan: The plan of the output.
        identity: Identity of the output, for the manifest.
        digests: Digests of all streams, by number.
        sums: Checksums of all blocks.
        put: Writes a file, given its path and content.
        copy: Writes a small file of the plan at a path. Returns its record. None for files that are read, and then
            written by `put`.
        compressed: Locations of compressed chunks. None if the chunks are raw.
        num_threads: Number of concurrent calls of `put` and `copy`. 1 for calls in this thread.

    Returns:
        The manifest. It has records of all small files and of the index. Chunks have records in the file of checksums.
        An output without it is incomplete.

    Raises:
        PrepError: A file cannot be read or written.
    """
    markers: dict[str, bytes] = {}
    sources: list[tuple[str, bytes | SmallFile]] = []
    for path, content in _encode_metadata(plan, compressed).items():
        if PurePosixPath(path).name == COMMIT_MARKER:
            markers[path] = content
        else:
            sources.append((path, content))
    sources += [(output_path(plan, file.path), file) for file in plan.small_files]

    def write_file(entry: tuple[str, bytes | SmallFile]) -> tuple[str, FileRecord]:
        path, source = entry
        if isinstance(source, SmallFile):
            if copy is not None:
                return path, copy(path, source)
            source = _read_small_file(source)
        put(path, source)
        return path, _content_record(source)

    if num_threads == 1:
        records = dict(map(write_file, sources))
    else:
        records = dict(map_in_daemon_threads(write_file, sources, num_threads=num_threads))
    manifest = build_manifest(plan, identity, digests)
    if compressed is not None:
        manifest |= Manifest(packed=dict(zip(compressed.files, compressed.sizes)))
    if plan.leaves:
        # Each block was recorded as it was written, or computed afterwards.
        assert sums.all()
        content, record = encode_checksums(sums)
        manifest |= Manifest(checksums=record)
        put(CHECKSUMS_FILE, content)
    # Readers of Orbax look for the markers, and prep for its manifest.
    for path, content in markers.items():
        put(path, content)
        records[path] = _content_record(content)
    files = dict(sorted(records.items()))
    if not plan.leaves:
        headers: dict[str, FileRecord] = {}
        for file in plan.files:
            # The bytes outside of tensors
            data = b"".join([file.header, *[data for _, data in file.constant_ranges]])
            headers[file.path] = {"bytes": file.size, "header": record_digest(data)}
        files = headers | files
    return manifest | Manifest(files=files)


def _content_record(content: bytes) -> FileRecord:
    """Return the record of a file with this content."""
    return {"bytes": len(content), "xxh3": record_digest(content)}


def _encode_metadata(plan: Plan, compressed: CompressedChunks | None) -> dict[str, bytes]:
    """Return the index and the metadata of the items, by their paths in the output. Empty for a plan without leaves."""
    files: dict[str, bytes] = {}
    folders: list[PurePosixPath] = []
    # The newest time stamp of the source's files: equal plans write equal bytes. Metadata cannot hold times before
    # 1970.
    now_ns = max((0, *(file.mtime_ns for file in plan.source_files)))
    items = plan.items
    for item, leaves in items.items():
        folder = PurePosixPath(output_path(plan, item or ""))
        folders.append(folder)
        arrays: list[Array] = []
        for leaf in leaves:
            grid = leaf.grid
            arrays.append(unplaced_array(leaf.path, grid.shape, leaf.dtype, grid.chunk_shape))
        chunks = raw_chunks(leaves)
        names: Sequence[str] = [file.path for file in plan.files]
        if item is not None:
            # No chunk of the item is in the files of another one.
            names = [name.removeprefix(f"{item}/") for name in names]
        if compressed:
            # `compressed` has the chunks of the whole plan. No command with `--compress` writes several items.
            assert len(items) == 1
            chunks = compressed.relocate(chunks)
            names = compressed.files
        state_record = plan.settings.training_state
        item_files = encode_item_metadata(
            arrays,
            chunks,
            names,
            now_ns,
            storage=plan.storage,
            compression=plan.compression,
            non_arrays=[OrbaxNonArray(path, "None") for path in plan.empty_nodes],
            step=0 if state_record is None else state_record["step"],
        )
        for path, content in item_files.items():
            files[(folder / path).as_posix()] = content
    if plan.item and folders:
        step_files = encode_step_metadata([folder.name for folder in folders], now_ns)
        for path, content in step_files.items():
            files[(folders[0].parent / path).as_posix()] = content
    return files


def output_path(plan: Plan, path: str) -> str:
    """Return the path in the output of a file of the plan."""
    return PurePosixPath(plan.item, path).as_posix()


def check_small_files(plan: Plan) -> None:
    """Raise PrepError if a small file cannot be copied. It is copied last, after hours of moving weights."""
    for file in plan.small_files:
        if not file.copied_from:
            continue
        try:
            with open(file.copied_from, "rb", opener=_open_without_links) as source:
                start = source.read(MAX_LFS_POINTER_NBYTES + 1)
                check_not_lfs_pointer(start, Path(file.copied_from))
        except OSError as error:
            raise io_error(Path(file.copied_from), error) from error


def _read_small_file(file: SmallFile) -> bytes:
    """Return the content of a small file of an output.

    Raises:
        PrepError: The file cannot be read, or its bytes differ from their record.
    """
    if not file.copied_from:
        return file.read_content()
    try:
        with open(file.copied_from, "rb", opener=_open_without_links) as source:
            content = source.read()
    except OSError as error:
        raise io_error(Path(file.copied_from), error) from error
    if file.xxh3 and record_digest(content) != file.xxh3:
        raise _damaged_copy_error(file)
    return content


def send_small_file(
    file: SmallFile, send: Callable[[bytes, int, int], object], *, large_files: threading.Lock
) -> FileRecord:
    """Send a small file of a plan, e.g. to a store.

    Args:
        file: The file.
        send: Sends bytes, given their offset in the file and the size of the file.
        large_files: Held while a file of more than LARGE_FILE_NBYTES is sent.

    Returns:
        The record of the file.

    Raises:
        PrepError: The file cannot be read, or its bytes differ from their record.
    """
    if not file.copied_from:
        content = file.read_content()
        send(content, 0, len(content))
        return _content_record(content)
    try:
        with (
            open(file.copied_from, "rb", opener=_open_without_links) as source,
            contextlib.ExitStack() as stack,
        ):
            size = os.fstat(source.fileno()).st_size
            if size > LARGE_FILE_NBYTES:
                stack.enter_context(large_files)
            digest = record_digest_of_pieces(iter(partial(source.read, PIECE_NBYTES), b""))
            if file.xxh3 and digest != file.xxh3:
                raise _damaged_copy_error(file)
            source.seek(0)
            state = xxhash.xxh3_128()
            for start in range(0, max(size, 1), PIECE_NBYTES):
                piece = source.read(min(PIECE_NBYTES, size - start))
                state.update(piece)
                # The object is complete after its last piece.
                if start + PIECE_NBYTES >= size and state.hexdigest() != digest:
                    raise PrepError(f"{file.copied_from} changed while it was read", "", RERUN_HINT)
                send(piece, start, size)
    except OSError as error:
        raise io_error(Path(file.copied_from), error) from error
    return {"bytes": size, "xxh3": digest}


def _damaged_copy_error(file: SmallFile) -> PrepError:
    why = "its bytes differ from the digest that its manifest records"
    return DamagedError(f"{file.copied_from} is damaged", why, GET_AGAIN_HINT)


def write_small_file(file: SmallFile, path: Path) -> FileRecord:
    """Write a small file of a plan to a path, also one that does not fit in memory. Return its record.

    Raises:
        PrepError: The file cannot be read or written, or its bytes differ from their record.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not file.copied_from:
            content = file.read_content()
            write_no_follow(path, content)
            return _content_record(content)
        with (
            open(file.copied_from, "rb", opener=_open_without_links) as source,
            open(open_no_follow(path, WRITE_FLAGS), "wb") as target,
        ):
            if not clone_range(target.fileno(), 0, source.fileno(), 0, 0):
                shutil.copyfileobj(source, target)
    except OSError as error:
        raise io_error(Path(error.filename or path), error) from error
    # The copy is read back instead of the source, which may change again.
    record = record_file(path)
    if file.xxh3 and record.get("xxh3") != file.xxh3:
        raise _damaged_copy_error(file)
    return record


def _open_without_links(path: str, flags: int) -> int:
    # The path was checked before, so a link or a FIFO there has replaced the file since. O_NOFOLLOW refuses the link.
    # O_NONBLOCK keeps the open of a FIFO from waiting for its other end.
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise not_regular_error(Path(path))
    return fd


def raw_chunks(leaves: tuple[OutputLeaf, ...]) -> Iterator[WrittenChunk]:
    """Yield each chunk with its raw location, in no particular order."""
    for number, leaf in enumerate(leaves):
        nbytes = leaf.chunk_nbytes
        for box in leaf.placed_chunks:
            file = box.chunks.file
            for index, offset in zip(box.indices(), box.offsets()):
                yield WrittenChunk(number, index, file, offset, nbytes)


def build_manifest(
    plan: Plan, identity: dict[str, object], digests: Mapping[int, StreamDigest]
) -> Manifest:
    """Return the manifest without the records of output files."""
    source = {"name": plan.source_name, "files": [asdict(file) for file in plan.source_files]}
    manifest = Manifest() | identity | Manifest(command=plan.command, source=source)
    manifest |= plan.settings
    if casts := report_casts(plan.streams, digests):
        manifest |= Manifest(casts=casts)
    if scales := _scale_records(plan, digests):
        manifest |= Manifest(scales=scales)
    manifest |= _tensor_records(plan, digests) | Manifest(dropped=_dropped_records(plan))
    if manifest.quantized:
        records: dict[str, QuantizedRecord] = {}
        for name, record in manifest.quantized.items():
            # A copy of an init keeps the digest. The first range of rows is the tensor without padding.
            decoded_digest = record["digest"] or manifest.tensors[name]["digests"][0][2]
            records[name] = {**record, "digest": decoded_digest}
        manifest |= Manifest(quantized=records)
    leaves: dict[str, LeafRecord] = {}
    for leaf in plan.leaves:
        leaves[leaf.name] = {
            "shape": leaf.grid.shape,
            "dtype": leaf.dtype,
            "chunk": leaf.grid.chunk_shape,
        }
    return manifest | Manifest(leaves=leaves)


def _dropped_records(plan: Plan) -> list[Mapping[str, object]]:
    """Return what this conversion dropped, after what earlier ones have dropped. The settings have their entries."""
    names = [stream.name for stream in plan.streams if stream.writes]
    # A tied head may have been made again.
    tensors = {plan.display_names.get(name, name) for name in names}
    earlier = plan.settings.dropped
    dropped = [entry for entry in earlier if entry.get("rows") or entry.get("name") not in tensors]
    for tensor in plan.dropped:
        dropped.append(tensor.record(plan.display_names.get(tensor.name, tensor.name)))
    return dropped


def _scale_records(plan: Plan, digests: Mapping[int, StreamDigest]) -> dict[str, ScaleRecord]:
    """Return the records of the scales of a layout, by the name of the tensor."""
    records: dict[str, ScaleRecord] = {}
    for stream in plan.streams:
        for operation in stream.operations:
            if isinstance(operation, Scale):
                name = plan.display_names.get(stream.name, stream.name)
                records[name] = {
                    **operation.scale.fields(),
                    "significant": operation.scale.significant,
                    "digests": [],
                    "lost": 0,
                }
    for number, stream in enumerate(plan.streams):
        record = records.get(plan.display_names.get(stream.name, stream.name))
        if record is None:
            continue
        # The embedding has a stream of its tokens, and one of its padding.
        stream_digest = digests[number]
        record.setdefault("digests", []).append((*stream.rows, stream_digest.written))
        record["lost"] += stream_digest.lost
    return records


def _tensor_records(plan: Plan, digests: Mapping[int, StreamDigest]) -> Manifest:
    """Return the manifest's records of the written tensors: shape, dtype and digests by row range.

    Records of a training state are grouped by slot. Leaves outside of slots are under `others`.
    """
    tensors: dict[str, TensorRecord] = {}
    slots: dict[str, dict[str, TensorRecord]] = {}
    unslotted: dict[str, TensorRecord] = {}
    for number, stream in enumerate(plan.streams):
        # A stream that is read for a comparison only. A tensor without elements is recorded all the same.
        if not stream.writes and stream.nbytes:
            continue
        slot = PARAMS
        # A folder may have scales of quantised weights, or moments.
        is_state = plan.settings.training_state is not None
        if plan.settings.quantized:
            is_state = is_quantization_tensor(stream.name)
        if plan.item or is_state:
            slot, _ = split_name(stream.name)
        name = plan.display_names.get(stream.name, stream.name)
        if not slot:
            records = unslotted
        elif slot == PARAMS:
            records = tensors
        else:
            records = slots.setdefault(slot, {})
        if slot:
            name = name.removeprefix(qualify(slot, ""))
        record = records.setdefault(
            name, {"dtype": stream.written_dtype, "shape": stream.shape, "digests": []}
        )
        record["digests"].append((*stream.rows, digests[number].recorded))
        if stream.shape:
            # The streams of a tensor come in the order of their rows, so the last one ends with its last row.
            record["shape"] = (stream.rows[1], *stream.shape[1:])
    if plan.item:
        return Manifest(tensors=tensors, slots=slots, others=unslotted)
    manifest = Manifest(tensors=tensors)
    if slots:
        manifest |= Manifest(slots=slots)
    if unslotted:
        manifest |= Manifest(others=unslotted)
    return manifest


@dataclass(frozen=True, slots=True, eq=False)
class CompressedChunks:
    """Locations of compressed chunks, in the order of the raw chunks.

    Attributes:
        places: [chunks, 3]: file number, offset and bytes of each chunk.
        files: Paths of the data files, relative to the item.
        sizes: Bytes of each data file.
    """

    places: _ChunkTable
    files: tuple[str, ...]
    sizes: tuple[int, ...]

    def relocate(self, raw: Iterable[WrittenChunk]) -> Iterator[WrittenChunk]:
        """Yield the raw chunks of the plan, in the same order, with their compressed locations."""
        for chunk, row in zip(raw, self.places, strict=True):
            file, offset, nbytes = map(int, row)
            yield chunk._replace(file=file, offset=offset, nbytes=nbytes)


def locate_chunks(
    chunks: Iterable[WrittenChunk],
    lengths: Mapping[int, Sequence[int]],
    paths: Sequence[str],
    chunk_paths: Sequence[str] | None = None,
) -> CompressedChunks:
    """Return the locations of chunks, compressed file by file without gaps.

    Args:
        chunks: The raw chunks.
        lengths: Compressed lengths of the chunks in each raw file, in the order of their offsets, by file number.
        paths: Path of the compressed chunks of each raw file, relative to the item.
        chunk_paths: Path of each chunk in a file of its own, in the order of `chunks`, instead of `paths`.
    """
    # `table` has one row [file, offset, bytes] per raw chunk. `places[order]` puts lengths in the order of the raw
    # files back in the order of `chunks`: order [2, 0, 1] means that the first compressed chunk is chunk 2.
    rows = ((chunk.file, chunk.offset, chunk.nbytes) for chunk in chunks)
    table = np.fromiter(itertools.chain.from_iterable(rows), np.int64).reshape(-1, 3)
    order = np.lexsort((table[:, 1], table[:, 0]))
    places = np.empty_like(table)
    sizes: list[int] = []
    row = 0
    for file in range(len(paths)):
        offset = 0
        for nbytes in lengths.get(file, ()):
            places[order[row]] = file, offset, nbytes
            offset += nbytes
            row += 1
        sizes.append(offset)
    assert row == len(table)  # each complete unit has noted the lengths of all its chunks
    if chunk_paths is None:
        return CompressedChunks(places, tuple(paths), tuple(sizes))
    places[order, 0] = np.arange(row)
    places[:, 1] = 0
    names = [chunk_paths[number] for number in map(int, order)]
    return CompressedChunks(places, tuple(names), tuple(map(int, places[order, 2])))
