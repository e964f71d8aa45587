"""Find data files in a fixed order."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.data.files import io_error
from trainer.data.readers import READERS
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import DataType


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
