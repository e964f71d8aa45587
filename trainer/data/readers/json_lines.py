"""JSON Lines: each non-blank line is an object with a document, or with a source and a target."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.readers.reader import Reader, TextChunk, decode_utf8
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import TextFields


def _split_lines(file: BinaryIO) -> Iterable[bytes]:
    return file


def _read_lines(path: Path, blocks: Iterable[bytes], *, fields: TextFields, prefix: str) -> Iterator[TextChunk]:
    """Yield one document per non-blank line, or two (source, target) if `fields` has a source."""
    offset, blank_nbytes = 0, 0
    for number, line in enumerate(blocks, start=1):
        text = decode_utf8(path, line, offset)
        offset += len(line)
        if text.strip():
            source, target = _source_and_target(f"{path}:{number}", text.rstrip(), fields)
            if fields.source:
                yield TextChunk(prefix + source, 0, ends_document=True)
            yield TextChunk(target, blank_nbytes + len(line), ends_document=True)
            blank_nbytes = 0
        else:
            blank_nbytes += len(line)


def _source_and_target(place: str, line: str, fields: TextFields) -> tuple[str, str]:
    """Return the source and the target of a line; the source is empty if `fields` has none."""
    record = _parse_json(place, line)
    if not isinstance(record, dict):
        what = f"{place}: not an object but {_json_type_name(record)}"
        raise PrepError(what, "type `json` needs one object per line", "`jq -c '.[]'` splits a list into lines")
    if missing := [column for column in fields.columns if column not in record]:
        columns = ", ".join(f"`{name}`" for name in record) or "none"
        hint = "`--set data.fields='[SOURCE], TARGET'`" if fields.source else "`--set data.fields=COLUMN`"
        raise PrepError(f"{place}: no column `{missing[0]}`", f"its columns: {columns}", hint)
    source = " ".join(_column_text(place, record, column) for column in fields.source)
    target = " ".join(_column_text(place, record, column) for column in fields.target)
    return source, target


def _column_text(place: str, record: Mapping[str, Any], column: str) -> str:
    value = record[column]
    if not isinstance(value, str):
        why = f"it is {_json_type_name(value)}"
        raise PrepError(f"{place}: column `{column}` is not text", why, "fix or remove the line")
    if not _is_encodable(value):
        why = "it has an unpaired surrogate, which is not a character"
        raise PrepError(f"{place}: column `{column}` is not text", why, "fix or remove the line")
    return value


def _parse_json(place: str, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at character {error.pos + 1}"
    except RecursionError:
        why = "it is nested too deep"
    except ValueError as error:  # a number of thousands of digits
        why = str(error)
    hint = "one object per line: `jq -c .` writes an object on one line, `jq -c '.[]'` splits a list into lines"
    raise PrepError(f"{place}: not JSON", why, hint)


def _json_type_name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


JSON_READER = Reader(".jsonl", split=_split_lines, read=_read_lines)
