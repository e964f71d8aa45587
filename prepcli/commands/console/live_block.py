"""Lines at the end of a terminal, redrawn in place below the text printed meanwhile."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO, cast

from prepcli.core.escaping import printable_line
from prepcli.core.observer import Line

if TYPE_CHECKING:
    from rich.text import Text


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
