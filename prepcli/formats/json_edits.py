"""Insert members into a JSON text, and keep all other bytes. The insertion can be undone exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence

from prepcli.algebra.boxes import Range
from prepcli.core.json_values import JsonObject, JsonValue

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"


def insert_members(
    data: bytes, keys: Sequence[str], members: JsonObject | list[JsonValue]
) -> tuple[bytes, Range]:
    """Insert members at the end of an object or a list.

    The members have the indentation of a text with one member per line. Other texts get them without spaces.

    Args:
        data: A valid JSON text.
        keys: Keys from the root to the object or list, e.g. `("model", "vocab")`. Empty for the root.
        members: An object to add to an object, or a list to add to a list, not empty.

    Returns:
        The new text, and the byte range of the insertion in it.

    Raises:
        ValueError: There is no such object or list, or the object has one of the members.

    >>> insert_members(b'{"a": [1], "b": 2}', ("a",), [3, 4])
    (b'{"a": [1,3,4], "b": 2}', (8, 12))
    """
    text = data.decode()
    start, stop = find_value(text, keys)
    brackets = text[start] + text[stop - 1]
    if brackets != ("{}" if isinstance(members, dict) else "[]"):
        raise ValueError(
            f"{'.'.join(keys)} is not {'an object' if isinstance(members, dict) else 'a list'}"
        )
    if isinstance(members, dict):
        _check_new_keys(".".join(keys) or "the object", json.loads(text[start:stop]), members)
    body = text[start + 1 : stop - 1]
    last_stop = start + 1 + len(body.rstrip(_SPACE))
    is_empty = last_stop == start + 1
    # The space between the last member and the closing bracket, e.g. "\n  "
    closing_space = text[last_stop : stop - 1]
    separator = ""
    if "\n" in closing_space:
        separator = "\n" + closing_space.rpartition("\n")[2] + "  "
    inserted = ("," + separator).join(_member_texts(members, separator))
    inserted = ("" if is_empty else ",") + separator + inserted
    offset = len(text[:last_stop].encode())
    insertion = inserted.encode()
    new_data = data[:offset] + insertion + data[offset:]
    return new_data, (offset, offset + len(insertion))


def _check_new_keys(name: str, old: JsonObject, new: JsonObject) -> None:
    """Raise ValueError for a key in both objects: readers of JSON disagree about doubled keys."""
    for key in new:
        if key in old:
            raise ValueError(f"{name} has {key!r:.60} already")


def remove_insertion(data: bytes, insertion: Range) -> bytes:
    """Return a text without an insertion.

    >>> remove_insertion(b'{"a": [1,3,4], "b": 2}', (8, 12))
    b'{"a": [1], "b": 2}'
    """
    return data[: insertion[0]] + data[insertion[1] :]


def find_value(text: str, keys: Sequence[str]) -> Range:
    """Return where the value of some keys begins and ends in a valid JSON text.

    Raises:
        ValueError: A key is missing.

    >>> find_value('{"a": {"b": [1]}}', ("a", "b"))
    (12, 15)
    """
    start = _skip_space(text, 0)
    for key in keys:
        start = _find_member(text, start, key)
    _, stop = _DECODER.raw_decode(text, start)
    return start, stop


def _find_member(text: str, start: int, key: str) -> int:
    """Return where the value of a key begins, in the object from `start` on."""
    position = start
    while text[position] in "{,":
        position = _skip_space(text, position + 1)
        if text[position] == "}":
            break
        name, position = _DECODER.raw_decode(text, position)
        # A colon follows each name.
        position = _skip_space(text, _skip_space(text, position) + 1)
        if name == key:
            return position
        _, position = _DECODER.raw_decode(text, position)
        position = _skip_space(text, position)
    raise ValueError(f"there is no {key}")


def _skip_space(text: str, position: int) -> int:
    """Return the position of the next character other than a space."""
    while text[position] in _SPACE:
        position += 1
    return position


def _member_texts(members: JsonObject | list[JsonValue], separator: str) -> list[str]:
    """Return the JSON text of each member. Without a separator, it has no spaces."""
    if not isinstance(members, dict):
        return [_value_text(value, separator) for value in members]
    colon = ": " if separator else ":"
    texts: list[str] = []
    for key, value in members.items():
        texts.append(_value_text(key, separator) + colon + _value_text(value, separator))
    return texts


def _value_text(value: JsonValue, separator: str) -> str:
    if not separator:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=2).replace("\n", separator)
