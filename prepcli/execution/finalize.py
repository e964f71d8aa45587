"""Finish an output whose tensors are written: compressed chunks, index, settings, checksums and manifest."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prepcli.console.progress import NullProgress, Progress
from prepcli.engine.casts import parse_stream_digest, report_casts
from prepcli.engine.digest import digest
from prepcli.engine.files import io_error
from prepcli.engine.no_follow import check_no_symlinks, open_no_follow, write_no_follow
from prepcli.engine.pipeline import PipelineResult
from prepcli.errors import GET_AGAIN_HINT, DamagedError
from prepcli.execution.block_checksums import collect_checksums
from prepcli.execution.compress import CompressedChunks, compress_chunks, nbytes_to_compress
from prepcli.execution.staging import WORK_FOLDER, Staging
from prepcli.formats.checksums import CHECKSUMS_FILE, write_checksums
from prepcli.formats.file_records import FileRecord, record_file, record_files
from prepcli.formats.manifest import FILES_KEY, HEADER_KEY, MANIFEST_FILE, SIZE_KEY, XXH3_KEY, encode_manifest
from prepcli.formats.orbax import ArrayMeta
from prepcli.formats.orbax_write import WrittenChunk, write_item_metadata, write_step_metadata
from prepcli.planning.plan import OutputFile, OutputLeaf, Plan, SmallFile
from prepcli.planning.state_names import PARAMS, qualify, split_name
from trainer.files.reading import not_regular_error

WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
RAW_FOLDER, COMPRESS_JOURNAL = "raw", "packed"  # in the work folder of an output whose chunks are compressed


def data_folder(plan: Plan, folder: Path) -> Path:
    """Return the folder of the data files. Chunks are first written to a work folder if they will be compressed."""
    return folder / WORK_FOLDER / RAW_FOLDER if plan.zstd_level else folder / plan.item


def finalize_output(
    plan: Plan,
    stage: Staging,
    *,
    run_identity: dict[str, object],
    outcome: PipelineResult,
    progress: Progress | None = None,
) -> None:
    """Write all files except the data files: compressed chunks, index, settings, checksums and manifest.

    Args:
        plan: The plan of the output.
        stage: The staging folder, whose data files are complete.
        run_identity: Keys of the manifest that identify the run.
        outcome: Digests of all streams.
        progress: Receives the number of compressed bytes.

    Raises:
        PrepError: The system refused to read or write.
    """
    folder = stage.folder / plan.item
    check_no_symlinks(stage.folder)  # in the folders' names; files are opened without following links
    compressed = _compress_output(plan, stage, progress or NullProgress()) if plan.zstd_level else None
    try:
        if plan.leaves:
            array_metas = [ArrayMeta(x.path, x.grid.shape, x.dtype, x.grid.chunk_shape) for x in plan.leaves]
            names = compressed.files if compressed else [file.path for file in plan.files]
            chunks = compressed.relocate(_raw_chunks(plan.leaves)) if compressed else _raw_chunks(plan.leaves)
            write_item_metadata(
                folder, array_metas, chunks, names, now_ns=newest_source_ns(plan), zstd_level=plan.zstd_level
            )
        if plan.item:
            write_step_metadata(stage.folder, plan.item, newest_source_ns(plan))
        for file in plan.small_files:
            _write_small_file(file, folder / file.path)
        extra_fields: dict[str, Any] = {"packed": dict(zip(compressed.files, compressed.sizes))} if compressed else {}
        if plan.leaves:
            data_files = [data_folder(plan, stage.folder) / file.path for file in plan.files]
            extra_fields["checksums"] = write_checksums(stage.folder, collect_checksums(plan, stage, files=data_files))
        extra_fields[FILES_KEY] = _file_records(plan, stage.folder, compressed.files if compressed else None)
        write_no_follow(
            stage.folder / MANIFEST_FILE, encode_manifest(_build_manifest(plan, run_identity, outcome) | extra_fields)
        )
    except OSError as error:
        raise io_error(Path(error.filename or stage.folder), error) from error


def _file_records(plan: Plan, folder: Path, packed_files: Sequence[str] | None) -> dict[str, FileRecord]:
    """Return the records of all files without tensors, and of the headers of safetensors and msgpack files.

    Args:
        plan: The plan of the output.
        folder: Folder of the output, with complete files.
        packed_files: Names of the data files of a compressed output; None for the plan's.
    """
    headers = {} if plan.leaves else {file.path: _header_record(file) for file in plan.files}
    data_files = packed_files or [file.path for file in plan.files]
    # the manifest is written later; it has the digest of the checksums, and `--no-verify` does not read them
    unlisted = {MANIFEST_FILE, CHECKSUMS_FILE, *(Path(plan.item, name).as_posix() for name in data_files)}
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    small = {name for name in names - unlisted if not name.startswith(f"{WORK_FOLDER}/")}
    return headers | record_files(folder, small)


def _header_record(file: OutputFile) -> FileRecord:
    """Return the record of a data file: its size, and the digest of its bytes outside of tensors."""
    constant_bytes = b"".join((file.header, *(data for _, data in file.constant_ranges)))
    return {SIZE_KEY: file.size, HEADER_KEY: digest(constant_bytes)}


def check_small_files(plan: Plan) -> None:
    """Raise PrepError if a small file cannot be copied. It is copied last, after hours of moving weights."""
    for file in plan.small_files:
        if not file.copied_from:
            continue
        try:
            with open(file.copied_from, "rb", opener=_open_without_links) as source:
                source.read(1)
        except OSError as error:
            raise io_error(Path(file.copied_from), error) from error


def _write_small_file(file: SmallFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.copied_from:
        with (
            open(file.copied_from, "rb", opener=_open_without_links) as source,
            open(open_no_follow(path, WRITE_FLAGS), "wb") as target,
        ):
            shutil.copyfileobj(source, target)
        _check_copy(file, path)
    else:
        write_no_follow(path, file.content)


def _check_copy(file: SmallFile, path: Path) -> None:
    """Raise PrepError if the copied bytes differ from the recorded digest: the file changed after it was checked."""
    if file.xxh3 and record_file(path)[XXH3_KEY] != file.xxh3:
        why = "its bytes differ from the digest that its manifest records"
        raise DamagedError(f"{file.copied_from} is damaged", why, GET_AGAIN_HINT)


def _open_without_links(path: str, flags: int) -> int:
    # The path was resolved: a link there is a later replacement. O_NONBLOCK: so is a FIFO, which would wait.
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise not_regular_error(Path(path))
    return fd


def _compress_output(plan: Plan, stage: Staging, progress: Progress) -> CompressedChunks:
    data_files = [data_folder(plan, stage.folder) / file.path for file in plan.files]
    folder, journal = stage.folder / plan.item, stage.folder / WORK_FOLDER / COMPRESS_JOURNAL
    return compress_chunks(
        _raw_chunks(plan.leaves),
        data_files,
        folder=folder,
        journal=journal,
        level=plan.zstd_level or 0,
        progress=progress,
    )


def newest_source_ns(plan: Plan) -> int:
    """Return the time stamp for the output's metadata, that of the source, so that equal runs write equal bytes."""
    return max((0, *(fact.mtime_ns for fact in plan.source_files)))  # metadata cannot hold times before 1970


def output_nbytes_to_compress(plan: Plan, folder: Path) -> int:
    """Return the number of bytes still to compress."""
    return (
        nbytes_to_compress(_raw_chunks(plan.leaves), folder / WORK_FOLDER / COMPRESS_JOURNAL) if plan.zstd_level else 0
    )


def _raw_chunks(leaves: tuple[OutputLeaf, ...]) -> Iterator[WrittenChunk]:
    """Yield each chunk with its raw location, in no particular order."""
    for number, leaf in enumerate(leaves):
        for box in leaf.placed_chunks:
            for index in box.indices():
                yield WrittenChunk(number, index, *box.placement.find(index), leaf.chunk_nbytes)


def _build_manifest(plan: Plan, run_identity: dict[str, object], outcome: PipelineResult) -> dict[str, Any]:
    return {
        **run_identity,
        "command": plan.command,
        "source": {"name": plan.source_name, "files": [asdict(fact) for fact in plan.source_files]},
        **plan.settings,
        "dropped": [{**asdict(d), "name": plan.display_names.get(d.name, d.name)} for d in plan.dropped],
        **({"casts": casts} if (casts := report_casts(plan.streams, outcome.digests)) else {}),
        **_tensor_records(plan, outcome),
        "leaves": {
            leaf.name: {"shape": leaf.grid.shape, "dtype": leaf.dtype, "chunk": leaf.grid.chunk_shape}
            for leaf in plan.leaves
        },
    }


def _tensor_records(plan: Plan, outcome: PipelineResult) -> dict[str, Any]:
    """Return the manifest's records of the written tensors: shape, dtype and digests by row range.

    Records of a training state are grouped by slot; leaves outside of slots are under `others`.
    """
    tensors: dict[str, Any] = {}
    slots: dict[str, dict[str, Any]] = {}
    unslotted: dict[str, Any] = {}
    for number, stream in enumerate(plan.streams):
        if stream.writes:
            slot = split_name(stream.name)[0] if plan.item else PARAMS
            display_name = plan.display_names.get(stream.name, stream.name)
            name = display_name.removeprefix(qualify(slot, "")) if slot else display_name
            records = tensors if slot == PARAMS else slots.setdefault(slot, {}) if slot else unslotted
            record = records.setdefault(name, {"dtype": stream.written_dtype, "shape": stream.shape, "digests": []})
            record["digests"].append([*stream.rows, parse_stream_digest(outcome.digests[number]).written])
            if stream.shape:
                record["shape"] = (stream.rows[1], *stream.shape[1:])
    return {"tensors": tensors, **({"slots": slots, "others": unslotted} if plan.item else {})}
