"""Records of the files of each token store in a cache, by the sizes and times of the files.

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
from trainer.data.files import DataFile, io_error
from trainer.data.remote_files import Selection

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


def stamps_digest(stamps: Sequence[Stamp]) -> str:
    """Return a digest of the stamps of files."""
    return xxhash.xxh3_128_hexdigest(json.dumps(stamps).encode())


def paths_digest(paths: Sequence[str], selection: Selection, settings: str) -> str:
    """Return a digest of the paths of a dataset and of settings, without the content of the files."""
    inputs = [paths, selection.config, selection.split, selection.revision, settings]
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What an earlier call found out about data files.

    Attributes:
        identity: Identity of their tokens.
        digests: Digest of each file, empty for an empty one. None if an earlier version wrote the record.
    """

    identity: str
    digests: Sequence[str] | None


def write_record(cache: Path, key: str, stamps: Sequence[Stamp], record: FileRecord) -> None:
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


def read_record(cache: Path, key: str, stamps: Sequence[Stamp]) -> FileRecord | None:
    """Return the record of files, or None if there is no record of these stamps."""
    try:
        values = load_json(read_regular_file(_record_path(cache, key)))
        recorded = [tuple(stamp) for stamp in values["stamps"]]
        digests = values.get("digests")
        is_valid = digests is None or len(digests) == len(stamps)
        if recorded == list(stamps) and isinstance(values["identity"], str) and is_valid:
            return FileRecord(values["identity"], digests)
    except (OSError, PrepError, ValueError, TypeError, KeyError):
        pass
    return None


def _record_path(cache: Path, key: str) -> Path:
    return cache / f"opened-{key}.json"
