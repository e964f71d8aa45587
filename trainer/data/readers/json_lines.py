"""JSON Lines, where each non-blank line is an object, and files that are one list of objects."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonObject, json_type_name
from trainer.data.files import FILE_READ_NBYTES, DataFile, stream_blocks
from trainer.data.readers.json_list import read_elements, starts_list
from trainer.data.readers.reader import (
    Line,
    Reader,
    ReadOptions,
    Record,
    decode_utf8,
    read_lines,
    read_stream,
    too_large_error,
)

# Bytes in which the first visible character of a file must be, if it begins a list.
HEAD_NBYTES = 64 << 10
LINE_HINT = "one object per line: `jq -c .` writes an object on one line"
ELEMENT_HINT = "fix or remove the record, or `data.bad_lines = N` skips up to N of them"


def _read_file(file: DataFile, options: ReadOptions) -> Iterator[Record]:
    return read_stream(file, lambda stream: _parse_stream(file, stream, options))


def _parse_stream(file: DataFile, stream: BinaryIO, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per valid line, or per valid element of a list."""
    head = stream.read(HEAD_NBYTES)
    blocks = itertools.chain((head,), iter(partial(stream.read, FILE_READ_NBYTES), b""))
    if starts_list(head):
        elements = read_elements(file.path, blocks, options.max_document_nbytes)
        return _parse_texts(f"{file.path}, record ", elements, options, is_list=True)
    lines = read_lines(stream_blocks(blocks), options.max_document_nbytes)
    return _parse_texts(f"{file.path}:", lines, options, is_list=False)


def _parse_texts(
    place_prefix: str, texts: Iterator[Line], options: ReadOptions, *, is_list: bool
) -> Iterator[Record]:
    """Yield one record per valid text.

    The bytes of blank lines and of invalid texts count for the next valid one.
    """
    hint = ELEMENT_HINT if is_list else LINE_HINT
    done_nbytes = 0
    skipped_nbytes = 0
    for number, line in enumerate(texts, start=1):
        done_nbytes += line.nbytes
        if done_nbytes <= options.start:
            skipped_nbytes += line.nbytes
            continue
        values = None
        place = f"{place_prefix}{number}"
        try:
            if line.is_too_long:
                raise too_large_error(
                    f"{place}: too long", line.nbytes, options.max_document_nbytes
                )
            text = decode_utf8(place, line.content, line.start).rstrip()
            if text or is_list:
                values = _parse_object(place, text, hint)
        except PrepError as error:
            options.on_error(error)
        skipped_nbytes += line.nbytes
        if values is not None:
            yield Record(values, place, skipped_nbytes)
            skipped_nbytes = 0


def _parse_object(place: str, text: str, hint: str) -> JsonObject:
    """Return a JSON object. Raise PrepError for another value."""
    values = _parse_json(place, text, hint)
    if not isinstance(values, dict):
        what = f"{place}: not an object but {json_type_name(values)}"
        why = "type `json` needs one object per line, or one list of objects"
        raise PrepError(what, why, ELEMENT_HINT)
    return values


def _parse_json(place: str, text: str, hint: str) -> Any:
    """Return a JSON value. Raise PrepError for invalid JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at character {error.pos + 1}"
        # Blank lines are skipped, so this is an element of a list.
        if not text:
            why = "there is no value between two commas, or after the last comma"
    except RecursionError:
        why = "it is nested too deep"
    except ValueError as error:
        # Python refuses a number of more than 4,300 digits (`sys.set_int_max_str_digits`).
        why = str(error)
    raise PrepError(f"{place}: not JSON", why, hint)


JSON_READER = Reader(
    (".jsonl",),
    _read_file,
    other_suffixes=(".json", ".ndjson"),
    is_compressible=True,
    is_divisible=True,
)
