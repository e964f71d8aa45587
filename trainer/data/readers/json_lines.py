"""JSON Lines: each non-blank line is an object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from trainer.data.files import DataFile
from trainer.data.readers.reader import (
    Reader,
    ReadOptions,
    Record,
    decode_utf8,
    read_lines,
    read_stream,
    too_large_error,
)
from trainer.files.json_values import json_type_name
from trainer.models.errors import PrepError
from trainer.models.json_types import JsonObject


def _read_lines(file: DataFile, options: ReadOptions) -> Iterator[Record]:
    return read_stream(file, lambda stream: _parse_lines(file, stream, options))


def _parse_lines(file: DataFile, stream: BinaryIO, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per valid line.

    The bytes of blank and invalid lines count for the next valid one.
    """
    offset = 0
    skipped_nbytes = 0
    for number, line in enumerate(read_lines(stream, options.max_document_nbytes), start=1):
        values = None
        place = f"{file.path}:{number}"
        try:
            if line.is_too_long:
                raise too_large_error(
                    f"{place}: too long", line.nbytes, options.max_document_nbytes
                )
            text = decode_utf8(place, line.content, offset).rstrip()
            if text:
                values = _parse_object(place, text)
        except PrepError as error:
            options.on_error(error)
        offset += line.nbytes
        skipped_nbytes += line.nbytes
        if values is not None:
            yield Record(values, place, skipped_nbytes)
            skipped_nbytes = 0


def _parse_object(place: str, line: str) -> JsonObject:
    """Return the JSON object of a line. Raise PrepError for another value."""
    values = _parse_json(place, line)
    if not isinstance(values, dict):
        what = f"{place}: not an object but {json_type_name(values)}"
        raise PrepError(
            what, "type `json` needs one object per line", "`jq -c '.[]'` splits a list into lines"
        )
    return values


def _parse_json(place: str, line: str) -> Any:
    """Return the JSON value of a line. Raise PrepError for invalid JSON."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at character {error.pos + 1}"
    except RecursionError:
        why = "it is nested too deep"
    except ValueError as error:
        # Python refuses a number of more than 4,300 digits (`sys.set_int_max_str_digits`).
        why = str(error)
    hint = "one object per line: `jq -c .` writes an object on one line, `jq -c '.[]'` splits a list into lines"
    raise PrepError(f"{place}: not JSON", why, hint)


JSON_READER = Reader(
    (".jsonl",), _read_lines, other_suffixes=(".json", ".ndjson"), is_compressible=True
)
