"""The manifest: what an output was made from and holds, so that no later command needs a flag that it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.errors import PrepError
from prepcli.formats.orbax import find_item
from prepcli.formats.untrusted import read_small_file

MANIFEST_FILE = "prep-manifest.json"
STATE_ITEM = "state"  # the item of a training step, which lies beside the step's manifest
FORMAT_VERSION = 1
REQUIRED_KEYS = {
    "kind": str,
    "request": str,
    "plan": str,
    "config": dict,
    "tensors": dict,
    "prefixed": bool,
    "tied": bool,
}
LAYOUT_KEYS = {"scan": bool, "scan_axis": int, "rules": list}
KEYS_BY_KIND = {
    "init": LAYOUT_KEYS,
    "train": LAYOUT_KEYS | {"step": int, "slots": dict, "others": dict},
}  # by kind, what it says too
PREP_KEYS = {
    *("format", "kind", "request", "plan", "prep", "source", "command", "name", "family", "config", "vocab", "layout"),
    *(
        "mesh",
        "rules",
        "scan",
        "scan_axis",
        "prefixed",
        "tied",
        "step",
        "dropped",
        "tensors",
        "leaves",
        "slots",
        "others",
        "compress",
        "casts",
        "packed",
        "checksums",
    ),
}  # keys that prep writes; what else a training step says is the trainer's


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, None if it has none; PrepError where it is broken or of a later format."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        found = json.loads(read_small_file(path))
    except (ValueError, RecursionError) as error:
        raise PrepError(f"{path} is broken", str(error), "make the output anew") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT_VERSION:
        says = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise PrepError(f"{path} is of another format", f"it says {says!r}, this prep reads {FORMAT_VERSION}")
    _check(path, found)
    return found


def foreign_output_error(output: str) -> PrepError:
    """The error of an output in whose place something is that prep did not make."""
    why = f"it has no {MANIFEST_FILE}: prep did not make it, and replaces nothing but its own"
    return PrepError(f"{output} exists and is something else", why, "another `--out`, or remove it")


def find_manifest_folder(path: Path) -> Path:
    """The folder whose manifest speaks of what `path` means: of an item its own or its training step's, of a run that
    of the last step, else `path` itself."""
    item = find_item(path)
    if item is None or (item / MANIFEST_FILE).exists():
        return item or path
    return item.parent if item.name == STATE_ITEM and (item.parent / MANIFEST_FILE).exists() else item


def _check(path: Path, found: Mapping[str, Any]) -> None:
    """PrepError unless the manifest has all that later commands take from it."""
    for key, kind in (REQUIRED_KEYS | KEYS_BY_KIND.get(str(found.get("kind")), {})).items():
        if not isinstance(found.get(key), kind):
            why = f"`{key}` is {found.get(key)!r:.60}" if key in found else f"`{key}` is missing"
            raise PrepError(f"{path} is broken", why, "make the output anew")
    state = (found["others"], *found["slots"].values()) if found["kind"] == "train" else ()
    for records in (found["tensors"], *state):
        _check_records(path, records)


def _check_records(path: Path, records: Any) -> None:
    """PrepError unless each tensor has a list of digests."""
    for name, record in records.items() if isinstance(records, dict) else [("the state", records)]:
        pieces = record.get("digests") if isinstance(record, dict) else None
        if not isinstance(pieces, list) or not all(_is_piece(piece) for piece in pieces):
            raise PrepError(f"{path} is broken", f"what it says of {name!r:.60} is no list of digests", "make it anew")


def _is_piece(piece: Any) -> bool:
    """Whether this is [first row, one past the last, digest]."""
    return isinstance(piece, list) and [type(part) for part in piece] == [int, int, str]


def encode_manifest(content: Mapping[str, Any]) -> bytes:
    """The manifest as it is stored."""
    return json.dumps({"format": FORMAT_VERSION, **content}, indent=1).encode() + b"\n"
