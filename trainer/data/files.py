"""Data files: find them in a fixed order and identify them by their content."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from trainer.data.readers import READERS
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import DataType

FILE_READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file, its size, and the XXH3-128 digest of its bytes when it was hashed."""

    path: Path
    nbytes: int
    digest: str


def find_files(paths: Sequence[str], data_type: DataType) -> tuple[Path, ...]:
    """Return the data files of paths, each once, in the order of the paths.

    A folder gives all its files with the suffix of the type (such as *.txt for `text`) at any depth, sorted, without
    hidden files and without following linked folders. A glob (`*`, `?`, `[…]`, `**`) gives all matching files and
    folders, sorted. A path to a file gives that file, whatever its suffix.

    Args:
        paths: Files, folders or globs.
        data_type: Selects the suffix of files in folders.

    Raises:
        PrepError: A path gives no file, or a folder cannot be read.
    """
    files: dict[Path, Path] = {}  # resolved path -> path as found
    for path in paths:
        matches = [file for match in _expand_glob(path) for file in _files_under(match, data_type)]
        if not matches:
            raise _no_data_error(path, data_type)
        for file in matches:
            files.setdefault(file.resolve(), file)
    return tuple(files.values())


def _expand_glob(path: str) -> list[Path]:
    if os.path.exists(path):  # a file name may contain brackets
        return [Path(path)]
    return sorted(Path(match) for match in glob.glob(path, recursive=True))


def _files_under(path: Path, data_type: DataType) -> list[Path]:
    if path.is_dir():
        return sorted(
            file for file in _walk_visible(path) if file.suffix == READERS[data_type].suffix and file.is_file()
        )
    return [path] if path.is_file() else []


def _walk_visible(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder, onerror=_raise_io_error):
        folders[:] = (name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _raise_io_error(error: OSError) -> None:
    raise io_error(Path(error.filename), error)


def _no_data_error(path: str, data_type: DataType) -> PrepError:
    suffix = READERS[data_type].suffix
    why = f"looked for a file of that name, *{suffix} in a folder of that name, or matches of it as a glob"
    if os.path.isdir(path):
        names = sorted(file.name for file in _walk_visible(Path(path)))
        listing = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}" or "nothing"
        why = f"looked for *{suffix}; found {listing}"
    hint = f"type `{data_type}` reads *{suffix} files of folders; give the path of any other file"
    return PrepError(f"no data in `{path}`", why, hint)


def hash_file(path: Path) -> DataFile:
    """Read a file to get its size and digest; raise PrepError if it is empty or cannot be read."""
    state, nbytes = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as handle:
            while block := handle.read(FILE_READ_NBYTES):
                state.update(block)
                nbytes += len(block)
    except OSError as error:
        raise io_error(path, error) from error
    if not nbytes:
        raise _empty_file_error(path)
    return DataFile(path, nbytes, state.hexdigest())


def check_readable(path: Path) -> None:
    """Raise PrepError unless a file can be opened and has content; the content is not read."""
    try:
        with path.open("rb") as handle:
            is_empty = not handle.read(1)
    except OSError as error:
        raise io_error(path, error) from error
    if is_empty:
        raise _empty_file_error(path)


def _empty_file_error(path: Path) -> PrepError:
    return PrepError(f"{path} is empty", "looked for text, found 0 bytes", "remove it, or name the other files")


def io_error(path: Path, error: OSError) -> PrepError:
    """Return an operating system error as a PrepError that names the file."""
    return PrepError(f"cannot read or write {path}", error.strerror or str(error))
