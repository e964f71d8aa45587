"""Checkpoints in an object store: headers and small files are fetched, tensors are read from the store."""

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

MAX_INDEX_NBYTES = 1 << 30  # of all nodes of an OCDBT index
MAX_METADATA_NBYTES = 1 << 20
MAX_SMALL_FILES_NBYTES = 1 << 30  # of all small files together
_DATA_FOLDERS = frozenset({"d", "ocdbt_data", "ocdbt_meta"})  # names that TensorStore and Orbax give them
_ARRAY_METADATA_KEYS = (b".zarray", b"zarr.json")


def open_url(url: str, retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY) -> RemoteCheckpoint:
    """Open the checkpoint at `gs://BUCKET/PATH` or `s3://BUCKET/PATH`.

    Raises:
        PrepError: The URL is invalid, unreachable or no checkpoint.
    """
    return open_bucket(Bucket(parse_url(url), retry_policy=retry_policy))


def open_bucket(bucket: Bucket) -> RemoteCheckpoint:
    """Fetch headers, indexes and small files of a checkpoint into a folder of placeholder files.

    Raises:
        PrepError: The store is unreachable or has no checkpoint there.
    """
    files = bucket.list_files()
    if not files:
        raise PrepError(f"{bucket.name} holds no checkpoint", "no object has this prefix", "check the spelling")
    remote = RemoteCheckpoint(files, bucket, create_placeholder_folder())
    for file in files:
        placeholder_path(remote.placeholder_folder, file)
    with rename_in_errors(remote.placeholder_folder, bucket.name):
        (_fetch_orbax_item if _is_orbax(files) else _fetch_hf_folder)(remote)
    return remote


def _is_orbax(files: Sequence[RemoteFile]) -> bool:
    """Return whether these are the files of an Orbax item, of a step or of a run."""
    return any(file.path.rpartition("/")[2] == METADATA_FILE and file.path.count("/") <= 2 for file in files)


def _fetch_hf_folder(remote: RemoteCheckpoint) -> None:
    """Fetch the small files and the safetensors headers at the top of a Hugging Face folder."""
    top = [file for file in remote.files if "/" not in file.path]
    weights = [file for file in top if Path(file.path).suffix in WEIGHT_SUFFIXES]
    _fetch_small_files(remote, [file for file in top if file not in weights and file.size <= SMALL_NBYTES])
    for file in weights:
        write_sparse_file(remote.placeholder_folder, remote.reader, file)
    safetensors_files = [file for file in weights if file.path.endswith(".safetensors")]
    write_headers(remote.placeholder_folder, remote.reader, safetensors_files)


def _fetch_orbax_item(remote: RemoteCheckpoint) -> None:
    """Fetch all files except data files, then the OCDBT index of the item."""
    if not any(file.path.rpartition("/")[2] == OCDBT_MANIFEST for file in remote.files):
        raise _no_index_error(remote)
    data_files = [file for file in remote.files if _is_data_file(file)]
    _fetch_small_files(remote, [file for file in remote.files if not _is_data_file(file)])
    item = find_item(remote.placeholder_folder)
    if item is None or not (item / OCDBT_MANIFEST).is_file():
        raise _no_index_error(remote)
    for file in data_files:
        if placeholder_path(remote.placeholder_folder, file).is_relative_to(item):
            write_sparse_file(remote.placeholder_folder, remote.reader, file)
    _fetch_index(remote, item)


def _no_index_error(remote: RemoteCheckpoint) -> PrepError:
    why = "it has no OCDBT index: its arrays are folders of files, or it was not finished"
    return PrepError(f"{remote.reader.name} cannot be read remotely", why, "copy it to a local folder first")


def _is_data_file(file: RemoteFile) -> bool:
    """Return whether a file may store nodes or values of an OCDBT database."""
    return file.size > SMALL_NBYTES or not _DATA_FOLDERS.isdisjoint(file.path.split("/")[:-1])


def _fetch_index(remote: RemoteCheckpoint, item: Path) -> None:
    """Fetch the nodes of an OCDBT index, and the array metadata outside of it."""
    files = {placeholder_path(remote.placeholder_folder, file): file for file in remote.files}
    fetched_nbytes = 0

    def fetch(location: ValueLocation) -> None:
        nonlocal fetched_nbytes
        fetched_nbytes += location.nbytes
        if fetched_nbytes > MAX_INDEX_NBYTES:
            why = f"it has more than {format_bytes(MAX_INDEX_NBYTES)}"
            raise PrepError(f"the index of {remote.reader.name} is too large", why)
        path = item / location.path
        if path in files:
            ranges = [(location.offset, location.nbytes)]
            write_sparse_file(remote.placeholder_folder, remote.reader, files[path], ranges)

    for key, value in read_ocdbt_index(item, fetch):
        if not isinstance(value, ValueLocation) or value.nbytes > MAX_METADATA_NBYTES:
            continue
        if key.endswith(_ARRAY_METADATA_KEYS):
            fetch(value)


def _fetch_small_files(remote: RemoteCheckpoint, files: Sequence[RemoteFile]) -> None:
    total_nbytes = sum(file.size for file in files)
    if total_nbytes > MAX_SMALL_FILES_NBYTES:
        why = f"{len(files):,} small files have {format_bytes(total_nbytes)} together"
        raise PrepError(f"{remote.reader.name} is not a checkpoint", why, "name the folder of a checkpoint")

    def fetch(file: RemoteFile) -> None:
        write_small_file(remote.placeholder_folder, file, read_all(remote.reader, file))

    map_in_daemon_threads(fetch, files, 2 * MAX_IN_FLIGHT)
