"""Replace whole files atomically: pages, scripts, copies of recipes, small files of a run."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from prepcli.core.errors import PrepError

# Maximum bytes of a file name on ext4, XFS, Btrfs and tmpfs.
MAX_NAME_NBYTES = 255
# Object stores refuse control characters, and shells and terminals misread them. One rule holds for all outputs.
_INVALID_CHARACTER = re.compile(r"[/\x00-\x1f\x7f]")
# Errors of file systems without hard links, such as FAT and mounted buckets
NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL)


def name_fault(name: str) -> str:
    """Return why a text cannot be the name of a file or folder of an output, or empty if it can.

    >>> name_fault("params.w"), name_fault("..")
    ('', 'a name is not empty, `.` or `..`')
    """
    if name in ("", ".", ".."):
        return "a name is not empty, `.` or `..`"
    if _INVALID_CHARACTER.search(name):
        return "a name has no slash and no control character"
    nbytes = len(os.fsencode(name))
    if nbytes > MAX_NAME_NBYTES:
        return f"a name has at most {MAX_NAME_NBYTES} bytes, and this one has {nbytes:,}"
    return ""


def write_file(path: Path, content: bytes, *, overwrite: bool = True) -> None:
    """Write a whole file. See `replacing_file`.

    Args:
        path: The file.
        content: Its bytes.
        overwrite: Whether an existing regular file is replaced.
    """
    with replacing_file(path, overwrite=overwrite) as file:
        file.write(content)


@contextmanager
def replacing_file(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open a new file under a temporary name, and rename it after the block.

    A kill, a full disk or an error leaves the old file, or none. The content is durable before it
    gets its name. No link is followed.

    Args:
        path: The file.
        overwrite: Whether an existing regular file is replaced.

    Yields:
        The new file.

    Raises:
        FileExistsError: The file exists and `overwrite` is False.
        PrepError: The path exists and is a symbolic link or not a regular file.
        OSError: The system refuses to write.
    """
    check_replaceable(path, overwrite=overwrite)
    # The temporary file is in the same folder, because a rename cannot cross file systems. A kill
    # leaves it: its name begins with a dot and is random, so no later write meets it.
    temporary = path.with_name(_temporary_name(path.name))
    try:
        # O_EXCL creates the file or fails. With O_NOFOLLOW, nobody who can write to the folder makes
        # this process write elsewhere through a prepared link.
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
        with open(fd, "wb") as file:
            yield file
            file.flush()
            # Before the rename: a rename may reach the disk earlier than the bytes, and a power
            # failure between the two would leave an empty file under the final name.
            os.fsync(fd)
        # A rename replaces a link of this name, not the file that the link points to.
        if overwrite:
            os.replace(temporary, path)
        else:
            _rename_to_free_name(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    # The name is an entry of the folder, which has its own blocks on the disk.
    fsync_path(path.parent)


def _rename_to_free_name(temporary: Path, path: Path) -> None:
    """Rename a file. Raise FileExistsError if the new name exists, even if another process has just created it."""
    # `link` fails if the name exists, `rename` replaces it. The caller removes the temporary name.
    try:
        os.link(temporary, path)
        return
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
    # Reserve the name with an empty file. A kill before the next line leaves it.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    os.replace(temporary, path)


def _temporary_name(name: str) -> str:
    """Return a name that no file of the folder has, within the length limit of file systems."""
    suffix = f".{secrets.token_hex(4)}.new"
    stem = os.fsencode(name)[: MAX_NAME_NBYTES - len(suffix) - 1]
    return f".{os.fsdecode(stem)}{suffix}"


def check_replaceable(path: Path, *, overwrite: bool = True) -> None:
    """Check that `write_file` may write a file.

    Raises:
        FileExistsError: The file exists and `overwrite` is False.
        PrepError: The path exists and is a symbolic link or not a regular file.
    """
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


def fsync_path(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
