"""The files that hold the text: found in a fixed order, and known by their content."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from trainer.models.errors import PrepError

FileType = Literal["text", "json"]
SUFFIXES: dict[FileType, str] = {"text": ".txt", "json": ".jsonl"}
FILE_READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file as it was when it was looked at; `digest` is the XXH3-128 of its bytes."""

    path: Path
    nbytes: int
    digest: str


def find_files(paths: Sequence[str], type: FileType) -> tuple[Path, ...]:
    """The files that paths name, each once: the paths in their order, what a folder or a glob stands for sorted.

    A file is taken whatever it is called. A folder gives all its *.txt (`text`) or *.jsonl (`json`), at any depth, but
    nothing hidden and nothing behind a linked folder. A glob (`*`, `?`, `[…]`, `**`) gives the files and folders that
    it matches. PrepError for a path that gives no file.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        named = [file for each in _expand_glob(path) for file in _files_under(each, type)]
        if not named:
            raise _no_data_error(path, type)
        for file in named:
            found.setdefault(file.resolve(), file)
    return tuple(found.values())


def _expand_glob(path: str) -> list[Path]:
    if os.path.exists(path):  # a name may have brackets in it
        return [Path(path)]
    return sorted(Path(each) for each in glob.glob(path, recursive=True))


def _files_under(path: Path, type: FileType) -> list[Path]:
    if path.is_dir():
        return sorted(each for each in _walk_visible(path) if each.suffix == SUFFIXES[type] and each.is_file())
    return [path] if path.is_file() else []


def _walk_visible(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder, onerror=_raise_io_error):
        folders[:] = (name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _raise_io_error(error: OSError) -> None:
    raise io_error(Path(error.filename), error)


def _no_data_error(path: str, type: FileType) -> PrepError:
    looked = f"looked for a file of that name, *{SUFFIXES[type]} in a folder of that name, or matches of it as a glob"
    if os.path.isdir(path):
        found = sorted(each.name for each in _walk_visible(Path(path)))
        names = f"{', '.join(found[:3])}{' …' if len(found) > 3 else ''}" or "nothing"
        looked = f"looked for *{SUFFIXES[type]}; found {names}"
    return PrepError(f"no data in `{path}`", looked, f"type `{type}` reads *{SUFFIXES[type]}, or a file that is named")


def hash_file(path: Path) -> DataFile:
    """Read a file for its size and digest. PrepError if that fails, or if there is nothing in it."""
    state, nbytes = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as handle:
            while chunk := handle.read(FILE_READ_NBYTES):
                state.update(chunk)
                nbytes += len(chunk)
    except OSError as error:
        raise io_error(path, error) from error
    if not nbytes:
        raise _empty_file_error(path)
    return DataFile(path, nbytes, state.hexdigest())


def check_readable(path: Path) -> None:
    """Check that a file can be opened and has content, without reading it. Raises PrepError."""
    try:
        with path.open("rb") as handle:
            has_content = bool(handle.read(1))
    except OSError as error:
        raise io_error(path, error) from error
    if not has_content:
        raise _empty_file_error(path)


def _empty_file_error(path: Path) -> PrepError:
    return PrepError(f"{path} is empty", "looked for text, found 0 bytes", "remove it, or name the other files")


def io_error(path: Path, error: OSError) -> PrepError:
    """What the system said of a file, as an error that names it."""
    return PrepError(f"cannot read or write {path}", error.strerror or str(error))
