"""Console output. Results go to stdout. Notes, warnings, errors and progress go to stderr. No other module prints.

With `--json` stdout carries exactly one object, also on failure. A command creates one Ui and passes it on.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TextIO, cast

from prepcli.commands.console.progress_displays import Mode, can_redraw, make_progress
from prepcli.commands.console.stdio import LossyStream, write_and_flush, write_exact_and_flush
from prepcli.core import version
from prepcli.core.errors import INTERRUPTED, OK, STOPPED, PrepError
from prepcli.core.formatting import (
    MARK_END,
    MARK_START,
    bounded_error,
    bounded_lines,
    printable,
    printable_line,
)
from prepcli.core.json_values import json_value
from prepcli.core.observer import LIBRARIES, NORMAL, QUIET, Line, NullProgress, Progress
from prepcli.core.tables import Block, format_blocks
from prepcli.core.unexpected import as_prep_error, process_of

if TYPE_CHECKING:
    from rich.text import Text

# Control sequence of terminals (DECTCEM). rich hides the cursor while a live block is open.
SHOW_CURSOR = "\x1b[?25h"
# Control sequences of a marked part: bold and green, and the end of both.
MARKED = "\x1b[1;32m"
PLAIN = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a command.

    A report may have an error in addition to its result, as `verify` does: both are shown, and the error's code is
    the exit code.

    Attributes:
        content: Text for stdout, or its blocks.
        fields: Fields of the JSON object.
        next_command: Suggested next command.
        error: The error, if there is one.
        process: Index of this process in a job of several, or None. Process 0 prints the result.
        is_script: Whether the content is run by another program, which needs its exact bytes.
        has_marks: Whether the content has marked parts (`escaping.marked`). A terminal shows them in color.
    """

    content: str | Sequence[Block] = ""
    fields: Mapping[str, object] = field(default_factory=dict)
    next_command: str = ""
    error: PrepError | None = None
    process: int | None = None
    is_script: bool = False
    has_marks: bool = False

    @property
    def blocks(self) -> Sequence[Block]:
        """The content as blocks."""
        return [self.content] if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """The content as text for a file or a pipe."""
        return format_blocks(self.blocks)


class LiveBlock:
    """Lines redrawn in place. The last ones stay on the screen.

    Attributes:
        stream: Stream for text to print above the lines. Threads write whole lines.
        is_open: Whether the lines are redrawn. Later text is printed below them.
    """

    def __init__(self, stream: TextIO) -> None:
        """Start without lines on a terminal."""
        from rich.console import Console
        from rich.live import Live

        self._terminal = stream
        self._console = Console(file=stream, force_terminal=True)
        self._live = Live(
            console=self._console,
            # `draw` redraws the lines, so rich needs no thread that refreshes them. The Ui prints messages to
            # `stream`, so rich must not redirect the standard streams: stdout is for the result only.
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._text_above = _TextAbove(self, stream)
        self.stream = cast(TextIO, self._text_above)
        self._live.start()
        self.is_open = True

    @property
    def width(self) -> int:
        """Columns of the terminal, which may change."""
        self._measure_terminal()
        return self._console.width

    def draw(self, lines: Sequence[Line]) -> None:
        """Replace the lines. Parts beyond the edge of the terminal are cut."""
        from rich.console import Group

        self._measure_terminal()
        self._live.update(Group(*map(_as_text, lines)), refresh=True)

    def _measure_terminal(self) -> None:
        """Set rich's width and height to the terminal of this stream. By itself, rich measures the standard streams."""
        from rich.console import ConsoleDimensions

        with contextlib.suppress(OSError, ValueError):  # not a terminal
            columns, lines = os.get_terminal_size(self._terminal.fileno())
            # Terminals of some containers and serial lines have no size.
            if columns and lines:
                self._console.size = ConsoleDimensions(columns, lines)

    def print_above(self, text: str) -> None:
        """Print whole lines above the block, with their colours."""
        from rich.text import Text

        # The terminal breaks long lines, not rich: a copied path then has no line break.
        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def close(self) -> None:
        """Leave the last lines on the screen, and the cursor below them."""
        # In this order: the unfinished line is printed while the block can move below it. Once
        # `is_open` is false, other threads print to the terminal itself.
        self._text_above.end_line()
        self.is_open = False
        self._live.stop()


def _as_text(line: Line) -> Text:
    from rich.text import Text

    segments = [(printable_line(text), style) for text, style in line]
    return Text.assemble(*segments, no_wrap=True, overflow="crop")


class _TextAbove(io.TextIOBase):
    """Stream that prints its lines above a block."""

    def __init__(self, block: LiveBlock, terminal: TextIO) -> None:
        self._block = block
        self._terminal = terminal
        self._unfinished = ""

    def write(self, text: str) -> int:
        """Print the complete lines."""
        # The last part has no line break yet. It waits for the rest of its line.
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        if lines:
            self._block.print_above("\n".join(lines))
        return len(text)

    def end_line(self) -> None:
        """End and print the incomplete line, if there is one."""
        if self._unfinished:
            self.write("\n")

    def isatty(self) -> bool:
        """Return whether the block is on a terminal."""
        return self._terminal.isatty()


@dataclass(frozen=True, slots=True)
class Ui:
    """Output of one run of a command: its streams, verbosity and format.

    In a job of several processes, process 0 prints notes, progress and the result. All print warnings and errors.
    """

    command: str
    as_json: bool = False
    level: int = NORMAL
    progress_mode: Mode = "auto"
    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: cast(TextIO, LossyStream(sys.stderr)))
    clock: Callable[[], float] = time.monotonic
    started_s: float = field(default_factory=time.monotonic)
    warnings: list[str] = field(default_factory=list)  # for the JSON object
    process: int | None = None  # index of this process in a job of several
    all_print: bool = False  # all processes print notes
    # Shared by all Uis of the command. One block is open at a time.
    live_blocks: list[LiveBlock] = field(default_factory=list)
    # Pieces of the result that `stream_line` printed: the result is not printed twice.
    streamed: list[str] = field(default_factory=list)

    def for_process(self, process: int | None, *, all_print: bool = False) -> Ui:
        """Return the Ui of a process in a job.

        Args:
            process: Index of this process, or None outside of a job of several processes.
            all_print: Print the notes of all processes, each line with the index of its process.
        """
        return replace(self, process=process, all_print=all_print)

    def note(self, text: str, level: int = NORMAL) -> None:
        """Print a line on stderr if the verbosity is at least `level`."""
        if self.level >= level and (self.all_print or not self.process):
            label = self._label if self.all_print else ""
            self._print_stderr(f"{label}{printable(text)}")

    def warn(self, text: str) -> None:
        """Print a warning on stderr and add it to the JSON object."""
        text = bounded_lines(text)
        self.warnings.append(text)
        if self.level >= NORMAL:
            self._print_stderr(f"{self._colored('warning:', 33)} {self._label}{printable(text)}")

    @property
    def _label(self) -> str:
        """The process that prints a line."""
        return "" if self.process is None else f"process {self.process}: "

    @property
    def columns(self) -> int | None:
        """Width of the terminal on stdout, or None for a pipe or a file, where tables are never shortened."""
        if not self.out.isatty():
            return None
        return shutil.get_terminal_size().columns

    def open_live_block(self) -> LiveBlock | None:
        """Return lines redrawn in place, or None if the output is for a log, or of all processes.

        Until they are closed, messages of every Ui of the command are printed above them, from any thread.
        """
        if not self._can_have_live_block():
            return None
        block = LiveBlock(self.err)
        self.live_blocks.append(block)
        return block

    def leave_live_block(self) -> None:
        """Show the cursor, below a live block of another thread, before the process ends without closing the block."""
        for block in self.live_blocks:
            block.is_open = False
        if self._can_have_live_block():
            self._print_stderr(SHOW_CURSOR)

    def _can_have_live_block(self) -> bool:
        if self.process or self.all_print or self.level <= QUIET:
            return False
        # Bars and sparklines are not ASCII.
        has_blocks = (self.err.encoding or "").lower().startswith("utf")
        is_live = self.progress_mode == "bar" or (
            self.progress_mode == "auto" and can_redraw(self.err)
        )
        return is_live and has_blocks

    def progress(self) -> Progress:
        """Return the Progress of the chosen mode. `--quiet` silences the mode `auto`."""
        if self.process or (self.level <= QUIET and self.progress_mode == "auto"):
            return NullProgress()
        return make_progress(self.progress_mode, self.err)

    @property
    def can_stream(self) -> bool:
        """Whether a result may be printed in pieces: as text on a terminal, outside of a job of several processes."""
        return not self.as_json and self.process is None and self.out.isatty()

    @contextmanager
    def stream_line(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that prints the next piece of a result at once, and end the line after the last piece.

        The line ends also if the `with` block is interrupted.

        Raises:
            PrepError: Text cannot be written to stdout.
        """

        def write(piece: str) -> None:
            self.streamed.append(piece)
            if (unwritten := write_and_flush(self.out, printable(piece))) is not None:
                raise stdout_error(unwritten)

        try:
            yield write
        finally:
            write_and_flush(self.out, "\n")

    def finish(self, report: Report) -> int:
        """Print the result and any error, and return the exit code.

        In a job of several processes, only process 0 prints the result and the error of a stop, which ends all of them.
        """
        if report.process != self.process:
            return self.for_process(report.process, all_print=self.all_print).finish(report)
        if report.error is not None:
            report = replace(report, error=bounded_error(report.error))
        if report.next_command:
            self.note(f"next: {report.next_command}")
        if self.as_json:
            # `NaN` is not JSON. An exception here is better than an object that other programs cannot read.
            document = self._json_document(report)
            text = json.dumps(document, allow_nan=False, default=json_value)
        else:
            text = format_blocks(report.blocks, self.columns)
            text = "" if "".join(self.streamed) == text else printable(text)
            if report.has_marks and _supports_color(self.out):
                text = text.replace(MARK_START, MARKED).replace(MARK_END, PLAIN)
        is_exact = report.is_script and not self.as_json and not self.out.isatty()
        unwritten = None
        if is_exact:
            unwritten = write_exact_and_flush(self.out, f"{report.text}\n")
        elif text and not self.process:
            unwritten = write_and_flush(self.out, f"{text}\n")
        # A full disk behind `prep ... > file` must not look like success.
        error = report.error or (unwritten and stdout_error(unwritten))
        if error is not None and not (self.process and error.code in (STOPPED, INTERRUPTED)):
            self._print_stderr(self._error_text(error))
        return OK if error is None else error.code

    def show_final_error(self, error: PrepError) -> int:
        """Print the error that ends this process at once, and return the exit code.

        It is called by a thread, while the main thread may be inside a live block.
        """
        self.leave_live_block()
        return self.finish(Report(error=error))

    def fail(self, error: BaseException) -> int:
        """Print an error and return the exit code. Any exception other than PrepError is reported as a bug."""
        if os.environ.get("PREP_TRACEBACK"):
            self._print_stderr("".join(traceback.format_exception(error)).rstrip())
        return self.finish(Report(error=as_prep_error(error), process=process_of(error)))

    def _json_document(self, report: Report) -> dict[str, object]:
        """Return the JSON object: the common fields and the report's fields."""
        common = {"prep": version(), "command": self.command, "ok": report.error is None}
        document = {**common, "seconds": round(self.clock() - self.started_s, 3), **report.fields}
        document["warnings"] = list(self.warnings)
        if report.next_command:
            document["next"] = report.next_command
        if report.error is not None:
            document["error"] = report.error.fields()
        return document

    def _error_text(self, error: PrepError) -> str:
        lines = [f"{self._colored('error:', 31)} {self._label}{printable(error.what)}"]
        if error.why:
            lines.append(f"  why: {_indent(printable(error.why))}")
        if error.hint:
            lines.append(f" hint: {printable(error.hint)}")
        return "\n".join(lines)

    def _print_stderr(self, text: str) -> None:
        stream = next((block.stream for block in self.live_blocks if block.is_open), self.err)
        # In one piece, since other threads print too.
        print(f"{text}\n", end="", file=stream, flush=True)

    def _colored(self, word: str, colour: int) -> str:
        if not _supports_color(self.err):
            return word
        # Bold, and the color: 31 is red, 33 yellow.
        return f"\x1b[1;{colour}m{word}\x1b[0m"


def open_ui(command: str, as_json: bool, quiet: bool, verbose: int, progress: Mode = "auto") -> Ui:
    """Return the Ui for the shared options. `-q` takes precedence over `-v`."""
    level = QUIET if quiet else min(verbose, LIBRARIES)
    err = cast(TextIO, LossyStream(sys.stderr))
    return Ui(command, as_json, level, progress, out=sys.stdout, err=err)


def stdout_error(error: OSError) -> PrepError:
    """Return the error for a result that could not be written to stdout."""
    hint = "check the program or the disk that receives it"
    return PrepError("cannot write the result to stdout", error.strerror or str(error), hint)


def _indent(text: str) -> str:
    """Indent the lines of a reason after the first one to the width of its label."""
    return text.replace("\n", "\n       ")


def _supports_color(stream: TextIO) -> bool:
    """Return whether to use colors: NO_COLOR, then FORCE_COLOR, then whether the stream is a capable terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
