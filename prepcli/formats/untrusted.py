"""What comes from strangers: files that may be anything, JSON that may be a bomb, names that may be a screenful."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from prepcli.errors import PrepError

MAX_CONFIG_NBYTES = 16 << 20
MAX_SMALL_FILE_NBYTES = 100_000_000  # of a manifest, or of another document that grows with a model


def parse_json(text: bytes) -> Any:
    """JSON whose integers are either counts, from 0 and below 10^19, or -1.

    Raises ValueError with the reason, also for names that occur twice in an object.
    """
    try:
        return _DECODER.decode(text.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON is broken: {error.msg}") from error
    except UnicodeError as error:
        raise ValueError("its text is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def quote_name(name: str) -> str:
    """A name for a message: without control characters, and never a page long."""
    return f"`{name}`" if len(name) <= 100 and name.isprintable() else ascii(name[:100])


def stat_file(path: Path) -> os.stat_result:
    """The stat of a regular file, links followed; a PrepError for anything else: to open a pipe would be to wait."""
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable_error(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise PrepError(f"{path} is not a file")
    return found


def read_bytes(path: Path, offset: int = 0, nbytes: int = -1) -> bytes:
    """Bytes of an ordinary file; PrepError where the system does not give them."""
    stat_file(path)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(nbytes)
    except OSError as error:
        raise unreadable_error(path, error) from error


def read_small_file(path: Path, max_nbytes: int = MAX_SMALL_FILE_NBYTES) -> bytes:
    """All of a file of settings; PrepError for one that is larger, and for what is no ordinary file."""
    nbytes = stat_file(path).st_size
    if nbytes > max_nbytes:
        raise PrepError(f"{path} is too large", f"it has {nbytes:,} bytes, prep takes {max_nbytes:,}")
    return read_bytes(path, 0, nbytes)


def list_folder(folder: Path) -> list[str]:
    """All names in a folder, sorted."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable_error(folder, error) from error


def unreadable_error(path: Path, error: OSError) -> PrepError:
    """The error for a file or folder that the system does not let prep read."""
    return PrepError(f"cannot read {path}", error.strerror or str(error))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it names {quote_name(twice)} twice")
    for name in made:
        name.encode()  # half of a surrogate pair is JSON to Python, and to nobody else
    return made


def _count(digits: str) -> int:
    return int(digits) if digits.isdigit() and len(digits) < 20 else -1  # int() of a million digits takes hours


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_count, parse_constant=_no_number)
