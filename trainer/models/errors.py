"""The errors with a message for the user, and the exit codes."""

from __future__ import annotations

from dataclasses import dataclass

OK, FAILED, USAGE, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130

GET_AGAIN_HINT = "get or create the checkpoint again"
INVALID_CONFIG = "config.json is invalid"  # a value in it is
RERUN_HINT = "run the same command again"
RESUME_HINT = f"{RERUN_HINT} to resume"


@dataclass(eq=False)  # eq=True would make it unhashable, and tracebacks hash their exceptions
class PrepError(Exception):
    """An error with a message for the user.

    Attributes:
        what: What failed.
        why: The cause, with the value that caused it (both values if two disagree).
        hint: The command or key that fixes it.
        code: Exit code of the process.
    """

    what: str
    why: str = ""
    hint: str = ""
    code: int = FAILED

    def __str__(self) -> str:
        return " - ".join(part for part in (self.what, self.why, self.hint) if part)


class UsageError(PrepError):
    """An invalid request, found before anything was read or written. Its exit code is 2."""


class DamagedError(PrepError):
    """A checkpoint's files are damaged: get or create them again.

    Bytes differ from their recorded digest or checksum, a file is missing or cut short, or a header, an index, a
    manifest or other metadata is malformed.
    """


class OutputExistsError(PrepError):
    """The output exists and is not the result of this request."""


def usage_error(what: str, why: str = "", hint: str = "") -> UsageError:
    """Return the error of an invalid request, with its exit code."""
    return UsageError(what, why, hint, USAGE)


def invalid_config_error(why: str) -> PrepError:
    """Return the error of a value in a config.json."""
    return PrepError(INVALID_CONFIG, why)
