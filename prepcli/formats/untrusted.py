"""Read untrusted input: files of any kind, malicious JSON, and names of any length."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_types import JsonObject, JsonValue
from prepcli.core.json_values import check_depth, quote_name
from prepcli.stores.reading import (
    ACCESS_HINT,
    MAX_SMALL_FILE_NBYTES,
    not_regular_error,
    open_regular_file,
    read_regular_file,
)

MAX_CONFIG_NBYTES = 16 << 20


class CutShortError(ValueError):
    """A file ends before its content does, e.g. after a download that was interrupted."""


def parse_json(text: bytes) -> Any:
    """Parse JSON. Integers outside of 0 to 10^19 - 1 become -1.

    Raises:
        ValueError: The text is not JSON, or an object has a duplicate name.
    """
    try:
        value = _DECODER.decode(text.decode())
        check_depth(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON is broken: {error.msg}") from error
    except UnicodeError as error:
        raise ValueError("its text is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    return value


def stat_file(path: Path) -> os.stat_result:
    """Return the stat of a regular file, links followed. Raise PrepError for other kinds: a pipe would block."""
    try:
        file_stat = path.stat()
    except OSError as error:
        raise unreadable_error(path, error) from error
    if not stat.S_ISREG(file_stat.st_mode):
        raise not_regular_error(path)
    return file_stat


def stat_indexed_file(path: Path) -> os.stat_result:
    """Return the stat of a file named by an index. Raise DamagedError if it does not exist."""
    if not os.path.lexists(path):
        why = "the index of the checkpoint names it"
        raise DamagedError(f"{path} does not exist", why, GET_AGAIN_HINT)
    return stat_file(path)


def read_bytes(path: Path, offset: int = 0, nbytes: int = -1) -> bytes:
    """Return bytes of a regular file. Raise PrepError if it cannot be read."""
    try:
        with open_regular_file(path) as file:
            file.seek(offset)
            return file.read(nbytes)
    except OSError as error:
        raise unreadable_error(path, error) from error


def read_small_file(path: Path, max_nbytes: int = MAX_SMALL_FILE_NBYTES) -> bytes:
    """Return the content of a small file. Raise PrepError if it is too large or not a regular file."""
    try:
        return read_regular_file(path, max_nbytes)
    except OSError as error:
        raise unreadable_error(path, error) from error


def list_folder(folder: Path) -> list[str]:
    """Return the sorted names in a folder."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable_error(folder, error) from error


def unreadable_error(path: Path, error: OSError) -> PrepError:
    """Return the error for an unreadable file or folder."""
    hint = "check the name" if isinstance(error, FileNotFoundError) else ACCESS_HINT
    return PrepError(f"cannot read {path}", error.strerror or str(error), hint)


def _unique_object(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    document = dict(pairs)
    if len(document) != len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it names {quote_name(duplicate)} twice")
    for name in document:
        # Python's JSON accepts half of a surrogate pair, other parsers do not.
        name.encode()
    return document


def _parse_count(digits: str) -> int:
    # int() of a million digits takes hours.
    return int(digits) if digits.isdigit() and len(digits) < 20 else -1


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


# json.loads would accept duplicate names (two parsers could see two values), NaN, and integers of
# any length.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_object, parse_int=_parse_count, parse_constant=_reject_constant
)
