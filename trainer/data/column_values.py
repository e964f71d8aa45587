"""Checked values of a record's columns; errors name the file, the line and the column."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.json_types import json_type_name
from trainer.data.readers.reader import Record
from trainer.models.errors import PrepError

LINE_HINT = "fix or remove the line"


def check_columns(record: Record, columns: Sequence[str], *, hint: str) -> None:
    """Raise PrepError if a record lacks a column.

    Args:
        record: The record.
        columns: Columns that it needs.
        hint: How to name other columns.
    """
    if missing := [column for column in columns if column not in record.values]:
        names = ", ".join(f"`{name}`" for name in record.values) or "none"
        raise PrepError(f"{record.place}: no column `{missing[0]}`", f"its columns: {names}", hint)


def text_value(record: Record, column: str) -> str:
    """Return the text of a column; raise PrepError if it is not text."""
    value, what = record.values[column], f"{record.place}: column `{column}` is not text"
    if not isinstance(value, str):
        raise PrepError(what, f"it is {json_type_name(value)}", LINE_HINT)
    if not _is_encodable(value):
        raise PrepError(what, "it has an unpaired surrogate, which is not a character", LINE_HINT)
    return value


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
