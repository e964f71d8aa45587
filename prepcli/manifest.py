"""The manifest: what an output was made from and holds, so that no later command needs a flag that it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.errors import PrepError

MANIFEST = "prep-manifest.json"
FORMAT = 1
REQUIRED = {"kind": str, "request": str, "plan": str, "config": dict, "tensors": dict, "prefixed": bool, "tied": bool}
OF_AN_INIT = {"scan": bool, "scan_axis": int, "rules": list}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, None if it has none; PrepError where it is broken or of a later format."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise PrepError(f"{path} is broken", str(error), "make the output anew") from error
    except OSError as error:
        raise PrepError(f"cannot read {path}", error.strerror or str(error)) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        says = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise PrepError(f"{path} is of another format", f"it says {says!r}, this prep reads {FORMAT}")
    _check(path, found)
    return found


def _check(path: Path, found: Mapping[str, Any]) -> None:
    """PrepError unless the manifest has all that later commands take from it."""
    for key, kind in (REQUIRED | (OF_AN_INIT if found.get("kind") == "init" else {})).items():
        if not isinstance(found.get(key), kind):
            why = f"`{key}` is {found.get(key)!r:.60}" if key in found else f"`{key}` is missing"
            raise PrepError(f"{path} is broken", why, "make the output anew")
    for name, record in found["tensors"].items():
        pieces = record.get("digests") if isinstance(record, dict) else None
        if not isinstance(pieces, list) or not all(_is_piece(piece) for piece in pieces):
            raise PrepError(f"{path} is broken", f"what it says of {name!r:.60} is no list of digests", "make it anew")


def _is_piece(piece: Any) -> bool:
    """Whether this is [first row, one past the last, digest]."""
    return isinstance(piece, list) and [type(part) for part in piece] == [int, int, str]


def manifest_bytes(content: Mapping[str, Any]) -> bytes:
    """The manifest as it is stored."""
    return json.dumps({"format": FORMAT, **content}, indent=1).encode() + b"\n"
