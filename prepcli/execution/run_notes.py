"""Small files of a run in `.prep/`: JSON with a checksum, written so that a kill leaves the old or the new content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from prepcli.core.errors import Option, PrepError, text
from prepcli.core.json_values import JsonObject, load_json
from prepcli.engine.digest import digest
from prepcli.engine.no_follow import read_no_follow
from prepcli.stores.writing import write_file

CHECKSUM_KEY = "checksum"  # key in each file, covers all other keys


def read_json_record(path: Path) -> JsonObject | None:
    """Return the content of a record, or None if the file does not exist.

    Raise PrepError if the file is damaged.
    """
    try:
        content = decode_record(read_no_follow(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        hint = text("{} deletes it", Option("restart", True))
        raise PrepError(f"{path} is damaged", str(error), hint) from error
    return content


def decode_record(data: bytes) -> JsonObject:
    """Return the JSON object in the bytes of a record. Raise ValueError if they are damaged."""
    try:
        content = load_json(data)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.pop(CHECKSUM_KEY, None) not in (
        None,
        _checksum(content),
    ):
        raise ValueError("it is not a file that prep wrote")
    return content


def encode_record(content: Mapping[str, object]) -> bytes:
    """Return the bytes of a record: the content as JSON, with its checksum."""
    return json.dumps({**content, CHECKSUM_KEY: _checksum(content)}).encode()


def write_json_record(path: Path, content: Mapping[str, object]) -> None:
    """Write a record, durable on return."""
    write_file(path, encode_record(content))


def _checksum(content: Mapping[str, object]) -> str:
    """Return the checksum of a record's content after a JSON round trip, which converts keys to text."""
    return digest(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())
