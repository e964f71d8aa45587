"""Checked values of a record's columns. Errors name the file, the line and the column."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import Key, PrepError, Text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonObject, JsonValue, is_json_list, json_type_name, load_json
from trainer.data.column_shapes import columns_hint, is_sharegpt
from trainer.data.examples import TokenIds
from trainer.data.readers.reader import Record

LINE_HINT = "fix or remove the line"
JSON_HINT = "write the list as JSON, e.g. with `json.dumps`, or remove the line"
COLUMN_HINT = Text(Key("data.fields", "COLUMN", is_override=True))
# Python reads a byte that is not UTF-8 as a surrogate from the command line, and in some locales from stdin.
SURROGATE_CAUSE = "it has an unpaired surrogate, which is not a character"
MESSAGE_HINT = '`{"role": "user", "content": "..."}`'
TOOLS_HINT = '`[{"type": "function", "function": {"name": "..."}}]`'
IDS_HINT = "pass a list of token ids, or base64 of little-endian int32 values"


def check_columns(
    record: Record,
    columns: Sequence[str],
    *,
    hint: Text | None = None,
    default_hint: Text = COLUMN_HINT,
) -> None:
    """Raise PrepError if a record lacks a column.

    Args:
        record: The record.
        columns: Required columns.
        hint: How the user selects the columns. By default the names of the record's columns decide.
        default_hint: The hint for names that do not say what the columns hold.
    """
    if missing := [column for column in columns if column not in record.values]:
        names = ", ".join(f"`{name}`" for name in record.values) or "none"
        raise PrepError(
            f"{record.place}: no column `{missing[0]}`",
            f"its columns: {names}",
            hint or columns_hint(record.values, default_hint),
        )


def text_value(record: Record, column: str) -> str:
    """Return the text of a column. Raise PrepError if it is not text."""
    value = record.values[column]
    what = f"{record.place}: column `{column}` is not text"
    if not isinstance(value, str):
        raise PrepError(what, f"it is {json_type_name(value)}", LINE_HINT)
    if not is_encodable(value):
        raise PrepError(what, SURROGATE_CAUSE, LINE_HINT)
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
    value = record.values[column]
    place = f"{record.place}: column `{column}`"
    try:
        if isinstance(value, str):
            ids = _decode_ids(value)
        else:
            ids = np.asarray(value)
    except ValueError as error:
        # The text is not base64, or the list has lists of several lengths.
        raise PrepError(f"{place} has no token ids", str(error), IDS_HINT) from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise PrepError(f"{place} has no token ids", f"it is {_ids_type_name(value)}", IDS_HINT)
    if ids.size:
        smallest = int(ids.min())
        largest = int(ids.max())
        if smallest < 0 or largest >= vocab:
            bad = smallest if smallest < 0 else largest
            what = f"{place}: token id {bad:,} is out of range"
            why = f"the vocabulary without padding has {vocab:,} tokens"
            raise PrepError(what, why, LINE_HINT)
    return ids.astype(np.uint32)


def _decode_ids(text: str) -> npt.NDArray[np.int32]:
    """Decode base64 of little-endian int32 values."""
    data = base64.b64decode(text, validate=True)
    if len(data) % 4:
        raise ValueError(
            f"its base64 decodes to {count_text(len(data), 'byte')}, which is not a multiple of 4"
        )
    return np.frombuffer(data, "<i4")


def _ids_type_name(value: object) -> str:
    """Return the type of a value without token ids, for an error."""
    if isinstance(value, list):
        return "a list of other values"
    return json_type_name(value)


def list_value(record: Record, column: str, items: str) -> list[JsonValue]:
    """Return the list of a column that is stored as it is or as a JSON text.

    Args:
        record: The record.
        column: The column.
        items: Name of its items, for error messages.

    Raises:
        PrepError: The value is neither.
    """
    value = record.values[column]
    place = f"{record.place}: column `{column}`"
    if isinstance(value, str) and is_json_list(value):
        value = parse_json(value, place, JSON_HINT)
    if not isinstance(value, list):
        what = f"{place} is not a list of {items}"
        raise PrepError(what, f"it is {json_type_name(value)}", LINE_HINT)
    return cast(list[JsonValue], value)


def messages_value(record: Record, column: str) -> list[JsonObject]:
    """Return the messages of a column, without keys of value null.

    Args:
        record: The record.
        column: The column: a list of objects with a `role`, or its JSON text.

    Raises:
        PrepError: The value is not a list of messages.
    """
    value = list_value(record, column, "messages")
    place = f"{record.place}: column `{column}`"
    messages: list[JsonObject] = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            why = f"message {number} is {json_type_name(message)}, or has no `role`"
            hint = Text(MESSAGE_HINT)
            if is_sharegpt(value):
                hint = columns_hint({column: value}, hint)
            raise PrepError(f"{place} is not a list of messages", why, hint)
        # Arrow tables have every key in every message, with null for the absent ones. Templates ask
        # whether a key is defined, so null keys are left out.
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def tool_schemas(value: object, place: str) -> list[JsonObject] | None:
    """Return JSON schemas of tools from a list, or from its JSON text. None without tools.

    Args:
        value: The value.
        place: File, line and column, for error messages.

    Raises:
        PrepError: The value is not a list of objects.
    """
    tools = json_list(value, place, TOOLS_HINT)
    if not all(isinstance(tool, dict) for tool in tools):
        raise PrepError(f"{place} is not a list of JSON schemas", "it has other values", TOOLS_HINT)
    return [_with_type(tool) for tool in cast(list[JsonObject], tools)] or None


def _with_type(tool: JsonObject) -> JsonObject:
    """Return the schema of a tool. It may be the function alone, as LLaMA-Factory writes it."""
    if "name" in tool and "function" not in tool and "type" not in tool:
        return {"type": "function", "function": tool}
    return tool


def json_list(value: object, place: str, hint: str) -> list[JsonValue]:
    """Return a list that is stored as it is or as a JSON text. Empty for null, and for an empty text.

    Args:
        value: The value.
        place: File, line and key, for error messages.
        hint: How the value should be.

    Raises:
        PrepError: It is neither.
    """
    if isinstance(value, str) and value.strip():
        value = parse_json(value, place, hint)
    if not value:
        return []
    if not isinstance(value, list):
        raise PrepError(f"{place} is not a list", f"it is {json_type_name(value)}", hint)
    return cast(list[JsonValue], value)


def parse_json(text: str, place: str, hint: str) -> JsonValue:
    """Return the value of a JSON text. Raise PrepError if it is none."""
    try:
        return load_json(text.encode())
    except ValueError as error:
        raise PrepError(f"{place}: not JSON", str(error)[:200], hint) from None


def is_encodable(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
