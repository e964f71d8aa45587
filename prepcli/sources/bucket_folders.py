"""Checkpoints in an object store: headers and small files are fetched, tensors are read from the store."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.formatting import format_bytes
from prepcli.core.lists import join_names
from prepcli.formats.ocdbt import OCDBT_MANIFEST, ValueLocation
from prepcli.formats.orbax import STATE_ITEMS, find_item, item_metadata_file, read_item
from prepcli.formats.run_steps import RECIPE_FILE, listed_step, listed_steps
from prepcli.formats.safetensors import select_safetensors_files
from prepcli.formats.torch_dcp import SUFFIX as DCP_SUFFIX
from prepcli.formats.torch_dcp import read_dcp_ranges
from prepcli.planning.item_storage import ZARR2, ZARR3
from prepcli.sources.folders import Access, Kind, LocalFiles
from prepcli.sources.references import BucketUrl
from prepcli.sources.side_files import ListedFile, is_weight_file, select_side_files
from prepcli.sources.source import SCHEDULER_FILE
from prepcli.stores.byte_ranges import MAX_IN_FLIGHT, RemoteFile
from prepcli.stores.object_store import Bucket
from prepcli.stores.placeholders import (
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
from prepcli.stores.retries import map_in_daemon_threads

# A listing and an index are untrusted. These limits bound what they make this machine fetch.
MAX_INDEX_NBYTES = 1 << 30  # total size of the nodes of an OCDBT index
MAX_SMALL_FILES_NBYTES = 1 << 30  # total size of the small files
# Folders of data files in TensorStore and Orbax.
_DATA_FOLDERS = frozenset({"d", "ocdbt_data", "ocdbt_meta"})
ARRAY_DOCUMENTS = (ZARR2.document, ZARR3.document)

COPY_HINT = "copy it to a local folder first"


def open_bucket_folder(reference: BucketUrl, access: Access) -> BucketFolder:
    """List the files of a checkpoint in an object store.

    Raises:
        PrepError: The store is unreachable or has nothing there.
        UsageError: `access` excludes URLs.
    """
    name = reference.display_name
    if access.offline:
        raise usage_error(
            text("cannot read `{}` with {}", name, Option("offline", True)),
            "an object store needs the network",
            COPY_HINT,
        )
    if not access.allow_urls:
        raise usage_error(f"`{name}` is a URL", "this command does not read URLs", COPY_HINT)
    bucket = Bucket(reference.url, retry_policy=access.retry_policy)
    return BucketFolder(name, bucket, access.copied_files)


class BucketFolder:
    """The objects below a URL as a `Folder`. `prepare_local_files` writes placeholder files."""

    def __init__(
        self, display_name: str, bucket: Bucket, copied_files: tuple[str, ...] = ()
    ) -> None:
        """List the objects.

        Args:
            display_name: Name of the checkpoint in messages.
            bucket: Client of its URL.
            copied_files: Name patterns of further side files to fetch.

        Raises:
            PrepError: The store is unreachable or has nothing there.
        """
        self.display_name = display_name
        self._bucket = bucket
        self._copied_files = copied_files
        self._files = {file.path: file for file in _without_older_steps(bucket.list_files())}
        self._contents: dict[str, bytes] = {}  # contents of the small files read so far, by name
        if not self._files:
            raise PrepError(
                f"{bucket.name} holds no checkpoint",
                "no object has this prefix",
                "check the spelling",
            )

    def names(self) -> Sequence[str]:
        """List all objects."""
        return [*self._files]

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a small object. It is fetched whole and kept."""
        if name not in self._contents:
            self._contents[name] = read_all(self._bucket, self._files[name])
        return self._contents[name][start:stop]

    def fetch_headers(self) -> Path | None:
        """Fetch headers, indexes and small files if there are safetensors files at the top."""
        if not select_safetensors_files(name for name in self._files if "/" not in name):
            return None
        return self.prepare_local_files("safetensors").path

    def prepare_local_files(self, kind: Kind) -> LocalFiles:
        """Fetch headers, indexes and small files into a folder of placeholder files.

        Raises:
            PrepError: This format cannot be read remotely, or a file cannot be fetched.
        """
        fetch = {
            "safetensors": self._fetch_hf_folder,
            "orbax": self._fetch_orbax_item,
            "dcp": self._fetch_dcp_folder,
        }
        if kind not in fetch:
            why = f"its format is {kind}; only {join_names(list(fetch))} are read remotely"
            raise PrepError(f"{self.display_name} cannot be read remotely", why, COPY_HINT)
        remote = RemoteCheckpoint(
            tuple(self._files.values()), self._bucket, create_placeholder_folder()
        )
        # Check all names before the first file is written: a key such as `a/../../x` is valid in a
        # bucket, and would leave the folder of placeholder files.
        for file in remote.files:
            placeholder_path(remote.placeholder_folder, file)
        omitted: tuple[str, ...] = ()
        with rename_in_errors(remote.placeholder_folder, self.display_name):
            fetch[kind](remote)
            # The small files of an item, in all of its folders, are fetched with it.
            if kind != "orbax":
                omitted = self._fetch_nested_files(remote)
        return LocalFiles(remote.placeholder_folder, remote, omitted=omitted)

    def _fetch_nested_files(self, remote: RemoteCheckpoint) -> tuple[str, ...]:
        """Fetch the side files in subfolders, and return descriptions of the subfolders left."""
        listed = [ListedFile(path, file.size) for path, file in self._files.items() if "/" in path]
        selected = select_side_files(listed, self._copied_files)
        files = [self._files[name] for name in (*selected.copied, *selected.left)]
        self._fetch_small_files(remote, files)
        return selected.omitted

    def _fetch_hf_folder(self, remote: RemoteCheckpoint) -> None:
        """Fetch the small files and the safetensors headers at the top of a Hugging Face folder."""
        top = [file for file in remote.files if "/" not in file.path]
        small: list[RemoteFile] = []
        weights: list[RemoteFile] = []
        for file in top:
            if is_weight_file(file.path) and file.path != SCHEDULER_FILE:
                weights.append(file)
            elif file.size <= SMALL_NBYTES:
                small.append(file)
        self._fetch_small_files(remote, small)
        # Weights of all formats get a placeholder, so that the folder has the same names as the
        # bucket. Only safetensors files get their header.
        for file in weights:
            write_sparse_file(remote.placeholder_folder, remote.reader, file)
        safetensors_files = [file for file in weights if file.path.endswith(".safetensors")]
        write_headers(remote.placeholder_folder, remote.reader, safetensors_files)

    def _fetch_orbax_item(self, remote: RemoteCheckpoint) -> None:
        """Fetch all files except data files, then the OCDBT index of the item if it has one."""
        array_folders = _array_folders(remote.files)
        has_index = any(_file_name(file) == OCDBT_MANIFEST for file in remote.files)
        if not has_index and not array_folders:
            raise _no_index_error(remote)
        data_files: list[RemoteFile] = []
        small: list[RemoteFile] = []
        for file in remote.files:
            if _is_data_file(file) or _is_chunk_file(file, array_folders):
                data_files.append(file)
            else:
                small.append(file)
        self._fetch_small_files(remote, small)
        item = find_item(remote.placeholder_folder)
        if item is None:
            raise _no_index_error(remote)
        items = [item]
        state_item = STATE_ITEMS.get(item.name)
        if state_item is not None and item_metadata_file(item.parent / state_item) is not None:
            items.append(item.parent / state_item)
        for folder in items:
            for file in data_files:
                if placeholder_path(remote.placeholder_folder, file).is_relative_to(folder):
                    write_sparse_file(remote.placeholder_folder, remote.reader, file)
            _fetch_index(remote, folder)

    def _fetch_dcp_folder(self, remote: RemoteCheckpoint) -> None:
        """Fetch the small files of a torch distributed checkpoint, and both ends of each archive with a tensor."""
        top = {file.path: file for file in remote.files if "/" not in file.path}
        self._fetch_small_files(
            remote, [file for file in top.values() if not file.path.endswith(DCP_SUFFIX)]
        )
        reads: list[tuple[RemoteFile, tuple[int, int]]] = []
        for path, ranges in _archive_ends(remote.placeholder_folder).items():
            # The metadata is untrusted. The reader reports a file outside of the listing as missing.
            if path in top:
                write_sparse_file(remote.placeholder_folder, remote.reader, top[path])
                reads += [(top[path], byte_range) for byte_range in ranges]

        def fetch(read: tuple[RemoteFile, tuple[int, int]]) -> None:
            file, byte_range = read
            folder = remote.placeholder_folder
            write_sparse_file(folder, remote.reader, file, ranges=[byte_range])

        map_in_daemon_threads(fetch, reads, num_threads=MAX_IN_FLIGHT)

    def _fetch_small_files(self, remote: RemoteCheckpoint, files: Sequence[RemoteFile]) -> None:
        total_nbytes = sum(file.size for file in files)
        if total_nbytes > MAX_SMALL_FILES_NBYTES:
            why = f"{len(files):,} small files have {format_bytes(total_nbytes)} together"
            raise PrepError(
                f"{self.display_name} is not a checkpoint", why, "name the folder of a checkpoint"
            )

        def fetch(file: RemoteFile) -> None:
            content = self._contents.get(file.path)
            if content is None:
                content = read_all(self._bucket, file)
            write_small_file(remote.placeholder_folder, file, content)

        map_in_daemon_threads(fetch, files, num_threads=2 * MAX_IN_FLIGHT)


# Header and directory of an archive of PyTorch have less than 2 KiB each.
ARCHIVE_END_NBYTES = 4 << 10


def _without_older_steps(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Leave out all steps of a training run but the last complete one. A step is complete if it has a manifest."""
    paths = [file.path for file in files]
    steps = listed_steps(paths)
    if not steps and RECIPE_FILE not in paths:
        return list(files)
    # A step without a manifest is being written, or a kill left it. Neither may be opened as the
    # newest one. A run that has only such steps keeps its other files, and is reported as begun.
    kept_steps = (None, *steps[-1:])
    return [file for file in files if listed_step(file.path) in kept_steps]


def _archive_ends(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """Return the first and last bytes of each archive in a torch distributed checkpoint, by file.

    The header of a tensor is at the start of its archive, and the directory at the end. Neighbouring ranges
    (offset, length) are joined: the end of an archive, and the start of the next one.
    """
    ranges_by_file: dict[str, list[tuple[int, int]]] = {}
    for path, start, length in sorted(read_dcp_ranges(folder)):
        ranges = ranges_by_file.setdefault(path, [])
        stop = start + length
        for low, high in ((start, start + ARCHIVE_END_NBYTES), (stop - ARCHIVE_END_NBYTES, stop)):
            low = max(low, start)
            high = min(high, stop)
            if ranges and sum(ranges[-1]) >= low:
                low = ranges.pop()[0]
            ranges.append((low, high - low))
    return ranges_by_file


def _no_index_error(remote: RemoteCheckpoint) -> PrepError:
    why = "it has neither an OCDBT index nor folders of arrays: it was not finished"
    return PrepError(f"{remote.reader.name} cannot be read remotely", why, COPY_HINT)


def _file_name(file: RemoteFile) -> str:
    return file.path.rpartition("/")[2]


def _array_folders(files: Sequence[RemoteFile]) -> set[str]:
    """Return the folders of arrays without OCDBT: each has the metadata document of its array."""
    folders: set[str] = set()
    for file in files:
        if _file_name(file) in ARRAY_DOCUMENTS:
            folders.add(file.path.rpartition("/")[0])
    return folders


def _is_chunk_file(file: RemoteFile, array_folders: Collection[str]) -> bool:
    """Return whether a file is below a folder of an array and is not its metadata document."""
    if _file_name(file) in ARRAY_DOCUMENTS:
        return False
    # Chunks of zarr v3 are in nested folders: NAME/c/0/1.
    return any(str(parent) in array_folders for parent in PurePosixPath(file.path).parents)


def _is_data_file(file: RemoteFile) -> bool:
    """Return whether a file may store nodes or values of an OCDBT database."""
    return file.size > SMALL_NBYTES or not _DATA_FOLDERS.isdisjoint(file.path.split("/")[:-1])


def _fetch_index(remote: RemoteCheckpoint, item: Path) -> None:
    """Fetch the nodes of an OCDBT index, and the metadata of arrays and the indexes of shards in data files."""
    files = {placeholder_path(remote.placeholder_folder, file): file for file in remote.files}
    fetched_nbytes = 0

    # The index is a tree: a node names the byte ranges of its children, in any data file of the
    # item. The reader calls `fetch` before it reads a range, so that exactly the ranges on its way
    # are requested, and their placeholders stay sparse elsewhere.

    def fetch(location: ValueLocation) -> None:
        nonlocal fetched_nbytes
        fetched_nbytes += location.nbytes
        if fetched_nbytes > MAX_INDEX_NBYTES:
            why = f"it has more than {format_bytes(MAX_INDEX_NBYTES)}"
            raise PrepError(f"the index of {remote.reader.name} is too large", why, COPY_HINT)
        path = item / location.path
        # The path is part of the index, so untrusted. A path outside of the listing is not read here,
        # and the reader reports that the file is missing.
        if path in files:
            ranges = [(location.offset, location.nbytes)]
            write_sparse_file(remote.placeholder_folder, remote.reader, files[path], ranges=ranges)

    read_item(item, is_remote=True, before_read=fetch)
