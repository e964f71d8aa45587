"""Write the files that prep makes for people: pages, scripts, copies of recipes."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from trainer.models.errors import PrepError

MAX_NAME_NBYTES = 255  # of a file on ext4, XFS, Btrfs and tmpfs


def write_file(path: Path, content: bytes, *, overwrite: bool = True) -> None:
    """Write a whole file under a temporary name, then rename it.

    A kill, a full disk or an error leaves the old file, or none. The content is durable before it gets its name.
    No link is followed.

    Args:
        path: The file.
        content: Its bytes.
        overwrite: Whether an existing regular file is replaced.

    Raises:
        FileExistsError: The file exists and `overwrite` is False.
        PrepError: The path exists and is a symbolic link or not a regular file.
        OSError: The system refuses to write.
    """
    _check_replaceable(path, overwrite)
    temporary = path.with_name(_temporary_name(path.name))
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        if overwrite:
            os.replace(temporary, path)
        else:
            # A link is created only if the name is free, also when another process takes it at this moment.
            os.link(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_folder(path.parent)


def _temporary_name(name: str) -> str:
    """Return a name that no other file of the folder has, within the limit of file systems."""
    suffix = f".{secrets.token_hex(4)}.new"
    stem = os.fsencode(name)[: MAX_NAME_NBYTES - len(suffix) - 1]
    return f".{os.fsdecode(stem)}{suffix}"


def _check_replaceable(path: Path, overwrite: bool) -> None:
    """Raise an error if something other than a regular file has the name, or a file that is not to be replaced."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not overwrite:
        raise FileExistsError(f"{path} already exists")
    if stat.S_ISLNK(mode):
        raise _not_written_error(path, "is a symbolic link")
    if not stat.S_ISREG(mode):
        raise _not_written_error(path, "is not a regular file")


def _not_written_error(path: Path, why: str) -> PrepError:
    return PrepError(f"{path} is not overwritten", f"it {why}", "remove it, or choose another name")


def _sync_folder(folder: Path) -> None:
    """Make a new name durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
