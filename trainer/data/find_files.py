"""Find data files in a fixed order, here and by URL, and their type by their suffixes."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

from prepcli.core.errors import Key, PrepError, Text, usage_error
from prepcli.core.formatting import suggest
from prepcli.stores.files import not_regular_error
from trainer.data.dataset_layout import (
    README,
    WHOLE,
    Selection,
    dataset_files,
    is_dataset_dict,
    is_saved_part,
    read_metadata,
    select_folder_files,
)
from trainer.data.files import DataFile, Note, io_error
from trainer.data.readers import READERS
from trainer.data.readers.reader import Reader
from trainer.recipe.text_fields import DataType, FileType

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Signs of a glob in the URL of an object store.
GLOB_SIGNS = re.compile(r"[*?]")


class RemoteFiles(Protocol):
    """Finder of data files by URL."""

    def find(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> Sequence[DataFile]:
        """List the data files of a URL, without reading them.

        Args:
            url: A file, a folder or a glob in an object store, or a dataset on the hub.
            accepts: Returns whether a file of a folder is data, by its name.
            selection: Part of a dataset on the hub.

        Raises:
            PrepError: There is no such file, or the store cannot be reached.
        """
        ...


class NoRemoteFiles:
    """RemoteFiles of a caller that reads only local files."""

    def find(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> Sequence[DataFile]:
        """Raise UsageError: there are no remote files."""
        raise usage_error(f"cannot read {url}", "only local files are read here", "pass a path")


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return URL.match(path) is not None


NO_REMOTE_FILES = NoRemoteFiles()
HUB_SCHEME = "hf://"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
TYPE_HINT = Text(Key("data.type"), " sets the type of all files")


def find_data_files(
    paths: Sequence[str],
    data_type: DataType,
    selection: Selection = WHOLE,
    *,
    remote: RemoteFiles = NO_REMOTE_FILES,
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
        remote: Finds the files of URLs.
        note: Called with a message about a folder that is read with all its splits.

    Raises:
        PrepError: A path gives no file, a folder cannot be read, or no path can have the selected part.
    """
    _check_selection(paths, selection)
    # From the resolved path, which is equal for all names of a file, to the path as found.
    files: dict[Path | str, Path | DataFile] = {}
    for path in paths:
        if is_url(path):
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
    """Return the error for a path without data.

    Its hint is what a folder is read for, a file of a similar name, or a dataset.
    """
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
