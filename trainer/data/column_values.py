"""Checked values of a record's columns; errors name the file, the line and the column."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trainer.data.examples import TokenIds
from trainer.data.json_types import json_type_name
from trainer.data.readers.reader import Record
from trainer.models.errors import PrepError

LINE_HINT = "fix or remove the line"
IDS_HINT = "a list of token ids, or base64 of little-endian int32 values"


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


def ids_value(record: Record, column: str, vocab: int) -> TokenIds:
    """Return the token ids of a column: a list, or base64 of little-endian int32 values.

    Args:
        record: The record.
        column: The column.
        vocab: Size of the model's vocabulary without padding.

    Raises:
        PrepError: The value is not a list of ids, or one is out of range.
    """
    value, place = record.values[column], f"{record.place}: column `{column}`"
    try:
        ids = _decode_ids(value) if isinstance(value, str) else np.asarray(value)
    except ValueError as error:  # not base64, or a list with lists of several lengths
        raise PrepError(f"{place} has no token ids", str(error), IDS_HINT) from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise PrepError(f"{place} has no token ids", f"it is {_ids_type_name(value)}", IDS_HINT)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        why = f"the vocabulary without padding has {vocab:,} tokens"
        raise PrepError(f"{place} has the token id {bad:,}", why, LINE_HINT)
    return ids.astype(np.uint32)


def _decode_ids(text: str) -> npt.NDArray[np.int32]:
    data = base64.b64decode(text, validate=True)
    if len(data) % 4:
        raise ValueError(f"its base64 decodes to {len(data):,} bytes, which is not a multiple of 4")
    return np.frombuffer(data, "<i4")


def _ids_type_name(value: object) -> str:
    return "a list of other values" if isinstance(value, list) else json_type_name(value)


def messages_value(record: Record, column: str) -> list[dict[str, Any]]:
    """Return the messages of a column, without keys whose value is null.

    Args:
        record: The record.
        column: The column: a list of objects with a `role`.

    Raises:
        PrepError: The value is not a list of messages.
    """
    value, place = record.values[column], f"{record.place}: column `{column}`"
    if not isinstance(value, list):
        raise PrepError(f"{place} is not a list of messages", f"it is {json_type_name(value)}", LINE_HINT)
    messages = cast(list[Any], value)
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            why = f"message {number} is {json_type_name(message)}, or has no `role`"
            raise PrepError(f"{place} is not a list of messages", why, '`{"role": "user", "content": "..."}`')
    return [{key: item for key, item in message.items() if item is not None} for message in messages]


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
