"""The record of an output's files in its manifest: `files: {path: {bytes, xxh3}}`.

It lists every file without tensors: settings, tokenizers, and the index of an Orbax item. Safetensors and msgpack files
are listed too. The digests of the tensors cover their payload, so their entries have `header`, the digest of the
remaining bytes, instead of `xxh3`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator

import xxhash

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.formatting import count_text
from prepcli.formats.manifest import MANIFEST_FILE, accept_hint, read_manifest
from prepcli.formats.ocdbt import OCDBT_MANIFEST
from prepcli.planning.item_storage import LEVANTER_METADATA_FILE, METADATA_FILE, ZARR2, ZARR3
from prepcli.planning.manifest_fields import FileRecord, Manifest
from prepcli.stores.paths import AnyPath, StorePath, path_in_folder, read_each
from prepcli.stores.reading import (
    open_regular_file,
    resolve_named_path,
    stat_file,
    unreadable_error,
)

READ_NBYTES = 1 << 20
# Pieces of a file in a store that are in memory at the same time.
PIECES_IN_FLIGHT = 16
# Files that Orbax or Levanter, not prep, names in an item.
ITEM_FILES = {
    METADATA_FILE,
    LEVANTER_METADATA_FILE,
    ZARR2.document,
    ZARR3.document,
    OCDBT_MANIFEST,
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
}
ITEM_DATA_FOLDER = "d"
NO_RECORD: FileRecord = {"bytes": 0}


def record_file(path: AnyPath) -> FileRecord:
    """Return size and XXH3-128 of a file. Raise PrepError if it cannot be read."""
    state = xxhash.xxh3_128()
    nbytes = 0
    try:
        with open_regular_file(path) as file:
            while block := file.read(READ_NBYTES):
                state.update(block)
                nbytes += len(block)
    except OSError as error:
        raise unreadable_error(path, error) from error
    return {"bytes": nbytes, "xxh3": state.hexdigest()}


def record_files(folder: AnyPath, names: Iterable[str]) -> dict[str, FileRecord]:
    """Return the records of files by their paths in `folder`, in the order of the paths."""
    return {name: record_file(folder / name) for name in sorted(names)}


def read_manifest_of_file(file: AnyPath) -> Manifest | None:
    """Read the manifest in the folder of a single file, if it records the file.

    A file of another model may be in the folder of an output: a name alone does not make it a part of the output.
    """
    manifest = read_manifest(file.parent)
    if manifest is None or file.name not in manifest.files:
        return None
    return manifest


def check_files(
    folder: AnyPath,
    manifest: Manifest,
    names: Collection[str] | None = None,
    *,
    hint: Callable[[str], str] | None = None,
) -> None:
    """Check the listed files of an output. Other files are ignored.

    Args:
        folder: Folder of the manifest.
        manifest: The manifest. Manifests of earlier versions of prep list no files.
        names: Names of the listed files to check. None checks all.
        hint: Returns the hint for a damaged file, by its name. By default the hint for a settings file proposes
            `--accept`.

    Raises:
        DamagedError: A file differs from its record, or does not exist.
        PrepError: A file cannot be read, or its path leaves the folder.
    """
    for name, record in manifest.files.items():
        is_selected = names is None or name in names
        if "xxh3" in record and is_selected:
            _check_file(folder, name, record, hint)


def are_files_intact(folder: AnyPath, manifest: Manifest) -> bool:
    """Return whether all listed files of an output exist and are equal to their records."""
    try:
        check_files(folder, manifest)
    except PrepError:
        return False
    return True


def _check_file(
    folder: AnyPath, name: str, record: FileRecord, hint: Callable[[str], str] | None
) -> None:
    path = resolve_named_path(folder, name, folder / MANIFEST_FILE)
    what = f"{path} does not exist"
    why = "the manifest lists it"
    if path.exists():
        actual = record_file(path)
        # A later version of prep may add keys to a record, so only these two are compared.
        is_equal_size = actual["bytes"] == record["bytes"]
        if is_equal_size and actual.get("xxh3") == record.get("xxh3"):
            return
        what = f"{path} is damaged"
        why = f"it has {_describe_record(actual)}, the manifest records {_describe_record(record)}"
    if hint:
        raise DamagedError(what, why, hint(name))
    if is_settings_file(name):
        raise DamagedError(what, why, accept_hint(folder, name))
    raise DamagedError(what, why, GET_AGAIN_HINT)


def _describe_record(record: FileRecord) -> str:
    return f"{count_text(record['bytes'], 'byte')} with the digest {record.get('xxh3', ''):.40}"


def recorded_xxh3(path: AnyPath, folder: AnyPath, manifest: Manifest) -> str:
    """Return the recorded digest of a file. Empty if the manifest in `folder` lists no such file."""
    name = path_in_folder(path, folder)
    record = NO_RECORD if name is None else manifest.files.get(name.as_posix(), NO_RECORD)
    return record.get("xxh3", "")


def is_settings_file(name: str) -> bool:
    """Return whether a listed file is one that users edit: not the metadata or the index of an Orbax item."""
    *folders, file = name.split("/")
    return file not in ITEM_FILES and ITEM_DATA_FOLDER not in folders


def check_header(path: AnyPath, manifest: Manifest, header_digest: str) -> None:
    """Raise DamagedError if the XXH3-128 of a data file's bytes outside of its tensors differs from its record."""
    # An earlier version of prep lists no files, and another library's file has no record.
    expected = manifest.files.get(path.name, NO_RECORD).get("header", header_digest)
    if header_digest != expected:
        why = f"its header has the digest {header_digest}, the manifest records {expected:.40}"
        raise DamagedError(f"{path} is damaged", why, GET_AGAIN_HINT)


def bytes_between(path: AnyPath, ranges: Iterable[Range]) -> Iterator[bytes]:
    """Yield the bytes of a file outside of its tensors: the headers and directories of the archives.

    Args:
        path: The file. Pieces of a file in a store are requested several at a time.
        ranges: Byte range of each tensor, in ascending order.
    """
    pieces = _pieces_between(ranges, stat_file(path).st_size)
    if isinstance(path, StorePath):
        while batch := list(itertools.islice(pieces, PIECES_IN_FLIGHT)):
            yield from read_each(lambda piece: path.read_exactly(*piece), batch, in_store=True)
        return
    with open_regular_file(path) as file:
        for start, stop in pieces:
            file.seek(start)
            yield file.read(stop - start)


def _pieces_between(ranges: Iterable[Range], size: int) -> Iterator[Range]:
    """Yield the byte ranges outside of the given ones, in pieces of at most READ_NBYTES."""
    position = 0
    for first, stop in itertools.chain(ranges, [(size, size)]):
        # A manifest of another origin may come with a file of any size between two tensors.
        for start in range(position, min(first, size), READ_NBYTES):
            yield start, min(start + READ_NBYTES, first, size)
        position = stop
