"""Write the single file of a command's result. An equal file stays, and another one needs `overwrite`."""

from __future__ import annotations

from pathlib import Path

from prepcli.core.errors import OutputExistsError, Text
from prepcli.execution.output_paths import check_local_path
from prepcli.stores.files import (
    check_parent_folder,
    io_error,
    read_small_file,
    stat_file,
    write_file,
)


def check_result_path(path: Path) -> None:
    """Check that a result can be written, before the work for it begins.

    Raises:
        PrepError: The path is a URL, something other than a regular file has the name, or its folder does not exist.
    """
    check_local_path(path)
    check_parent_folder(path)
    if path.exists():
        stat_file(path)


def has_content(path: Path, data: bytes, *, overwrite: bool, why: str, hint: Text) -> bool:
    """Return whether a file exists with this content.

    Args:
        path: The file of a result.
        data: The content to write.
        overwrite: Whether another content may be replaced.
        why: Cause of the error.
        hint: Hint of the error.

    Raises:
        OutputExistsError: The file has other content, and `overwrite` is False.
        PrepError: The file cannot be read.
    """
    if not path.exists():
        return False
    # A larger file differs, so its content is not read.
    has_equal_size = stat_file(path).st_size == len(data)
    if has_equal_size and read_small_file(path, max_nbytes=len(data)) == data:
        return True
    if not overwrite:
        raise OutputExistsError(f"{path} already exists", why, hint)
    return False


def write_result_file(path: Path, data: bytes) -> None:
    """Write a file of a result. Raise PrepError if this fails."""
    try:
        write_file(path, data)
    except OSError as error:
        raise io_error(path, error) from error
