"""A checkpoint in an object store: what its reader needs is brought into a mirror, tensors stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prepcli.console.formatting import format_bytes
from prepcli.errors import PrepError
from prepcli.formats.ocdbt import OCDBT_MANIFEST, ValueLocation
from prepcli.formats.ocdbt_read import read_ocdbt_index
from prepcli.formats.orbax import METADATA_FILE, find_item
from prepcli.remote.object_store import Bucket, parse_url
from prepcli.remote.placeholders import (
    SMALL_NBYTES,
    RemoteCheckpoint,
    create_placeholder_folder,
    placeholder_path,
    read_all,
    rename_in_errors,
    write_headers,
    write_small_file,
    write_sparse_file,
)
from prepcli.remote.remote_files import MAX_IN_FLIGHT, RemoteFile
from prepcli.remote.retries import DEFAULT_RETRY_POLICY, RetryPolicy, map_in_daemon_threads
from prepcli.sources.source import WEIGHT_SUFFIXES

MAX_INDEX_NBYTES = 1 << 30  # of all nodes of an index
MAX_METADATA_NBYTES = 1 << 20
MAX_SMALL_FILES_NBYTES = 1 << 30  # of all small files together
_DATA_FOLDERS = frozenset({"d", "ocdbt_data", "ocdbt_meta"})
_DOCUMENTS = (b".zarray", b"zarr.json")


def open_url(url: str, retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY) -> RemoteCheckpoint:
    """The checkpoint at an address. PrepError for what is none, or cannot be reached."""
    return open_bucket(Bucket(parse_url(url), retry_policy=retry_policy))


def open_bucket(bucket: Bucket) -> RemoteCheckpoint:
    """The checkpoint below a place in an object store. PrepError as of `open_url`."""
    files = bucket.list_files()
    if not files:
        raise PrepError(f"{bucket.name} holds no checkpoint", "nothing has a name that begins so", "check the spelling")
    remote = RemoteCheckpoint(files, bucket, create_placeholder_folder())
    for file in files:
        placeholder_path(remote.placeholder_folder, file)
    with rename_in_errors(remote.placeholder_folder, bucket.name):
        (_add_item if _is_orbax(files) else _add_folder)(remote)
    return remote


def _is_orbax(files: Sequence[RemoteFile]) -> bool:
    """An item, a step or a run: somewhere not far below there is the list of a tree's leaves."""
    return any(file.path.rpartition("/")[2] == METADATA_FILE and file.path.count("/") <= 2 for file in files)


def _add_folder(remote: RemoteCheckpoint) -> None:
    """A Hugging Face folder: what lies at its top."""
    top = [file for file in remote.files if "/" not in file.path]
    weights = [file for file in top if Path(file.path).suffix in WEIGHT_SUFFIXES]
    _add_all_small(remote, [f for f in top if f not in weights and f.size <= SMALL_NBYTES])
    for file in weights:
        write_sparse_file(remote.placeholder_folder, remote.reader, file)
    write_headers(
        remote.placeholder_folder, remote.reader, [file for file in weights if file.path.endswith(".safetensors")]
    )


def _add_item(remote: RemoteCheckpoint) -> None:
    """What is not in data files, then of the item that is meant the nodes of its index."""
    if not any(file.path.rpartition("/")[2] == OCDBT_MANIFEST for file in remote.files):
        raise _without_index(remote)
    data = [file for file in remote.files if _is_data(file)]
    _add_all_small(remote, [file for file in remote.files if not _is_data(file)])
    item = find_item(remote.placeholder_folder)
    if item is None or not (item / OCDBT_MANIFEST).is_file():
        raise _without_index(remote)
    for file in data:
        if placeholder_path(remote.placeholder_folder, file).is_relative_to(item):
            write_sparse_file(remote.placeholder_folder, remote.reader, file)
    _add_index(remote, item)


def _without_index(remote: RemoteCheckpoint) -> PrepError:
    why = "it has no OCDBT index: its arrays are folders of files, or it was not finished"
    return PrepError(f"{remote.reader.name} cannot be read from afar", why, "copy it to a folder here first")


def _is_data(file: RemoteFile) -> bool:
    """Whether a file is one that an OCDBT database keeps nodes and values in, as TensorStore or Orbax calls them."""
    return file.size > SMALL_NBYTES or not _DATA_FOLDERS.isdisjoint(file.path.split("/")[:-1])


def _add_index(remote: RemoteCheckpoint, item: Path) -> None:
    """Bring in the index of a database, node by node, and the documents of arrays that are not in it."""
    files = {placeholder_path(remote.placeholder_folder, file): file for file in remote.files}
    brought = 0

    def bring(place: ValueLocation) -> None:
        nonlocal brought
        brought += place.nbytes
        if brought > MAX_INDEX_NBYTES:
            why = f"it has more than {format_bytes(MAX_INDEX_NBYTES)}"
            raise PrepError(f"the index of {remote.reader.name} is too large", why)
        path = item / place.path
        if path in files:
            write_sparse_file(remote.placeholder_folder, remote.reader, files[path], [(place.offset, place.nbytes)])

    for key, value in read_ocdbt_index(item, bring):
        if isinstance(value, ValueLocation) and key.endswith(_DOCUMENTS) and value.nbytes <= MAX_METADATA_NBYTES:
            bring(value)


def _add_all_small(remote: RemoteCheckpoint, files: Sequence[RemoteFile]) -> None:
    total = sum(file.size for file in files)
    if total > MAX_SMALL_FILES_NBYTES:
        why = f"{len(files):,} small files have {format_bytes(total)} together"
        raise PrepError(f"{remote.reader.name} is no checkpoint", why, "name the folder of one")

    def add(file: RemoteFile) -> None:
        write_small_file(remote.placeholder_folder, file, read_all(remote.reader, file))

    map_in_daemon_threads(add, files, 2 * MAX_IN_FLIGHT)
