"""The one place that prints: results on stdout; notes, warnings, errors and progress on stderr.

With `--json` stdout carries exactly one object, also on failure. A Ui is made once a command and handed along.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TextIO, cast
from unicodedata import category

from prepcli.console.progress import Mode, NullProgress, Progress, make_progress
from prepcli.console.stdio import LossyStream, write_and_flush
from prepcli.errors import FAILED, OK, PrepError

UNESCAPED = "\n\t\u200c\u200d"  # line, tab, and what joins letters or keeps them apart
QUIET, NORMAL, LEAVES, SLABS = -1, 0, 1, 2  # -q, nothing, -v: a line a leaf, -vv: a line a slab

_UNUSUAL = re.compile(r"[^ -~\n\t]")  # what has to be looked at: megabytes of the rest take no time

Cell = str | int
COLUMN_GAP, MIN_CELL_WIDTH = 2, 12  # between columns of a table; what a column of text keeps on a narrow terminal

# What the machine refuses, not prep: a full or read-only disk, missing rights, a broken device
_SYSTEM_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


@dataclass(frozen=True, slots=True)
class Report:
    """What a command found or made.

    `text` goes to stdout, `fields` into the JSON object, `next_command` is shown as what to do next. A report may carry
    an error besides its result, as `verify` does: then both are shown and the error's code is the exit code.
    """

    text: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)
    next_command: str = ""
    error: PrepError | None = None


@dataclass(frozen=True, slots=True)
class Ui:
    """How one run of a command talks: to which streams, how much, in which form."""

    command: str
    as_json: bool = False
    level: int = NORMAL
    progress_mode: Mode = "auto"
    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: cast(TextIO, LossyStream(sys.stderr)))
    clock: Callable[[], float] = time.monotonic
    started_s: float = field(default_factory=time.monotonic)
    warnings: list[str] = field(default_factory=list)  # kept for the JSON object

    def note(self, text: str, level: int = NORMAL) -> None:
        """A line on stderr for those who want this much."""
        if self.level >= level:
            self._print_stderr(printable(text))

    def warn(self, text: str) -> None:
        """Something that went another way than asked, but on; part of the JSON object too."""
        self.warnings.append(text)
        if self.level >= NORMAL:
            self._print_stderr(f"{self._colored('warning:', 33)} {printable(text)}")

    @property
    def columns(self) -> int | None:
        """The width of the terminal that results go to; None for a pipe or a file, whose tables are never cut."""
        return shutil.get_terminal_size().columns if self.out.isatty() else None

    def progress(self) -> Progress:
        """The Progress that the user chose; none by default where the user wants quiet."""
        if self.level <= QUIET and self.progress_mode == "auto":
            return NullProgress()
        return make_progress(self.progress_mode, self.err)

    def finish(self, report: Report) -> int:
        """Show the result, and the error if there is one; returns the exit code."""
        if report.next_command:
            self.note(f"next: {report.next_command}")
        text = json.dumps(self._document(report), allow_nan=False) if self.as_json else printable(report.text)
        unwritten = write_and_flush(self.out, f"{text}\n") if text else None
        error = report.error or (unwritten and stdout_error(unwritten))
        if error is not None:
            self._print_stderr(self._error_text(error))
        return error.code if error is not None else OK

    def fail(self, error: BaseException) -> int:
        """Show why nothing came of it; returns the exit code. What is not a PrepError is a bug in prep and says so."""
        if os.environ.get("PREP_TRACEBACK"):
            self._print_stderr("".join(traceback.format_exception(error)).rstrip())
        return self.finish(Report(error=as_prep_error(error)))

    def _document(self, report: Report) -> dict[str, object]:
        """The JSON object: the fields that every command has, around the command's own."""
        common = {"prep": version(), "command": self.command, "ok": report.error is None}
        document = {**common, "seconds": round(self.clock() - self.started_s, 3), **report.fields}
        document["warnings"] = list(self.warnings)
        if report.next_command:
            document["next"] = report.next_command
        if report.error is not None:
            what, why, hint, code = report.error.what, report.error.why, report.error.hint, report.error.code
            document["error"] = {"what": what, "why": why, "hint": hint, "code": code}
        return document

    def _error_text(self, error: PrepError) -> str:
        lines = [f"{self._colored('error:', 31)} {printable(error.what)}"]
        lines += [f"  why: {_indent(printable(error.why))}"] if error.why else []
        lines += [f" hint: {printable(error.hint)}"] if error.hint else []
        return "\n".join(lines)

    def _print_stderr(self, text: str) -> None:
        print(text, file=self.err, flush=True)

    def _colored(self, word: str, colour: int) -> str:
        return f"\x1b[1;{colour}m{word}\x1b[0m" if _supports_color(self.err) else word


def open_ui(command: str, as_json: bool, quiet: bool, verbose: int, progress: Mode = "auto") -> Ui:
    """The Ui of a command from its shared options; -q wins over -v."""
    return Ui(command, as_json, QUIET if quiet else min(verbose, SLABS), progress)


def version() -> str:
    """The installed version of prep."""
    return metadata.version("prepcli")


def stdout_error(error: OSError) -> PrepError:
    """The error of a result that stdout did not take."""
    return PrepError("cannot write the result to stdout", error.strerror or str(error))


def as_prep_error(error: BaseException) -> PrepError:
    """The error as it is told to users; the traceback of one that prep did not foresee is saved to a file."""
    if isinstance(error, PrepError):
        return error
    if isinstance(error, OSError) and error.errno in _SYSTEM_ERRNOS:
        what = f"cannot use {error.filename}" if error.filename is not None else "the system refused to read or write"
        return PrepError(what, error.strerror or str(error))
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        why = "it holds the process to less than `--memory`, and what Python takes besides"
        return PrepError("the system has no memory left for this", why, "a smaller `--memory`, or a larger limit")
    text = "".join(traceback.format_exception(error))
    line = traceback.format_exception_only(error)[-1].strip()
    try:
        with tempfile.NamedTemporaryFile("w", prefix="prep-traceback-", suffix=".txt", delete=False) as file:
            file.write(text)
    except OSError:  # no folder for it
        return PrepError("this is a bug in prep", line, "please report what `PREP_TRACEBACK=1` shows", FAILED)
    return PrepError("this is a bug in prep", line, f"please report it with {file.name}", FAILED)


def format_table(
    rows: Sequence[Sequence[Cell]], header: Sequence[str], right_aligned: Collection[str] = (), width: int | None = None
) -> str:
    """Plain columns, two spaces apart; integers get commas and stand right, as do the columns named in `right`.

    Where the lines would be longer than `width`, the texts of the widest columns are shortened in the middle.
    """
    shown = [[f"{cell:,}" if isinstance(cell, int) else printable(cell) for cell in row] for row in rows]
    to_the_right = [
        name in right_aligned or (bool(rows) and all(isinstance(row[index], int) for row in rows))
        for index, name in enumerate(header)
    ]
    widths = [max(len(cell) for cell in column) for column in zip(header, *shown, strict=True)]
    if width is not None:
        widths = _fit_widths(widths, [not is_right for is_right in to_the_right], width)
    lines = [
        "  ".join(
            cell.rjust(width) if is_right else shorten(cell, width).ljust(width)
            for cell, width, is_right in zip(row, widths, to_the_right, strict=True)
        ).rstrip()
        for row in [list(header), *shown]
    ]
    return "\n".join(lines)


def _indent(text: str) -> str:
    """The lines of a reason below one another, beside its label."""
    return text.replace("\n", "\n       ")


def _fit_widths(widths: Sequence[int], may_shrink: Sequence[bool], total: int) -> list[int]:
    """Widths of columns that fit a line of `total`, as far as those of text can shrink to LEAST_CELL."""
    fitted = list(widths)
    while sum(fitted) + COLUMN_GAP * (len(fitted) - 1) > total:
        room = {i: width for i, width in enumerate(fitted) if may_shrink[i] and width > MIN_CELL_WIDTH}
        if not room:
            break
        fitted[max(room, key=lambda i: room[i])] -= 1
    return fitted


def shorten(text: str, width: int) -> str:
    """The text, its middle left out where it is longer than `width`: the ends of names tell them apart."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def printable(text: str) -> str:
    """The text with control characters spelled out: names come from strangers' files and must not steer a terminal.
    Spaces of other scripts, and what joins their letters, steer nothing."""
    return _UNUSUAL.sub(lambda found: _escape_char(found[0]), text)


def _escape_char(char: str) -> str:
    return char if char.isprintable() or char in UNESCAPED or category(char) == "Zs" else ascii(char)[1:-1]


def _supports_color(stream: TextIO) -> bool:
    """NO_COLOR wins, then FORCE_COLOR, then whether this is a terminal that knows colours."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
