"""Find data files in a fixed order, here and by URL, and their type by their suffixes."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NoReturn

from prepcli.core.errors import Key, PrepError, Text, text, usage_error
from prepcli.core.formatting import format_bytes, suggest
from prepcli.core.observer import NullProgress
from prepcli.sources.open_folder import Access
from prepcli.stores.addresses import parse_hub_address, parse_url
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.files import not_regular_error, open_regular_file
from prepcli.stores.hub import (
    HubListing,
    cached_snapshot,
    is_hub_down,
    list_repository,
    prepare_hub,
    translate_errors,
)
from prepcli.stores.object_store import Bucket
from prepcli.stores.paths import StoreListing
from trainer.data.dataset_layout import (
    MAX_README_NBYTES,
    README,
    WHOLE,
    Selection,
    dataset_files,
    is_dataset_dict,
    is_saved_part,
    matches,
    read_metadata,
    select_files,
    select_folder_files,
)
from trainer.data.files import DataFile, Note, io_error
from trainer.data.readers import READERS
from trainer.data.readers.reader import Reader
from trainer.recipe.text_fields import DataType, FileType

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Signs of a glob in the URL of an object store.
GLOB_SIGNS = re.compile(r"[*?]")


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return URL.match(path) is not None


HUB_SCHEME = "hf://"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
TYPE_HINT = Text(Key("data.type"), " sets the type of all files")


def find_data_files(
    paths: Sequence[str],
    data_type: DataType,
    selection: Selection = WHOLE,
    *,
    remote: DataFinder | None = None,
    note: Note = lambda text: None,
) -> tuple[Path | DataFile, ...]:
    """Return the data files of paths and URLs, each once, in their order.

    A folder gives all its files with a suffix of the type (such as *.txt for `text`) at any depth,
    sorted, without hidden files and without following linked folders. A folder saved by
    `datasets`, or a copy of a dataset of the hub, gives the files of a split, and so does any folder if
    a split or a configuration is selected. A glob (`*`, `?`, `[…]`, `**`) gives all matching files and
    folders, sorted. A path to a file gives the file, with any suffix. Remote files have the digests of
    their stores.

    Args:
        paths: Files, folders, globs or URLs.
        data_type: Selects the suffixes of files in folders.
        selection: Part of a dataset.
        remote: Finds the files of URLs. None for a caller that reads only local files.
        note: Called with a message about a folder that is read with all its splits.

    Raises:
        PrepError: A path gives no file, a folder cannot be read, or no path can have the selected part.
    """
    _check_selection(paths, selection)
    # From the resolved path, which is equal for all names of a file, to the path as found.
    files: dict[Path | str, Path | DataFile] = {}
    for path in paths:
        if is_url(path):
            if remote is None:
                why = "only local files are read here"
                raise usage_error(f"cannot read {path}", why, "pass a path")
            for file in remote.find(path, partial(_is_data_file, data_type=data_type), selection):
                files.setdefault(file.path, file)
        else:
            for file in _local_files(path, data_type, selection, note):
                files.setdefault(file.resolve(), file)
    return tuple(files.values())


def has_local_files(paths: Sequence[str]) -> bool:
    """Return whether all paths are on this machine: no URL, and each names a file or a folder that exists."""
    return all(not is_url(path) and _expand_glob(path) for path in paths)


def with_companions(
    files: Sequence[Path | DataFile], file_type: FileType
) -> tuple[Path | DataFile, ...]:
    """Return files, each local one followed by the second file of its type, if the type has one.

    E.g. an index of Megatron is followed by the file with its ids, also if a glob matches both.

    Raises:
        UsageError: A second file is named without its first one.
    """
    suffix = READERS[file_type].companion_suffix
    if not suffix:
        return tuple(files)
    # A dict keeps the order, and finds a file at once among millions.
    complete: dict[Path | DataFile, None] = {}
    for file in files:
        if isinstance(file, DataFile):
            complete[file] = None
        elif file.suffix != suffix:
            complete |= dict.fromkeys([file, file.with_suffix(suffix)])
    for file in files:
        if file not in complete:
            what = f"{file} is not a file of type `{file_type}`"
            first = READERS[file_type].suffixes[0]
            why = f"the {first} file says where its documents are"
            raise usage_error(what, why, f"name {first} files only")
    return tuple(complete)


def _check_selection(paths: Sequence[str], selection: Selection) -> None:
    """Raise UsageError if no path can have the selected part. A missing path has an error of its own."""
    if not all(is_url(path) or _expand_glob(path) for path in paths):
        return
    on_hub = any(path.startswith(HUB_SCHEME) for path in paths)
    folders = [match for path in paths for match in _expand_glob(path) if match.is_dir()]
    is_remote = on_hub or any(
        is_url(path)
        and not GLOB_SIGNS.search(path)
        and not _is_data_file(path.rpartition("/")[2], data_type="auto")
        for path in paths
    )
    has_splits = is_remote or any(not is_saved_part(folder) for folder in folders)
    has_configs = is_remote or any(
        not is_dataset_dict(folder) and not is_saved_part(folder) for folder in folders
    )
    parts = {
        "config": (selection.config, has_configs),
        selection.split_key: (selection.split, has_splits),
        "revision": (selection.revision, on_hub),
    }
    for key, (value, has_part) in parts.items():
        if value is not None and not has_part:
            # A folder has splits and configurations, and only the hub has revisions.
            why = "no path of the data is a dataset"
            if key == "revision":
                why += " on the hub"
            raise usage_error(
                Text(Key(f"data.{key}"), f" is {value!r:.60}"),
                why,
                f"remove it, or `{HUB_SCHEME}datasets/OWNER/NAME`",
            )


def resolve_type(files: Sequence[Path | DataFile], data_type: DataType) -> FileType:
    """Return the type of data files: the recipe's, or the one of all their suffixes.

    Raises:
        UsageError: A suffix is unknown, or the files have several types.
    """
    if data_type != "auto":
        return data_type
    types: dict[FileType, str] = {}
    for file in files:
        name = str(file.path if isinstance(file, DataFile) else file)
        matching: list[FileType] = [
            key for key, reader in READERS.items() if reader.matches(name, is_named=True)
        ]
        if not matching:
            why = f"known suffixes: {', '.join(_folder_suffixes('auto'))}"
            raise usage_error(f"the type of {name} is unknown", why, TYPE_HINT)
        types.setdefault(matching[0], name)
    if len(types) > 1:
        why = ", ".join(f"{name} is {file_type}" for file_type, name in types.items())
        raise usage_error(
            "the data files have several types",
            why,
            "write a table of `data.sources` for each type",
        )
    return next(iter(types))


def _local_files(path: str, data_type: DataType, selection: Selection, note: Note) -> list[Path]:
    """Return the data files of one path. Raise PrepError if there are none."""
    files: list[Path] = []
    for match in _expand_glob(path):
        if match.is_dir():
            files += _folder_files(match, data_type, selection, note)
        elif match.is_file():
            files.append(match)
    if not files and os.path.exists(path) and not os.path.isdir(path):
        raise not_regular_error(Path(path))
    if not files:
        raise _no_data_error(path, data_type)
    return files


def _expand_glob(path: str) -> list[Path]:
    """Return the path itself if it exists, else the sorted matches of it as a glob."""
    if os.path.exists(path):
        # A file name may contain brackets.
        return [Path(path)]
    return sorted(Path(match) for match in glob.glob(path, recursive=True))


def _folder_files(
    folder: Path, data_type: DataType, selection: Selection, note: Note
) -> list[Path]:
    """Return the data files of a folder: of the selected part of a dataset, or all of them."""
    saved = dataset_files(folder, selection)
    if saved is not None:
        return saved
    # Sorted as paths, so that `a/b.txt` comes before `a-b.txt`.
    files = sorted(file for file in _walk_visible(folder) if file.is_file())
    names = [file.relative_to(folder).as_posix() for file in files]
    readme = folder / README
    selected = select_folder_files(
        str(folder),
        names,
        read_metadata(readme if readme.is_file() else None),
        selection,
        accepts=partial(_is_data_file, data_type=data_type),
        note=note,
    )
    return [folder / name for name in selected]


def _is_data_file(name: str, *, data_type: DataType) -> bool:
    """Return whether a file of a folder has a suffix of a type. `auto` accepts every type."""
    return any(reader.matches(name) for reader in _readers_for_type(data_type))


def _readers_for_type(data_type: DataType) -> Sequence[Reader]:
    """Return the readers of a type, and of all types for `auto`."""
    if data_type == "auto":
        return [*READERS.values()]
    return [READERS[data_type]]


def _walk_visible(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder. Hidden files and folders are skipped."""

    def fail(error: OSError) -> NoReturn:
        raise io_error(Path(error.filename), error)

    for root, folders, names in os.walk(folder, onerror=fail):
        # `os.walk` visits only the folders that remain in this list.
        folders[:] = (name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _folder_suffixes(data_type: DataType) -> list[str]:
    """Return the suffixes of data files of a type in a folder."""
    return [suffix for reader in _readers_for_type(data_type) for suffix in reader.suffixes]


def _no_data_error(path: str, data_type: DataType) -> PrepError:
    """Return the error for a path without data."""
    # Its hint is what a folder is read for, a file of a similar name, or a dataset.
    what = f"no data in `{path}`"
    suffixes = ", ".join(f"*{suffix}" for suffix in _folder_suffixes(data_type))
    if os.path.isdir(path):
        names = sorted(file.name for file in _walk_visible(Path(path)))
        listing = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}" or "nothing"
        hint = (
            f"type `{data_type}` reads {suffixes} files of folders; give the path of any other file"
        )
        return PrepError(what, f"looked for {suffixes}; found {listing}", hint)
    if os.path.islink(path):
        return PrepError(what, "it is a link to a file that does not exist", "correct the link")
    why = f"looked for a file of that name, {suffixes} in a folder of that name, or matches of it as a glob"
    parent, name = os.path.split(path)
    neighbors = os.listdir(parent or ".") if os.path.isdir(parent or ".") else []
    hint = "check the spelling; a relative path starts from the current folder"
    if suggestion := suggest(name, sorted(neighbors)):
        hint = f"did you mean `{os.path.join(parent, suggestion)}`?"
    elif HUB_ID.fullmatch(path) and not neighbors:
        hint = f"`{HUB_SCHEME}datasets/{path}` reads a dataset on the hub"
    return PrepError(what, why, hint)


# Data files of URLs: in object stores, and of datasets on the hub.

HUB_HINT = "`hf://datasets/OWNER/NAME`, or `hf://datasets/OWNER/NAME/FILE`"
SCHEMES = ("gs://", "s3://", "hf://")


@dataclass(frozen=True, slots=True)
class DataFinder:
    """Finder of data files by URL."""

    access: Access  # Time-outs and retries, and whether only the hub's cache may be used
    note: Callable[[str], None]  # Called with a message before a download

    def find(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> Sequence[DataFile]:
        """List the data files of a URL, without reading them.

        Args:
            url: A file, a folder or a glob in an object store, or a dataset on the hub.
            accepts: Returns whether a file of a folder is data, by its name.
            selection: Part of a dataset.

        Raises:
            PrepError: There is no such file, or the store cannot be reached.
        """
        if not url.startswith(SCHEMES):
            why = "supported: paths, gs://, s3:// and hf://datasets/"
            raise usage_error(f"cannot read data from {url}", why, _web_address_hint(url))
        if url.startswith("hf://"):
            files = self._find_on_hub(url, accepts, selection)
        else:
            files = self._find_in_bucket(url, accepts, selection)
        if not files:
            why = "no object of that name, no data file in a folder of that name, and no match of it as a glob"
            hint = text("check the spelling; {} sets the type of files", Key("data.type"))
            raise PrepError(f"no data in `{url}`", why, hint)
        return files

    def _find_in_bucket(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> list[DataFile]:
        """Return an object, or else the data of a folder or a glob, sorted by name."""
        glob = GLOB_SIGNS.search(url)
        # List below the last folder before the first sign of a glob, e.g. `gs://b/a` of `gs://b/a/x-*`.
        literal = url.rstrip("/")
        if glob:
            literal = url[: glob.start()]
        parent, _, name = literal.rpartition("/")
        pattern = url.removeprefix(f"{parent}/")
        # `gs://b` is a whole bucket. It has no object name after the last slash.
        is_bucket = parent.endswith(":/")
        folder = parent
        if is_bucket:
            folder = url
        bucket = Bucket(parse_url(folder), retry_policy=self.access.retry_policy)
        if not glob and not is_bucket and (file := bucket.find_file(name)) is not None:
            return [_bucket_file(bucket, file)]
        if not glob and not is_bucket:
            bucket = replace(bucket, url=parse_url(url))
        files: dict[str, DataFile] = {}
        for file in bucket.list_files():
            if not any(part.startswith(".") for part in file.path.split("/")):
                files[file.path] = _bucket_file(bucket, file)
        # A glob selects files by its pattern. In a folder, the type of the data and the part of a dataset select them.
        if glob:
            names = [name for name in files if matches(name, pattern)]
        else:
            metadata = _bucket_metadata(files.get(README))
            names = select_folder_files(
                url, [*files], metadata, selection, accepts=accepts, note=self.note
            )
        return [files[name] for name in names]

    def _find_on_hub(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> list[DataFile]:
        """Return the files of a dataset on the hub, named by a URL and a selection."""
        address = parse_hub_address(url)
        if address is None or address.repo_type != "dataset":
            raise usage_error(
                f"`{url}` is an invalid URL", "it names no dataset on the hub", HUB_HINT
            )
        if address.revision and selection.revision not in (None, address.revision):
            key = Key("data.revision")
            why = text("`@{}` and {} {}", address.revision, key, selection.revision)
            raise usage_error(f"`{url}` has two revisions", why, "remove one of them")
        revision = address.revision or selection.revision
        is_offline = prepare_hub(self.access.offline, self.access.retry_policy)
        with translate_errors(address.hub_id, revision, offline=is_offline, repo_type="dataset"):
            dataset = self._open_dataset(address.hub_id, revision, is_offline=is_offline)
            metadata = read_metadata(dataset.readme())
            if address.path:
                names = sorted(name for name in dataset.names if matches(name, address.path))
            else:
                names = select_files(
                    address.hub_id,
                    dataset.names,
                    metadata,
                    selection,
                    accepts=accepts,
                )
            return [dataset.data_file(name) for name in names]

    def _open_dataset(
        self, hub_id: str, revision: str | None, *, is_offline: bool
    ) -> HubDataset | CachedDataset:
        """List the files of a dataset on the hub."""
        # Offline, or if the hub is down, list the files in the hub's cache instead.
        if is_offline:
            return CachedDataset(hub_id, cached_snapshot(hub_id, revision, "dataset"))
        try:
            policy = self.access.retry_policy
            return HubDataset(
                list_repository(hub_id, revision, retry_policy=policy, repo_type="dataset"),
                self.note,
            )
        except Exception as error:
            if not is_hub_down(error):
                raise
            try:
                cached = CachedDataset(hub_id, cached_snapshot(hub_id, revision, "dataset"))
            except FileNotFoundError:
                raise error from None
            self.access.warn(f"the hub cannot be reached: using the files of {hub_id} in the cache")
            return cached


def _bucket_file(bucket: Bucket, file: RemoteFile) -> DataFile:
    """Return an object as a data file, which is identified by its ETag."""

    def open_stream() -> BinaryIO:
        return (StoreListing(bucket.name, bucket, [file]).root / file.path).stream(0)

    return DataFile(f"{bucket.url}/{file.path}", file.size, file.digest, open_stream)


def _bucket_metadata(readme: DataFile | None) -> Mapping[str, object]:
    """Return the metadata of the README in a bucket. It is empty without a README."""
    if readme is None:
        return {}
    with TemporaryDirectory() as folder, readme.open() as stream:
        path = Path(folder, README)
        path.write_bytes(stream.read(MAX_README_NBYTES + 1))
        return read_metadata(path, str(readme.path))


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset that the hub lists.

    Its files are downloaded into the hub's cache when they are opened.
    """

    listing: HubListing
    note: Callable[[str], None]

    @property
    def names(self) -> Sequence[str]:
        """Names of its files."""
        return [*self.listing.siblings]

    def readme(self) -> Path | None:
        """Download the README, if there is one, and return its path in the cache.

        The download also records the commit of the revision in the cache.
        """
        # Without a README, the download still records the commit of the revision. A later start
        # without network finds the files by it.
        names: list[str] = []
        if README in self.listing.siblings:
            names = [README]
        folder = self.listing.download(names, NullProgress())
        if names:
            return folder / README
        return None

    def data_file(self, name: str) -> DataFile:
        """Return a file, identified by the hub's hash of its content."""
        file = self.listing.remote_file(name)
        return _hub_file(self.listing.hub_id, file, partial(self._open, file))

    def _open(self, file: RemoteFile) -> BinaryIO:
        hub_id = self.listing.hub_id
        self.note(
            f"reading {file.path} of {hub_id} ({format_bytes(file.size)}) through the hub's cache"
        )
        with translate_errors(hub_id, self.listing.revision, repo_type="dataset"):
            return open_regular_file(self.listing.download_file(file.path), buffering=0)


@dataclass(frozen=True, slots=True)
class CachedDataset:
    """The files of a dataset in the hub's cache."""

    hub_id: str
    folder: Path

    @property
    def names(self) -> Sequence[str]:
        """Names of its files."""
        names: list[str] = []
        for path in self.folder.rglob("*"):
            if path.is_file():
                names.append(str(path.relative_to(self.folder)))
        return sorted(names)

    def readme(self) -> Path | None:
        """Return the path of the README. None if it is not in the cache."""
        path = self.folder / README
        if path.is_file():
            return path
        return None

    def data_file(self, name: str) -> DataFile:
        """Return a file with the hub's digest of its content.

        A file in the cache is a link. The name of the link's target is the digest.
        """
        path = self.folder / name
        file = RemoteFile(name, path.stat().st_size, os.path.basename(os.path.realpath(path)))
        return _hub_file(self.hub_id, file, partial(open_regular_file, path, buffering=0))


def _hub_file(hub_id: str, file: RemoteFile, open_file: Callable[[], BinaryIO]) -> DataFile:
    digest = file.digest.rpartition(":")[2]
    return DataFile(f"hf://datasets/{hub_id}/{file.path}", file.size, f"hub:{digest}", open_file)


def _web_address_hint(url: str) -> str:
    """Return the name for recipes of a dataset's page on the hub, and how to read any other address."""
    address = parse_hub_address(url)
    if address is None or address.repo_type != "dataset":
        return "download it, and name the file"
    revision = f"@{address.revision}" if address.revision else ""
    path = f"/{address.path}" if address.path else ""
    return f"`hf://datasets/{address.hub_id}{revision}{path}`"
