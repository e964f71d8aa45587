"""Small files of a run in `.prep/`: JSON with a checksum, written so that a kill leaves the old or the new content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.engine.digest import digest
from prepcli.engine.no_follow import read_no_follow
from prepcli.errors import PrepError
from trainer.files.writing import write_file

CHECKSUM_KEY = "checksum"  # key in each file; covers all other keys


def read_note(path: Path) -> dict[str, Any] | None:
    """Return the content of a note; None if it does not exist. PrepError if it is damaged."""
    try:
        content = json.loads(read_no_follow(path))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.pop(CHECKSUM_KEY, None) not in (None, _checksum(content)):
        raise PrepError(f"{path} is damaged", "it is not a file that prep wrote", "`--restart` drops it")
    return content


def write_note(path: Path, content: Mapping[str, object]) -> None:
    """Write a note; it is durable on return."""
    write_file(path, json.dumps({**content, CHECKSUM_KEY: _checksum(content)}).encode())


def _checksum(content: Mapping[str, object]) -> str:
    """Return the checksum of a note's content after a JSON round trip, which converts keys to text."""
    return digest(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())
