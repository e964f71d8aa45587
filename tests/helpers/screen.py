"""The screen of a terminal after the bytes that a program wrote to it: as much of ECMA-48 as rich's Live uses."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


class Screen:
    """Lines of a terminal that does not wrap; all lines that were ever printed are kept.

    Attributes:
        lines: The lines.
    """

    def __init__(self) -> None:
        self.lines: list[str] = [""]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        """Apply text with control sequences; raise ValueError for an unknown one."""
        position = 0
        while position < len(text):
            match = _PART.match(text, position)
            if match is None:
                raise ValueError(f"unknown sequence {text[position : position + 12]!r}")
            position = match.end()
            self._apply(match)

    def _apply(self, match: re.Match[str]) -> None:
        """Apply one piece of output: text, a line end or a command of the terminal."""
        argument, command, is_return, is_newline, printed = match.groups()
        if printed:
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = (
                line[: self._column] + printed + line[self._column + len(printed) :]
            )
            self._column += len(printed)
        elif is_return:
            self._column = 0
        elif is_newline:
            self._row, self._column = self._row + 1, 0
            self.lines += [""] * (self._row + 1 - len(self.lines))
        elif command == "A":
            self._row -= int(argument or 1)
        elif command == "K" and argument == "2":
            self.lines[self._row] = ""
        # These commands set colours and the visibility of the cursor.
        elif command not in ("m", "h", "l"):
            raise ValueError(f"unknown sequence {match[0]!r}")

    def text(self) -> str:
        """Return the lines without trailing spaces."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")
