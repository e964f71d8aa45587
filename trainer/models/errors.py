"""The one error type that reaches a user, and the exit codes."""

from __future__ import annotations

from dataclasses import dataclass

OK, FAILED, USAGE, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130


@dataclass(eq=False)  # eq=True would make it unhashable, and tracebacks hash their exceptions
class PrepError(Exception):
    """What is wrong, why it is (both numbers where two disagree), and a hint: a command or an edit."""

    what: str
    why: str = ""
    hint: str = ""
    code: int = FAILED

    def __str__(self) -> str:
        return " - ".join(part for part in (self.what, self.why, self.hint) if part)


def usage_error(what: str, why: str = "", hint: str = "") -> PrepError:
    """A PrepError for a request that makes no sense: nothing was read or written; exit code 2."""
    return PrepError(what, why, hint, USAGE)
