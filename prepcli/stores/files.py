"""Open regular files only, on a disk or in a store, resolve paths named in files, and replace whole files atomically.

A FIFO blocks the process that opens it, and /dev/zero never ends. A path such as `../private`, read
from a JSON file, leaves the user's folder.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

from prepcli.core.errors import GET_AGAIN_HINT, RESUME_HINT, DamagedError, PrepError
from prepcli.core.json_values import is_utf8
from prepcli.core.worker_thread import run_in_threads
from prepcli.stores.paths import AnyPath, PathT, StorePath, StoreStat

# Maximum bytes of a file name on ext4, XFS, Btrfs and tmpfs.
MAX_NAME_NBYTES = 255
# Object stores refuse control characters, and shells and terminals misread them. One rule holds for all outputs.
_INVALID_CHARACTER = re.compile(r"[/\x00-\x1f\x7f]")
# Errors of file systems without hard links, such as FAT and mounted buckets
NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL)
# Hint for an error of the operating system about a file.
ACCESS_HINT = "check its permissions, and the free space of its disk"
MAX_SMALL_FILE_NBYTES = 100_000_000
MAX_CONFIG_NBYTES = 16 << 20
MAX_LINE_NBYTES = 1 << 20
# Bytes read at once of a line that is too long, and skipped.
SKIPPED_PIECE_NBYTES = 1 << 20
# A clone without Git LFS has such a text of at most 1,024 bytes in place of each large file:
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
LFS_PREFIX = b"version https://git-lfs"
MAX_LFS_POINTER_NBYTES = 1024


def name_fault(name: str) -> str:
    """Return why a text cannot be the name of a file or folder of an output, or empty if it can.

    >>> name_fault("params.w"), name_fault("..")
    ('', 'a name is not empty, `.` or `..`')
    """
    if name in ("", ".", ".."):
        return "a name is not empty, `.` or `..`"
    if _INVALID_CHARACTER.search(name):
        return "a name has no slash and no control character"
    if not is_utf8(name):
        return "a name is UTF-8, as the JSON that records it"
    nbytes = len(os.fsencode(name))
    if nbytes > MAX_NAME_NBYTES:
        return f"a name has at most {MAX_NAME_NBYTES} bytes, and this one has {nbytes:,}"
    return ""


def write_file(path: Path, content: bytes, *, overwrite: bool = True) -> None:
    """Write a whole file. See `replacing_file`."""
    with replacing_file(path, overwrite=overwrite) as file:
        file.write(content)


@contextmanager
def replacing_file(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open a new file under a temporary name, and rename it after the block.

    A kill, a full disk or an error leaves the old file, or none. The content is durable before it
    gets its name. No link is followed.

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
    suffix = f".{secrets.token_hex(4)}.new"
    stem = os.fsencode(path.name)[: MAX_NAME_NBYTES - len(suffix) - 1]
    temporary = path.with_name(f".{os.fsdecode(stem)}{suffix}")
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


def make_folder(path: Path) -> list[Path]:
    """Make a folder and its parents, durably. Return the new folders, from the innermost one on."""
    new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new_folders:
        fsync_path(folder.parent)
    return new_folders


class CutShortError(ValueError):
    """A file ends before its content does, e.g. after an interrupted download."""


def open_regular_file(path: AnyPath, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. Links are followed.

    Args:
        path: The file.
        buffering: As in `open`. 0 for no buffer. Above 1, at most these bytes are requested at once from a store.

    Raises:
        PrepError: The path is a folder, FIFO, device or socket.
        DamagedError: The file is a pointer of Git LFS.
        OSError: The system refuses to open it.
    """
    if isinstance(path, StorePath):
        if path.is_dir():
            raise not_regular_error(path)
        if path.file.size <= MAX_LFS_POINTER_NBYTES:
            # The stream reads the copy, so that a small file costs one request.
            check_not_lfs_pointer(path.local().read_bytes(), path)
        return path.stream(buffering)
    # O_NONBLOCK: without it, opening a FIFO waits for a writer. It has no effect on regular files.
    # The file is opened first and checked after: between a check by name and an opening, the name
    # could be given to a FIFO. O_CLOEXEC: no child process inherits the file.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if path.is_socket():
            raise not_regular_error(path) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise not_regular_error(path)
        check_not_lfs_pointer(os.pread(fd, MAX_LFS_POINTER_NBYTES + 1, 0), path)
    except BaseException:
        os.close(fd)
        raise
    return open(fd, "rb", buffering=buffering)


def read_file_or_pipe(path: Path, max_nbytes: int = MAX_SMALL_FILE_NBYTES) -> bytes:
    """Read a small file that the user names, or the pipe of a shell's `<(...)`.

    Raises:
        PrepError: The file or the content of the pipe is larger than `max_nbytes`, or the path is a folder, device,
            socket or named pipe.
        OSError: The system refuses to read it.
    """
    # A shell passes an open descriptor, e.g. /dev/fd/63. A named pipe without a writer would never open.
    is_descriptor = os.path.realpath(path).startswith("/proc/")
    if not (path.is_fifo() and is_descriptor):
        return read_regular_file(path, max_nbytes)
    # The read waits for the writer, as every reader of a pipe does.
    with path.open("rb") as pipe:
        content = pipe.read(max_nbytes + 1)
    if len(content) > max_nbytes:
        why = f"the limit is {max_nbytes:,} bytes"
        raise PrepError(f"{path} is too large", why, "check that it is the right file")
    return content


def check_not_lfs_pointer(start: bytes, path: AnyPath) -> None:
    """Raise DamagedError if a file is a pointer of Git LFS, and not the file itself.

    Args:
        start: Its first bytes, all of them if there are at most MAX_LFS_POINTER_NBYTES.
        path: Its path, for the message.
    """
    if len(start) <= MAX_LFS_POINTER_NBYTES and start.startswith(LFS_PREFIX):
        what = f"{path} is a Git LFS pointer"
        raise DamagedError(what, "it only refers to the real file", "run `git lfs pull`")


def read_regular_file(path: AnyPath, max_nbytes: int = MAX_SMALL_FILE_NBYTES) -> bytes:
    """Read a whole small file."""
    if isinstance(path, StorePath):
        if path.is_dir():
            raise not_regular_error(path)
        if path.file.size > max_nbytes:
            raise _too_large_error(path, path.file.size, max_nbytes)
        # The file is fetched once.
        content = path.local().read_bytes()
        check_not_lfs_pointer(content, path)
        return content
    with open_regular_file(path, buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        # `read(max_nbytes)` would allocate that many bytes, also for a file of ten.
        content = b""
        if nbytes <= max_nbytes:
            content = file.read()
    # The file may have grown meanwhile.
    if max(nbytes, len(content)) > max_nbytes:
        raise _too_large_error(path, max(nbytes, len(content)), max_nbytes)
    return content


def _too_large_error(path: AnyPath, nbytes: int, max_nbytes: int) -> PrepError:
    why = f"it has {nbytes:,} bytes, the limit is {max_nbytes:,}"
    return PrepError(f"{path} is too large", why, "check that it is the right file")


def read_complete_lines(path: Path, *, max_nbytes: int = MAX_LINE_NBYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file without their ends, in bounded memory.

    A line above the limit is yielded empty. A last line without an end, e.g. one cut short by a
    kill, is not yielded.
    """
    with open_regular_file(path) as file:
        while line := file.readline(max_nbytes + 1):
            if line.endswith(b"\n"):
                yield line[:-1]
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(SKIPPED_PIECE_NBYTES)
            if line:
                yield b""


def resolve_named_path(folder: PathT, name: object, named_by: AnyPath | str) -> PathT:
    """Return the path of a file or folder inside `folder` that another file names.

    Every name that prep reads from a file or a listing and opens passes through this function.
    Links in the folder are followed: only a writer of the folder can create one, and the files are
    parsed. Files copied without parsing have stricter rules (`prepcli.sources.side_files`).

    Args:
        folder: Folder of the named file.
        name: The name, as read, e.g. `"train/data-00000.arrow"`.
        named_by: The file or the listing with the name, for the error message.

    Example:
        >>> resolve_named_path(Path("data"), "train", Path("data/dataset_dict.json"))
        PosixPath('data/train')
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise _unsafe_name_error(named_by, name, "is not a file name")
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts:
        raise _unsafe_name_error(named_by, name, f"is not inside {folder}")
    return folder / relative


def stat_file(path: AnyPath) -> os.stat_result | StoreStat:
    """Return the stat of a regular file, links followed. Raise PrepError for other kinds: a pipe would block."""
    try:
        if isinstance(path, StorePath):
            if path.is_dir():
                raise not_regular_error(path)
            return path.stat()
        file_stat = path.stat()
    except OSError as error:
        raise unreadable_error(path, error) from error
    if not stat.S_ISREG(file_stat.st_mode):
        raise not_regular_error(path)
    return file_stat


def is_there(path: AnyPath, *, follow_links: bool = False) -> bool:
    """Return whether a path is a file or folder of any kind. A path without access is not."""
    if isinstance(path, StorePath):
        return path.exists()
    return os.path.exists(path) if follow_links else os.path.lexists(path)


def stat_indexed_file(path: AnyPath) -> os.stat_result | StoreStat:
    """Return the stat of a file named by an index. Raise DamagedError if it does not exist."""
    if not is_there(path):
        why = "the index of the checkpoint names it"
        raise DamagedError(f"{path} does not exist", why, GET_AGAIN_HINT)
    return stat_file(path)


def read_bytes(path: AnyPath, offset: int = 0, nbytes: int = -1) -> bytes:
    """Return bytes of a regular file. Raise PrepError if it cannot be read.

    Args:
        path: The file.
        offset: First byte.
        nbytes: Number of bytes. A negative number reads to the end of the file.
    """
    try:
        if isinstance(path, StorePath) and nbytes >= 0 and not path.is_dir():
            return path.read(offset, nbytes)
        with open_regular_file(path) as file:
            file.seek(offset)
            return file.read(nbytes)
    except OSError as error:
        raise unreadable_error(path, error) from error


def read_small_file(path: AnyPath, max_nbytes: int = MAX_SMALL_FILE_NBYTES) -> bytes:
    """Return the content of a small file. Raise PrepError if it is too large or not a regular file."""
    try:
        return read_regular_file(path, max_nbytes)
    except OSError as error:
        raise unreadable_error(path, error) from error


def list_folder(folder: AnyPath) -> list[str]:
    """Return the sorted names in a folder."""
    try:
        if isinstance(folder, StorePath):
            return sorted(child.name for child in folder.iterdir())
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable_error(folder, error) from error


def unreadable_error(path: AnyPath, error: OSError) -> PrepError:
    """Return the error for an unreadable file or folder."""
    hint = "check the name" if isinstance(error, FileNotFoundError) else ACCESS_HINT
    return PrepError(f"cannot read {path}", error.strerror or str(error), hint)


def io_error(path: AnyPath, error: OSError) -> PrepError:
    """Return an operating system error as a PrepError with the name of the file.

    Returns:
        An error with a hint for its cause, e.g. a full disk, too many open files or a missing folder.
    """
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PrepError(
            f"the disk that holds {path.name} is full", why, f"free some space, then {RESUME_HINT}"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return PrepError(
            f"cannot read or write {path}", why, "raise the limit of open files (`ulimit -n`)"
        )
    if error.errno == errno.ENOENT:
        hint = f"create the folder {path.parent}, or use another one"
        if path.parent.is_dir():
            hint = "check the name"
        return PrepError(f"cannot read or write {path}", why, hint)
    if error.errno == errno.ENOTDIR:
        # The file in the middle of the path, e.g. `a.txt` of `a.txt/b`
        outer = reversed(path.parents)
        file = next((parent for parent in outer if parent.exists() and not parent.is_dir()), path)
        hint = f"use another folder than {file}, which is a file"
        return PrepError(f"cannot read or write {path}", why, hint)
    return PrepError(f"cannot read or write {path}", why, ACCESS_HINT)


def check_parent_folder(path: Path) -> None:
    """Raise PrepError if the folder of an output does not exist."""
    try:
        # With the slash, a file in place of the folder is an error too.
        os.stat(f"{path.parent}/")
    except OSError as error:
        raise io_error(path, error) from error


def not_regular_error(path: AnyPath) -> PrepError:
    """Return the error for a path other than a regular file."""
    why = "it is a folder" if path.is_dir() else "it is a pipe, a device or a socket"
    return PrepError(f"{path} is not a file", why, "name a file, or put one in its place")


def _unsafe_name_error(named_by: AnyPath | str, name: object, why: str) -> PrepError:
    return PrepError(
        f"{named_by} names {name!r:.100}", f"it {why}", "correct the file, or get it again"
    )


# --- Files of an output: opened without following links of another user in its folder


# Journalling file systems commit concurrent syncs together: on ext4, 1,500 files of 64 KiB took 8.1 s one after
# another, 0.3 s in 8 threads and 0.2 s in 32.
SYNC_THREADS = 16

T = TypeVar("T")


def open_no_follow(path: Path, flags: int) -> int:
    """Open a regular file of an output, or create it with `O_CREAT`.

    Args:
        path: The file. Its last component is never followed. `check_no_symlinks` checks the folders above it.
        flags: Flags of `os.open`. `O_TRUNC` takes effect only after the file is checked.

    Returns:
        The file descriptor.

    Raises:
        PrepError: The path is a symbolic link, has a second name (hard link), or is not a regular file.
        OSError: The system refuses to open it.
    """
    # O_NOFOLLOW fails for a link. O_NONBLOCK keeps the open of a FIFO from waiting for its other end.
    # O_TRUNC waits until the open file is known to be the output's own: a hard link would empty the
    # other file of that name.
    safe_flags = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, safe_flags, 0o644)
    except OSError as error:
        # ELOOP on Linux, EMLINK on FreeBSD
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise _unsafe_file_error(path, "is a symbolic link") from error
        # A FIFO without a reader, or a socket.
        if error.errno == errno.ENXIO:
            raise _unsafe_file_error(path, "is not a regular file") from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _unsafe_file_error(path, "is not a regular file")
        if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
            raise _unsafe_file_error(path, "has a second name (hard link)")
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unsafe_file_error(path: Path, why: str) -> PrepError:
    """Return the error for an unsafe path."""
    return PrepError(
        f"{path} cannot be used",
        f"it {why}, and writing to it could change another file",
        "remove it",
    )


def write_no_follow(path: Path, data: bytes) -> None:
    """Write a whole file of an output. Raises the errors of `open_no_follow`."""
    fd = open_no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def read_no_follow(path: Path) -> bytes:
    """Read a whole file of an output. Raises the errors of `open_no_follow`."""
    with open(open_no_follow(path, os.O_RDONLY), "rb") as file:
        return file.read()


def check_not_symlink(path: Path) -> None:
    """Raise PrepError for a symbolic link."""
    if path.is_symlink():
        raise _unsafe_file_error(path, "is a symbolic link")


def check_no_symlinks(folder: Path) -> None:
    """Raise PrepError if the folder, or anything in it, is a symbolic link."""
    check_not_symlink(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            check_not_symlink(Path(parent, name))


def sync_paths(paths: Sequence[Path]) -> None:
    """Make files durable. Raise the first OSError."""
    sync_many(fsync_path, paths)


def sync_many(sync: Callable[[T], object], items: Sequence[T]) -> None:
    """Call a sync function for each item. Raise the first error."""
    # Few files are not worth threads.
    if len(items) <= SYNC_THREADS:
        for item in items:
            sync(item)
        return
    pending = deque(items)

    def sync_pending() -> None:
        while pending:
            try:
                item = pending.popleft()
            except IndexError:  # another thread took the last item
                return
            sync(item)

    errors = run_in_threads(sync_pending, SYNC_THREADS, on_interruption=pending.clear)
    if errors:
        raise errors[0]


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder with its contents, if it exists. The target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_same_file(file_stat: os.stat_result, path: Path) -> bool:
    """Return whether a path leads to the file or folder of the stat result. Raise PrepError if nobody can tell."""
    try:
        return os.path.samestat(file_stat, path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise io_error(path, error) from error
