"""Errors of processes: any exception as the PrepError for the user, and the process that raised it."""

from __future__ import annotations

import errno
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prepcli.core.errors import FAILED, Option, PrepError, text

BUG = "this is a bug in prep"
OUT_OF_MEMORY = PrepError(
    "the system is out of memory",
    "the limit of the process is too low for the command and for Python",
    text(
        "raise the limit (`ulimit -v`, the job's memory), or pass a smaller {} if the command has it",
        Option("memory"),
    ),
)
TEMPORARY_FOLDER_HINT = "set TMPDIR to a folder on a disk with free space"

# Errors of the machine, not of prep: a full or read-only disk, missing permissions, a broken device, a long name
_SYSTEM_ERRNOS = {
    *(
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.EFBIG,
        errno.ESTALE,
    ),
    *(
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENXIO,
        errno.ENODEV,
        errno.EBUSY,
    ),
}
_HINTS = {
    errno.ENAMETOOLONG: "a shorter name: file systems take at most 255 bytes, and a path has at most 4,095",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the limit of open files (`ulimit -n`)",
}
# Errors for libraries that cannot be mapped, and for threads without room for a stack.
_MEMORY_TEXTS = (
    "failed to map segment from shared object",
    "cannot allocate memory in static TLS block",
    "Cannot allocate memory",
    "can't start new thread",
)


def as_prep_error(error: BaseException) -> PrepError:
    """Return the error in the form that users see. The traceback of an unexpected exception is saved to a file."""
    if isinstance(error, PrepError):
        return error
    if (
        # `tempfile` has tried every folder, and raises an error with a text and without a file name.
        isinstance(error, FileNotFoundError)
        and error.filename is None
        and "temporary directory" in str(error)
    ):
        return PrepError(
            "no temporary folder can be written",
            error.strerror or str(error),
            TEMPORARY_FOLDER_HINT,
        )
    if isinstance(error, OSError) and error.errno in _SYSTEM_ERRNOS:
        return _system_error(error)
    if any(_is_memory_error(cause) for cause in _causes(error)):
        return OUT_OF_MEMORY
    return _bug_error(error)


def _system_error(error: OSError) -> PrepError:
    what = "the system refused to read or write"
    if error.filename is not None:
        what = f"cannot use {error.filename}"
    hint = _HINTS.get(error.errno or 0, "")
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and isinstance(error.filename, str):
        try:
            is_temporary = Path(tempfile.gettempdir()) in Path(error.filename).parents
        except FileNotFoundError:  # the disk of every temporary folder is full
            is_temporary = True
        if is_temporary:
            hint = TEMPORARY_FOLDER_HINT
    return PrepError(what, error.strerror or str(error), hint)


def _is_memory_error(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    return isinstance(error, ImportError | OSError | RuntimeError) and any(
        part in str(error) for part in _MEMORY_TEXTS
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause or context, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        # The order of a traceback: `raise ... from`, or else the error that was being handled.
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context


def _bug_error(error: BaseException) -> PrepError:
    report = "".join(traceback.format_exception(error))
    line = traceback.format_exception_only(error)[-1].strip()
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="prep-traceback-", suffix=".txt", delete=False
        ) as file:
            file.write(report)
    except OSError:  # no folder is writable
        return PrepError(BUG, line, "please report what `PREP_TRACEBACK=1` shows", FAILED)
    return PrepError(BUG, line, f"please report it with {file.name}", FAILED)


@contextmanager
def label_errors(process: int | None) -> Iterator[None]:
    """Record the index of this process in each error raised inside the `with` block. `process_of` returns the index.

    The index is None outside of a job of several processes.
    """
    try:
        yield
    except BaseException as error:
        # The index is an attribute of the error. A wrapping exception would hide its type from outer handlers.
        vars(error)["process"] = process
        raise


def process_of(error: BaseException) -> int | None:
    """Return the index of the process in which an error was raised, or None outside of a job of several processes."""
    return getattr(error, "process", None)
