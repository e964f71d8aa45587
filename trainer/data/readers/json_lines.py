"""JSON Lines: each non-blank line is an object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from trainer.data.files import DataFile, read_blocks
from trainer.data.json_types import json_type_name
from trainer.data.readers.reader import Reader, Record, decode_utf8
from trainer.models.errors import PrepError


def _split_lines(file: BinaryIO) -> Iterable[bytes]:
    return file


def _read_lines(file: DataFile) -> Iterator[Record]:
    """Yield one record per non-blank line; the bytes of blank lines count for the next one."""
    offset, blank_nbytes = 0, 0
    for number, line in enumerate(read_blocks(file, _split_lines), start=1):
        text = decode_utf8(file.path, line, offset)
        offset += len(line)
        if text.strip():
            yield _parse_record(f"{file.path}:{number}", text.rstrip(), blank_nbytes + len(line))
            blank_nbytes = 0
        else:
            blank_nbytes += len(line)


def _parse_record(place: str, line: str, nbytes: int) -> Record:
    values = _parse_json(place, line)
    if not isinstance(values, dict):
        what = f"{place}: not an object but {json_type_name(values)}"
        raise PrepError(what, "type `json` needs one object per line", "`jq -c '.[]'` splits a list into lines")
    return Record(values, place, nbytes)


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


JSON_READER = Reader(".jsonl", _read_lines)
