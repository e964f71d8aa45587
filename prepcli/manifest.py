"""The manifest: what an output was made from and holds, so that no later command needs a flag that it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.errors import PrepError

MANIFEST = "prep-manifest.json"
FORMAT = 1


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, None if it has none; PrepError where it is broken or of a later format."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise PrepError(f"{path} is broken", str(error), "make the output anew") from error
    except OSError as error:
        raise PrepError(f"cannot read {path}", error.strerror or str(error)) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        says = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise PrepError(f"{path} is of another format", f"it says {says!r}, this prep reads {FORMAT}")
    return found


def manifest_bytes(content: Mapping[str, Any]) -> bytes:
    """The manifest as it is stored."""
    return json.dumps({"format": FORMAT, **content}, indent=1).encode() + b"\n"
