"""Read and write the manifest of an output: its source, model and layout, which later commands read from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.formats.orbax import find_item
from prepcli.formats.untrusted import read_small_file
from trainer.files.json_values import load_json

MANIFEST_FILE = "prep-manifest.json"
STATE_ITEM = "state"  # item of a training step; the step's manifest is beside it
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
}  # additional required keys by kind
BASE_KEY = "base"  # of adapters: name and digests of the frozen parameters
OPTIONAL_KEYS = {BASE_KEY: dict}
SAMPLE_DIGEST_KEY = "sample_digest"  # in the entry of the base: `restore.digest_checks.sample_digest` of its checkpoint
ADAPTER_KEYS = ("lora", BASE_KEY)  # of a checkpoint of adapters: their settings, and the model that they belong to
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
}  # keys that prep writes; further keys of a training step belong to the trainer


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a folder; return None if there is none, raise PrepError if it is invalid."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        manifest = load_json(read_small_file(path))
    except ValueError as error:
        raise DamagedError(f"{path} is broken", str(error), GET_AGAIN_HINT) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT_VERSION:
        stored_format = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise PrepError(f"{path} has another format", f"it says {stored_format!r}, this prep reads {FORMAT_VERSION}")
    _check_manifest(path, manifest)
    return manifest


def foreign_output_error(output: str) -> PrepError:
    """Return the error for an output path at which something exists that prep did not write."""
    why = f"it has no {MANIFEST_FILE}: prep only replaces its own outputs"
    return PrepError(f"{output} exists and is something else", why, "choose another `--out`, or remove it")


def find_manifest_folder(path: Path) -> Path:
    """Return the folder with the manifest of `path`: its item, training step or last step of a run; else `path`."""
    item = find_item(path)
    if item is None or (item / MANIFEST_FILE).exists():
        return item or path
    return item.parent if item.name == STATE_ITEM and (item.parent / MANIFEST_FILE).exists() else item


def _check_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise PrepError unless the manifest has all keys that later commands read, of the right types."""
    optional = {key: expected_type for key, expected_type in OPTIONAL_KEYS.items() if key in manifest}
    for key, expected_type in (REQUIRED_KEYS | KEYS_BY_KIND.get(str(manifest.get("kind")), {}) | optional).items():
        if not isinstance(manifest.get(key), expected_type):
            why = f"`{key}` is {manifest.get(key)!r:.60}" if key in manifest else f"`{key}` is missing"
            raise DamagedError(f"{path} is broken", why, GET_AGAIN_HINT)
    state_records = (manifest["others"], *manifest["slots"].values()) if manifest["kind"] == "train" else ()
    for records in (manifest["tensors"], *state_records):
        _check_records(path, records)


def _check_records(path: Path, records: Any) -> None:
    """Raise PrepError unless each tensor has a list of digests."""
    for name, record in records.items() if isinstance(records, dict) else [("the state", records)]:
        row_digests = record.get("digests") if isinstance(record, dict) else None
        if not isinstance(row_digests, list) or not all(_is_row_digest(row_digest) for row_digest in row_digests):
            raise DamagedError(f"{path} is broken", f"{name!r:.60} has no list of digests", GET_AGAIN_HINT)


def _is_row_digest(value: Any) -> bool:
    """Return whether a value is [first row, stop row, digest]."""
    return isinstance(value, list) and [type(part) for part in value] == [int, int, str]


def encode_manifest(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of the manifest file."""
    return json.dumps({"format": FORMAT_VERSION, **content}, indent=1).encode() + b"\n"
