"""Digests of data files, and records of them in the cache of token stores, by the sizes and times of the files.

A record lets a process open tokens without reading all data files for their digests, as `make` trusts
the times of files. It is a file `opened-KEY.json` in the cache. The key is a digest of the paths and of
the settings of tokenization.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import xxhash

from prepcli.core.errors import PrepError
from prepcli.core.json_values import load_json
from prepcli.stores.files import read_regular_file, write_file
from trainer.data.files import (
    DataFile,
    EmptyFileError,
    Note,
    check_not_empty,
    hash_file,
    io_error,
)
from trainer.data.remote_files import Selection

MAX_EMPTY_NOTES = 3
# Prefix of the files of this module. The folder of a run has them after a failed start.
OPENED_PREFIX = "opened"
# Parts of the files of several processes. Each part has a record of its own until all are read.
HASH_PARTS = 64
# Path, size, and time in nanoseconds of a local file, or digest of a remote one.
Stamp: TypeAlias = tuple[str, int, int | str]


def file_stamps(files: Sequence[Path | DataFile]) -> list[Stamp]:
    """Return the stamp of each file, without reading it.

    Raises:
        PrepError: A file is missing.
    """
    return [_stamp(file) for file in files]


def _stamp(file: Path | DataFile) -> Stamp:
    if isinstance(file, DataFile):
        return str(file.path), file.nbytes, file.digest
    try:
        status = file.stat()
    except OSError as error:
        raise io_error(file, error) from error
    return str(file.resolve()), status.st_size, status.st_mtime_ns


def paths_digest(paths: Sequence[str], selection: Selection, settings: str) -> str:
    """Return a digest of the paths of a dataset and of settings, without the content of the files."""
    inputs = [paths, selection.config, selection.split, selection.revision, settings]
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())


@dataclass(frozen=True, slots=True)
class DigestRecord:
    """What an earlier call found out about data files.

    Attributes:
        identity: Identity of their tokens.
        digests: Digest of each file, empty for an empty one. None if an earlier version wrote the record.
    """

    identity: str
    digests: Sequence[str] | None


def write_record(cache: Path, key: str, stamps: Sequence[Stamp], record: DigestRecord) -> None:
    """Write the record of files. A read-only cache gets no record.

    Args:
        cache: The cache.
        key: Result of `paths_digest`.
        stamps: Stamps of the files, taken before the files were read. A later change gives another
            stamp.
        record: The record.
    """
    content = json.dumps({**asdict(record), "stamps": stamps}).encode()
    with suppress(OSError, PrepError):
        cache.mkdir(parents=True, exist_ok=True)
        write_file(_record_path(cache, key), content)


def read_record(cache: Path, key: str, stamps: Sequence[Stamp]) -> DigestRecord | None:
    """Return the record of files, or None if there is no record of these stamps."""
    try:
        values = load_json(read_regular_file(_record_path(cache, key)))
        recorded = [tuple(stamp) for stamp in values["stamps"]]
        digests = values.get("digests")
        is_valid = digests is None or len(digests) == len(stamps)
        if recorded == list(stamps) and isinstance(values["identity"], str) and is_valid:
            return DigestRecord(values["identity"], digests)
    except (OSError, PrepError, ValueError, TypeError, KeyError):
        pass
    return None


def share_digests(
    found: Sequence[Path | DataFile],
    cache: Path,
    key: str,
    stamps: Sequence[Stamp],
    *,
    process: int,
    of: int,
) -> list[str]:
    """Return the digests of files, empty for empty ones. Several processes read different files.

    The files are divided into parts. Each process begins with another part, records its digests in the cache, and reads
    only parts without a record.

    Args:
        found: The files.
        cache: The cache, shared by all processes.
        key: Result of `paths_digest`.
        stamps: Stamps of the files.
        process: Index of this process, from 0.
        of: Number of processes.
    """
    bounds = [len(found) * part // HASH_PARTS for part in range(HASH_PARTS + 1)]
    first = process * HASH_PARTS // of
    digests = [""] * len(found)
    for part in (*range(first, HASH_PARTS), *range(first)):
        items = slice(bounds[part], bounds[part + 1])
        if not found[items]:
            continue
        name = f"{key}-{part}"
        record = read_record(cache, name, stamps[items])
        if record is None:
            # The first process to know all digests has written the whole record, and then removed those of parts.
            whole = read_record(cache, key, stamps)
            if whole is not None and whole.digests is not None:
                return [*whole.digests]
        if record is None or record.digests is None:
            record = DigestRecord("", [_digest_of(file) for file in found[items]])
            write_record(cache, name, stamps[items], record)
        digests[items] = record.digests or ()
    return digests


def _digest_of(file: Path | DataFile) -> str:
    """Return the digest of a file. Empty for an empty one."""
    if isinstance(file, DataFile):
        return file.digest
    try:
        return hash_file(file).digest
    except EmptyFileError:
        return ""


def remove_shared_digests(cache: Path, key: str) -> None:
    """Remove the records of `share_digests`, which the record of all files replaces."""
    with suppress(OSError):
        for path in cache.glob(f"{OPENED_PREFIX}-{key}-*.json"):
            path.unlink(missing_ok=True)


def path_of(file: Path | DataFile) -> str:
    """Return the path of a file, hashed or not."""
    if isinstance(file, DataFile):
        return str(file.path)
    return str(file)


def hash_files(
    found: Sequence[Path | DataFile], note: Note, digests: Sequence[str] = ()
) -> list[DataFile]:
    """Return files with their digests. Empty ones are skipped with a note.

    Args:
        found: The files.
        note: Called with messages for the user.
        digests: Known digests of the files, if any. The files are not read then.

    Raises:
        PrepError: A file cannot be read, or all are empty.
    """
    files: list[DataFile] = []
    empty: list[EmptyFileError] = []
    for index, file in enumerate(found):
        try:
            if isinstance(file, DataFile):
                files.append(check_not_empty(file))
            elif digests and digests[index]:
                files.append(DataFile(file, file.stat().st_size, digests[index]))
            else:
                files.append(hash_file(file))
        except EmptyFileError as error:
            empty.append(error)
        except OSError as error:
            raise io_error(path_of(file), error) from error
    if empty and not files:
        raise empty[0]
    for error in empty[:MAX_EMPTY_NOTES]:
        note(f"skipped: {error.what}")
    if len(empty) > MAX_EMPTY_NOTES:
        note(f"skipped {len(empty):,} empty files in all")
    return files


def _record_path(cache: Path, key: str) -> Path:
    return cache / f"{OPENED_PREFIX}-{key}.json"
