"""An output in a folder: `NAME.partial` next to its final name, with the state of the conversion in `.prep/`.

A process that joins the conversion, or that gives the output its name, holds the lock `door`. All processes of the
conversion share the lock `lock`. The kernel releases the locks of a killed process.

A session begins when a process joins while no other process is in the conversion. A note is believed only in the
session in which it was written: after a power cut or a damage, notes may say more than the disk holds. The bytes of an
older note are read back, and the note is renewed or its unit is written again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from prepcli.core.errors import RERUN_HINT, Option, OutputExistsError, PrepError, text, usage_error
from prepcli.core.formatting import format_bytes
from prepcli.core.json_values import JsonObject, load_json
from prepcli.execution.output import (
    CHECKSUM_KEY,
    CLAIMS_FOLDER,
    DONE_FOLDER,
    PART_FOLDER,
    RUN_FILE,
    SOURCE_FILE,
    WORK_FOLDER,
    Claim,
    decode_record,
    encode_record,
    other_conversion_error,
)
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.formats.orbax import write_files
from prepcli.stores.files import (
    MAX_NAME_NBYTES,
    check_not_symlink,
    fsync_path,
    io_error,
    is_same_file,
    make_folder,
    open_no_follow,
    read_no_follow,
    remove_path,
    sync_many,
)

LOCK_FILE_FLAGS = os.O_RDWR | os.O_CREAT
# Other processes may remove or rename the folder of a lock meanwhile.
MAX_TRIES = 100


def acquire_lock(path: Path, locked_path: Path) -> int:
    """Return a descriptor with the lock. Closing it releases the lock.

    Raises:
        PrepError: Another process holds the lock. The error names it and `locked_path`.
        OSError: The file system has no locks, or the file cannot be opened.
    """
    # The file is never removed. A second process could otherwise lock a new file of the same name while
    # the first one holds the old file.
    fd = try_lock(path)
    if fd is None:
        why = f"another process works on it: {holder_of(path)}"
        raise PrepError(f"{locked_path} is locked", why, "wait until it ends")
    _write_holder(fd)
    return fd


def join_lock(path: Path) -> tuple[int, bool]:
    """Acquire a lock that any number of processes share. One process at a time may call it.

    Args:
        path: The lock file.

    Returns:
        The descriptor, and whether this process is the first holder.

    Raises:
        OSError: The file system has no locks, or the file cannot be opened.
    """
    # The first process gets the lock exclusively, writes its name, and then shares it. `flock` is not
    # atomic when it converts a lock, so the caller admits one process at a time (the lock `door`).
    fd = try_lock(path)
    if fd is None:
        return lock_file(path, fcntl.LOCK_SH), False
    _write_holder(fd)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd, True


def try_lock(path: Path) -> int | None:
    """Return a descriptor with the lock, or None if another descriptor has it. Closing it releases the lock."""
    try:
        return lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def holder_of(path: Path) -> str:
    """Return the process that first acquired a lock, for messages."""
    # Any program may have written to the file: 200 bytes are enough for the line of `_write_holder`.
    return read_no_follow(path)[:200].decode(errors="replace").strip()


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock.

    Raise OSError, e.g. FileNotFoundError without the file.
    """
    fd = open_no_follow(path, os.O_RDWR)
    try:
        # An exclusive lock also finds the holders of a shared one. `close` releases it.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def lock_file(path: Path, operation: int = fcntl.LOCK_EX) -> int:
    """Wait for the lock of a file, and return a descriptor with it. Closing it releases the lock.

    Args:
        path: The lock file.
        operation: Operation of `flock`.

    Raises:
        BlockingIOError: Another descriptor has the lock, and the operation does not wait.
        OSError: The file system has no locks, or the file cannot be opened.
    """
    # `flock` belongs to the open file, not to the process: the kernel releases it when the last descriptor is
    # closed, however the process ends. File systems of a network may show it to one machine only.
    fd = open_no_follow(path, LOCK_FILE_FLAGS)
    try:
        fcntl.flock(fd, operation)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Wait for the lock and hold it inside the context."""
    fd = lock_file(path)
    try:
        yield
    finally:
        os.close(fd)


def lock_in_folder(
    path: Path, make_folder: Callable[[], object], lock: Callable[[Path], int]
) -> int:
    """Create a folder, and return a descriptor with the lock of a file in it.

    Args:
        path: The lock file.
        make_folder: Creates the folder if necessary.
        lock: Returns a descriptor with the lock.

    Raises:
        PrepError: Other processes remove the folder again and again, or `lock` raises it.
        OSError: The folder cannot be created, or the file system has no locks.
    """
    # A lock on a deleted or renamed file is useless: another process creates a new file and locks that one. The lock
    # counts only if the path still leads to the locked file.
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            make_folder()
            fd = lock(path)
        except FileNotFoundError:
            if not tries_left:
                raise
            continue
        if is_same_file(os.fstat(fd), path):
            return fd
        os.close(fd)
    why = "other processes remove it again and again"
    raise PrepError(f"{path.parent} cannot be locked", why, "end the other processes")


def _write_holder(fd: int) -> None:
    """Write this process's id, host and time into the lock file."""
    # The text is only for error messages. `flock` decides, so a kill between these calls is
    # harmless.
    os.ftruncate(fd, 0)
    start_time = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(
        fd, f"process {os.getpid()} on {socket.gethostname()} since {start_time}\n".encode(), 0
    )


LOCK_FILE = "lock"  # shared by all processes of the conversion
JOIN_LOCK_FILE = "door"
SESSION_FILE = "session"
# Name of the replaced output, until the new one has its name.
REPLACED_NAME = "replaced"
RAW_FOLDER = "raw"  # raw chunks of the units in progress, if chunks are compressed
# State of a conversion without written bytes
RECORDS = {LOCK_FILE, JOIN_LOCK_FILE, SESSION_FILE, RUN_FILE, SOURCE_FILE}
RECORDS |= {DONE_FOLDER, PART_FOLDER, CLAIMS_FOLDER, RAW_FOLDER}

PARTIAL_SUFFIX = ".partial"
MAX_OUT_NAME_NBYTES = MAX_NAME_NBYTES - len(PARTIAL_SUFFIX)


class FolderOutput:
    """An `Output` in a folder.

    Attributes:
        out: Final path of the output.
        folder: `NAME.partial`, next to `out`.
        work: `NAME.partial/.prep`, the folder of the conversion's state.
        session: Identifies the processes that run together.
        source_at_session: State of the source when the session began.
        is_new: Whether this process has begun the conversion.
        is_first_session: Whether no earlier processes have written to the folder.
    """

    def __init__(self, out: Path) -> None:
        """Set the paths, without creating them. Raise UsageError if the output's name is missing or too long."""
        if out.name in ("", ".."):
            raise usage_error(
                text("{} is invalid", Option("out", out)),
                "an output is a folder with a name of its own",
                text("{}", Option("out", "NAME")),
            )
        name_nbytes = len(os.fsencode(out.name))
        if name_nbytes > MAX_OUT_NAME_NBYTES:
            raise usage_error(
                text("{} is too long", Option("out", out)),
                f"its name has {name_nbytes} bytes, and the folder has a longer name until it is complete",
                f"use a name of at most {MAX_OUT_NAME_NBYTES} bytes",
            )
        self.out = out
        self.folder = out.with_name(out.name + PARTIAL_SUFFIX)
        self.work = self.folder / WORK_FOLDER
        self.session = ""
        self.source_at_session: JsonObject = {}
        self.is_new = False
        self.is_first_session = False
        self._lock_fd = -1
        self._folder_stat: os.stat_result | None = None

    @property
    def name(self) -> str:
        """Name of the staging folder."""
        return self.folder.name

    # Joining

    def join(self, identity: Mapping[str, object], source: JsonObject, *, restart: bool) -> None:
        """Create or join the folder. See `Output.join`."""
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.leave)
            try:
                # Another process may publish or remove the folder while this one waits for the lock. It is then
                # created again.
                door = lock_in_folder(self.work / JOIN_LOCK_FILE, self._make_folders, lock_file)
                on_error.callback(os.close, door)
                self._folder_stat = self.folder.stat()
                self._lock_fd, is_first = join_lock(self.work / LOCK_FILE)
                self._enter(identity, source, restart=restart, is_first=is_first)
            except OSError as error:
                raise io_error(self.folder, error) from error
            on_error.pop_all()
            os.close(door)

    def _enter(
        self, identity: Mapping[str, object], source: JsonObject, *, restart: bool, is_first: bool
    ) -> None:
        """Begin or join the conversion. `is_first` says that no other process is in it. The lock `door` is held."""
        if is_first and (restart or self._is_replaceable(identity)):
            self._delete_earlier_conversion()
        earlier = self._read_identity()
        if earlier is not None and earlier != identity:
            if not is_first:
                why = f"another process works on it: {holder_of(self.work / LOCK_FILE)}"
                raise PrepError(f"{self.folder} is locked", why, "wait until it ends")
            raise other_conversion_error(str(self.folder), earlier, identity)
        self.is_new = earlier is None
        if earlier is None:
            self.write(RUN_FILE, encode_record(identity), is_synced=True)
        if self._read_record(SOURCE_FILE) is None:
            self.write(SOURCE_FILE, encode_record(source), is_synced=True)
        for name in (DONE_FOLDER, PART_FOLDER, CLAIMS_FOLDER):
            check_not_symlink(self.work / name)
            (self.work / name).mkdir(exist_ok=True)
        if is_first:
            is_empty = os.listdir(self.folder) == [WORK_FOLDER]
            record = {"id": secrets.token_hex(8), "source": source, "is_first": is_empty}
            self.write(SESSION_FILE, encode_record(record))
        match self._read_record(SESSION_FILE):
            case {"id": str(session), "source": dict(state), "is_first": bool(is_first_session)}:
                self.session = session
                self.source_at_session = state
                self.is_first_session = is_first_session
            case _:
                raise _damaged_error(self.work / SESSION_FILE)

    def _make_folders(self) -> None:
        for folder in (self.folder, self.work):
            check_not_symlink(folder)
        names: list[str] = []
        try:
            # This is a single call, because another process may be creating or publishing the folder.
            names = os.listdir(self.folder)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            if os.path.lexists(self.folder):
                names = [self.folder.name]
        if names and WORK_FOLDER not in names:
            hint = text("{}, or move it away", Option("out", "NAME"))
            raise PrepError(f"{self.folder} exists", "prep did not create it", hint)
        # `publish` syncs only the innermost parent of the output: the others are made durable here.
        make_folder(self.work)

    def _is_replaceable(self, identity: Mapping[str, object]) -> bool:
        """Return whether an earlier conversion is another one without durable bytes.

        A refused source or an early kill leaves a folder without durable bytes.
        """
        earlier = self._read_identity()
        if earlier is None or earlier == identity:
            return False
        # Other names are the state of an earlier version.
        names = {path.name for path in self.work.iterdir() if not path.name.startswith(".")}
        return names <= RECORDS and not any(
            any((self.work / folder).glob("*")) for folder in (DONE_FOLDER, PART_FOLDER)
        )

    def _delete_earlier_conversion(self) -> None:
        """Delete the state and the data files of an earlier conversion."""
        self._restore_replaced()
        # The notes go first, and durably: a kill while the data files are removed must not leave a note that
        # says that their bytes are durable.
        kept_paths = (self.work / LOCK_FILE, self.work / JOIN_LOCK_FILE)
        for path in self.work.iterdir():
            if path not in kept_paths:
                remove_path(path)
        fsync_path(self.work)
        for path in self.folder.iterdir():
            if path != self.work:
                remove_path(path)

    def _restore_replaced(self) -> None:
        """Rename an output back after an interrupted replacement, if its name is free."""
        replaced = self.work / REPLACED_NAME
        if os.path.lexists(replaced) and not os.path.lexists(self.out):
            replaced.rename(self.out)

    def leave(self) -> None:
        """Release the lock of the conversion. This process no longer writes to the folder."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def discard(self) -> None:
        """Leave the conversion, and remove its unneeded folder unless another process is in it.

        A kill leaves a part of the folder, which the next start of the same command joins.
        """
        self.leave()
        door = self.work / JOIN_LOCK_FILE
        with contextlib.suppress(OSError, PrepError), exclusive_lock(door):
            # Another process may have removed the folder, and created a new one.
            folder_stat = self._folder_stat
            is_same_folder = folder_stat is not None and is_same_file(folder_stat, self.folder)
            if not is_same_folder or is_locked(self.work / LOCK_FILE):
                return
            for folder in (self.folder, self.work):
                for path in folder.iterdir():
                    if path not in (self.work, door):
                        remove_path(path)
            # A process that waits for the lock finds another file or none at its path, and tries again.
            door.unlink()
            self.work.rmdir()
            self.folder.rmdir()

    # State

    def read(self, name: str) -> bytes | None:
        """Return the content of a file of the conversion, or None if it does not exist."""
        try:
            return read_no_follow(self.work / name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise io_error(self.work / name, error) from error

    def write(self, name: str, content: bytes, *, is_synced: bool = False) -> None:
        """Write a file of the conversion. A kill leaves the old or the new content.

        With `is_synced`, a power cut also leaves one of them. Notes need no sync: a torn note counts as none.
        """
        path = self.work / name
        temporary = self.work / f".{secrets.token_hex(8)}"
        try:
            fd = open_no_follow(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with open(fd, "wb") as file:
                file.write(content)
                if is_synced:
                    file.flush()
                    os.fsync(fd)
            check_not_symlink(path)
            temporary.rename(path)
        except OSError as error:
            raise io_error(path, error) from error

    def delete(self, names: Iterable[str]) -> None:
        """Delete files of the conversion."""
        for name in names:
            try:
                (self.work / name).unlink(missing_ok=True)
            except OSError as error:
                raise io_error(self.work / name, error) from error

    def units_with(self, folder: str) -> set[int]:
        """Return the numbers of the units with a file in a folder of the conversion."""
        try:
            return {int(name) for name in os.listdir(self.work / folder) if name.isdecimal()}
        except FileNotFoundError:  # published
            return set()
        except OSError as error:
            raise io_error(self.work / folder, error) from error

    def claim(self, name: str) -> Claim | None:
        """Return the lock of a unit, or None if another process has it."""
        try:
            fd = try_lock(self.work / CLAIMS_FOLDER / name)
        except FileNotFoundError:  # published
            return None
        except OSError as error:
            raise io_error(self.work, error) from error
        if fd is None:
            return None
        claim = contextlib.ExitStack()
        claim.callback(os.close, fd)
        return claim

    def _read_identity(self) -> JsonObject | None:
        """Return the identity of the conversion, or None if there is none. Raise PrepError if it is damaged."""
        with contextlib.suppress(ValueError):
            stored = load_json(self.read(RUN_FILE) or b"")
            # Earlier versions wrote no checksum. Their conversion is another one.
            if isinstance(stored, dict) and CHECKSUM_KEY not in stored:
                return {**stored, CHECKSUM_KEY: ""}
        return self._read_record(RUN_FILE)

    def _read_record(self, name: str) -> JsonObject | None:
        """Return the content of a record, or None if it does not exist. Raise PrepError if it is damaged."""
        content = self.read(name)
        try:
            return None if content is None else decode_record(content)
        except ValueError as error:
            raise _damaged_error(self.work / name, str(error)) from error

    def source_at_start(self) -> JsonObject:
        """Return the state of the source when the conversion began."""
        return self._read_record(SOURCE_FILE) or {}

    # Publication

    def put(self, path: str, content: bytes) -> None:
        """Write a file of the output. Nothing is synced."""
        try:
            write_files(self.folder, {path: content})
        except OSError as error:
            raise io_error(Path(error.filename or self.folder), error) from error

    def is_published(self) -> bool:
        """Return whether the folder has its final name.

        Raises:
            PrepError: Another program has removed or replaced the folder. Nobody would ever publish it.
        """
        if self._folder_stat is None:
            return False
        # The folder may get its final name between the first two looks.
        for path in (self.out, self.folder, self.out):
            if is_same_file(self._folder_stat, path):
                return path == self.out
        why = "it was removed or replaced"
        raise PrepError(f"{self.folder} was changed by another program", why, RERUN_HINT)

    def publish(self, *, overwrite: bool = False) -> None:
        """Sync all files and folders bottom-up, then rename the folder to its final name.

        Args:
            overwrite: Replace an existing output.

        Raises:
            PrepError: The name is taken and `overwrite` is not set, or the system refused to write.
        """
        replaced = self.work / REPLACED_NAME
        if os.path.lexists(self.out) and not overwrite:
            raise OutputExistsError(
                f"{self.out} already exists",
                f"it appeared while prep wrote {self.folder}, now complete",
                text("move it away and {}, or pass {}", RERUN_HINT, Option("overwrite", True)),
            )
        # A replaced output moves into the work folder, and is removed after the new one has its
        # name. What a kill leaves:
        #   before the first rename:  OUT (old) and OUT.partial (new, complete)
        #   between the two renames:  OUT.partial only, the old output in OUT.partial/.prep/replaced
        #                             the next start publishes the new one, `--restart` restores the old
        #   after the second rename:  OUT (new) with a work folder, which `remove_leftover` removes
        try:
            # It is left from a conversion killed between the two renames.
            remove_path(replaced)
            # Durable before the rename: the name OUT never leads to files that a power cut could empty.
            self._sync_files()
            with contextlib.ExitStack() as stack:
                # Nobody joins during the rename. A step of a training run is not joined: its run is locked.
                if self._lock_fd >= 0:
                    stack.enter_context(exclusive_lock(self.work / JOIN_LOCK_FILE))
                if os.path.lexists(self.out):
                    self.out.rename(replaced)
                self.folder.rename(self.out)
            fsync_path(self.out.parent)
        except OSError as error:
            self._restore_replaced()
            raise io_error(self.out, error) from error
        self.leave()
        remove_work_folder(self.out)

    def _sync_files(self) -> None:
        """Sync the files, then the entries of each folder, of the output without its work folder."""
        files: list[Path] = []
        folders: list[Path] = []
        for folder, _, names in os.walk(self.folder, topdown=False):
            if self.work in (Path(folder), *Path(folder).parents):
                continue
            files += [Path(folder, name) for name in names]
            folders.append(Path(folder))
        sync_many(fsync_path, files)
        # A folder comes before the folder that contains it.
        for folder in folders:
            fsync_path(folder)


def _damaged_error(path: Path, why: str = "it is not a file that prep wrote") -> PrepError:
    return PrepError(f"{path} is damaged", why, text("{} deletes it", Option("restart", True)))


def check_free_space(folder: Path, needed_nbytes: int) -> None:
    """Raise PrepError if the disk of an incomplete output has no room for more bytes. `folder` need not exist."""
    existing_folder = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free_nbytes = shutil.disk_usage(existing_folder).free
    if needed_nbytes > free_nbytes:
        raise PrepError(
            f"not enough room for {folder.name.removesuffix(PARTIAL_SUFFIX)}",
            f"needs {format_bytes(needed_nbytes)}, its disk has {format_bytes(free_nbytes)} free",
            text("use {} with a path on another disk", Option("out")),
        )


def remove_work_folder(out: Path) -> None:
    """Remove the work folder from a published output. A kill after the rename may leave it there."""
    shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)


def remove_leftover(out: Path) -> None:
    """Remove the work folder of a complete output after a kill, unless a process still uses it."""
    work = out / WORK_FOLDER
    # NAME.partial has a manifest too, shortly before the rename. A resumed conversion needs its work folder.
    is_output = (out / MANIFEST_FILE).is_file() and out.suffix != PARTIAL_SUFFIX
    if is_output and work.is_dir() and not work.is_symlink():
        is_in_use = False
        with contextlib.suppress(OSError):
            is_in_use = is_locked(work / LOCK_FILE)
        if not is_in_use:
            remove_work_folder(out)
