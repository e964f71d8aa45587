"""Small files of a run in `.prep/`: JSON with a checksum, written so that a kill leaves the old or the new content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.engine.digest import digest
from prepcli.engine.no_follow import read_no_follow, write_no_follow
from prepcli.errors import PrepError
from prepcli.execution.paths import fsync_path
from trainer.files.json_values import load_json

CHECKSUM_KEY = "checksum"  # key in each file; covers all other keys


def read_note(path: Path) -> dict[str, Any] | None:
    """Return the content of a note; None if it does not exist. PrepError if it is damaged."""
    try:
        content = load_json(read_no_follow(path))
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.pop(CHECKSUM_KEY, None) not in (None, _checksum(content)):
        raise PrepError(f"{path} is damaged", "it is not a file that prep wrote", "`--restart` drops it")
    return content


def write_note(path: Path, content: Mapping[str, object]) -> None:
    """Write a note; it is durable on return."""
    new_path = path.with_suffix(".new")
    write_no_follow(new_path, json.dumps({**content, CHECKSUM_KEY: _checksum(content)}).encode())
    fsync_path(new_path)
    new_path.rename(path)
    fsync_path(path.parent)


def _checksum(content: Mapping[str, object]) -> str:
    """Return the checksum of a note's content after a JSON round trip, which converts keys to text."""
    return digest(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())
