"""The error type with a message for the user, and the exit codes."""

from __future__ import annotations

from dataclasses import dataclass

OK, FAILED, USAGE, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130


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


def usage_error(what: str, why: str = "", hint: str = "") -> PrepError:
    """Return the error of an invalid request, found before anything was read or written; its exit code is 2."""
    return PrepError(what, why, hint, USAGE)
