"""Layout of tables. Cells that identify a row are never shortened, however narrow the terminal is.

A pipe gets all columns at full width. A narrow terminal gets fewer columns. Columns with one value become a line below
the table. Then optional columns are omitted, and a line below the table names them. If the table is still too wide, the
first cell of each row gets a separate line above the other cells.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from prepcli.core.formatting import printable, printable_line

Cell = str | int

COLUMN_GAP = 2  # spaces between columns
# Spaces before the cells below the first one of a row.
STACKED_INDENT = 2
MIN_WRAPPED_WIDTH = 24  # least width of a column with wrapped text


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table.

    Attributes:
        name: Its name in the header.
        cells: The text of each row.
        is_right_aligned: Whether the cells end at the same position.
        is_wrapped: Whether its text may have several lines.
    """

    name: str
    cells: Sequence[str]
    is_right_aligned: bool = False
    is_wrapped: bool = False

    @property
    def width(self) -> int:
        """Characters of the widest cell, with the name."""
        return max(map(len, [self.name, *self.cells]))

    @property
    def min_width(self) -> int:
        """Characters that the column needs at least. Only a wrapped column can be narrower than its cells."""
        if not self.is_wrapped:
            return self.width
        return min(self.width, MIN_WRAPPED_WIDTH)

    @property
    def is_constant(self) -> bool:
        """Whether there are several rows, and all have the same text in this column."""
        return len(self.cells) > 1 and len(set(self.cells)) == 1


def format_table(
    rows: Sequence[Sequence[Cell]],
    header: Sequence[str],
    right_aligned: Collection[str] = (),
    width: int | None = None,
    *,
    optional: Sequence[str] = (),
    wrapped: Collection[str] = (),
) -> str:
    """Format rows as columns, two spaces apart.

    Integers get thousands separators and are right-aligned.

    Args:
        rows: The cells of each row. The first one identifies it.
        header: Name of each column.
        right_aligned: Names of further right-aligned columns.
        width: Width of the terminal, or None for full width. No cell is shortened: see
            `layout_table`.
        optional: Names of the columns to omit in a narrow terminal, the least important first.
        wrapped: Names of the columns with text that may have several lines.

    Returns:
        Lines of the table, the header first.
    """
    columns: list[Column] = []
    for index, name in enumerate(header):
        values = [row[index] for row in rows]
        cells: list[str] = []
        num_integers = 0
        for value in values:
            if isinstance(value, int):
                num_integers += 1
                cells.append(f"{value:,}")
            elif name in wrapped:
                cells.append(printable(value))
            else:
                cells.append(printable_line(value))
        is_right_aligned = name in right_aligned or 0 < num_integers == len(values)
        columns.append(Column(name, cells, is_right_aligned, is_wrapped=name in wrapped))
    return layout_table(columns, width=width, optional=optional)


class Paragraph(str):
    """Text of one line or more, which a terminal wraps at its width. Other texts keep their lines."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table for terminals and pages. See `format_table` for its fields."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right_aligned: Collection[str] = ()
    optional: Sequence[str] = ()
    wrapped: Collection[str] = ()

    def text(self, width: int | None = None) -> str:
        """Return the lines of the table."""
        return format_table(
            self.rows,
            self.header,
            self.right_aligned,
            width,
            optional=self.optional,
            wrapped=self.wrapped,
        )


# A part of a result: lines of text, a paragraph or a table.
Block = str | Table


def format_blocks(blocks: Iterable[Block], width: int | None = None) -> str:
    """Return blocks as text, each from a new line, for a terminal of a width.

    >>> print(format_blocks([Table(["a", "b"], [["x", 1000]]), "", Paragraph("one two three")], 8))
    a      b
    x  1,000
    <BLANKLINE>
    one two
    three
    """
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, Table):
            texts.append(block.text(width))
        elif isinstance(block, Paragraph):
            texts.append(wrap_line(block, width))
        else:
            texts.append(block)
    return "\n".join(texts)


def layout_table(
    columns: Sequence[Column], *, width: int | None, optional: Sequence[str] = ()
) -> str:
    """Lay out columns, two spaces apart, and return the lines of the table.

    The first column identifies a row. `optional` has the names of the columns to omit if the width is too small, the
    least important first. Without a width no column is omitted.
    """
    if width is None or _min_width(columns) <= width:
        return "\n".join(chain(*_row_lines(columns, width)))
    constant = [column for column in columns[1:] if column.is_constant and not column.is_wrapped]
    varying = [column for column in columns if column not in constant]
    shown = _drop_optional_columns(varying, optional, width)
    if _min_width(shown) <= width:
        lines = [*chain(*_row_lines(shown, width))]
    else:
        below = _drop_optional_columns(varying[1:], optional, width - STACKED_INDENT)
        shown = [varying[0], *below]
        lines = _stack_blocks(varying[0], _row_lines(below, width - STACKED_INDENT))
    left_out = [column.name for column in varying if column not in shown]
    return "\n".join([*lines, *_note_lines(constant, left_out, width)])


def wrap_line(text: str, width: int | None) -> str:
    """Break a long line between words. Without a width the line stays as it is."""
    if width is None:
        return text
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _min_width(columns: Sequence[Column]) -> int:
    return sum(column.min_width for column in columns) + COLUMN_GAP * (len(columns) - 1)


def _drop_optional_columns(
    columns: Sequence[Column], optional: Sequence[str], width: int
) -> list[Column]:
    """Omit optional columns until the rest fits, and return the rest."""
    shown = [*columns]
    for name in optional:
        if _min_width(shown) <= width:
            break
        shown = [column for column in shown if column.name != name]
    return shown


def _row_lines(columns: Sequence[Column], width: int | None) -> list[list[str]]:
    """Return the lines of the header and of each row, with the cells side by side."""
    widths = [column.width for column in columns]
    if width is not None:
        rest = max(0, width - _min_width(columns))
        widths = [min(column.width, column.min_width + rest) for column in columns]
    header = [column.name for column in columns]
    blocks = [_join_cells(columns, header, widths)]
    for row in zip(*(column.cells for column in columns), strict=True):
        blocks.append(_join_cells(columns, row, widths))
    return blocks


def _join_cells(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the lines of one row."""
    blocks: list[list[str]] = []
    for column, cell, width in zip(columns, row, widths, strict=True):
        # `wrap` would join the spaces within a cell, so that a cell that fits is left as it is.
        lines = textwrap.wrap(cell, width) if len(cell) > width else [cell]
        align = str.rjust if column.is_right_aligned else str.ljust
        blocks.append([align(line, width) for line in lines])
    height = max(map(len, blocks), default=1)
    for block, width in zip(blocks, widths, strict=True):
        block += [" " * width] * (height - len(block))
    return [(" " * COLUMN_GAP).join(cells).rstrip() for cells in zip(*blocks, strict=True)] or [""]


def _stack_blocks(first: Column, blocks: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of rows with the first cell above the other cells."""
    lines: list[str] = []
    for head, block in zip([first.name, *first.cells], blocks, strict=True):
        lines.append(head)
        lines += [" " * STACKED_INDENT + line for line in block if line]
    return lines


def _note_lines(constant: Sequence[Column], left_out: Sequence[str], width: int) -> list[str]:
    """Return the lines below a table: the columns with one value, and the omitted columns."""
    notes: list[str] = []
    if constant:
        values = [f"{column.name} {column.cells[0]}".rstrip() for column in constant]
        notes.append(f"each row above: {', '.join(values)}")
    if left_out:
        notes.append(f"no room for: {', '.join(left_out)}; `| cat` shows all columns")
    return [wrap_line(note, width) for note in notes]
