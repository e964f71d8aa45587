"""Read and write the manifest of an output: its source, model and layout, which later commands read from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.engine.digest import digest
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
FILES_KEY = "files"  # records of the files without tensors; see `formats.file_records`
SIZE_KEY, XXH3_KEY, HEADER_KEY = "bytes", "xxh3", "header"  # of such a record
DIGEST_KEY = "digest"  # of the manifest itself; outputs of earlier versions have neither of both
BASE_KEY = "base"  # of adapters: name and digests of the frozen parameters
OPTIONAL_KEYS = {BASE_KEY: dict, FILES_KEY: dict, DIGEST_KEY: str}
SAMPLE_DIGEST_KEY = "sample_digest"  # in the entry of the base: `restore.digest_checks.sample_digest` of its checkpoint
LORA_KEY = "lora"
ADAPTER_KEYS = (LORA_KEY, BASE_KEY)  # of a checkpoint of adapters: their settings, and the model that they belong to
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
        FILES_KEY,
        DIGEST_KEY,
    ),
}  # keys that prep writes; further keys of a training step belong to the trainer


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a folder; return None if there is none, raise PrepError if it is invalid or damaged."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    return decode_manifest(path, read_small_file(path))


def decode_manifest(path: Path, data: bytes) -> dict[str, Any]:
    """Return the content of a manifest file; raise PrepError if it is invalid or damaged."""
    manifest = parse_manifest(path, data)
    if DIGEST_KEY in manifest and manifest[DIGEST_KEY] != manifest_digest(manifest):
        why = f"its content differs from the digest {manifest[DIGEST_KEY]:.40} that it records"
        raise DamagedError(f"{path} is damaged", why, accept_hint(path.parent, MANIFEST_FILE))
    return manifest


def parse_manifest(path: Path, data: bytes) -> dict[str, Any]:
    """Return the content of a manifest file, without a check of its digest.

    Raises:
        PrepError: It is no manifest, or of another format.
    """
    try:
        manifest = load_json(data)
    except ValueError as error:
        raise DamagedError(f"{path} is broken", str(error), GET_AGAIN_HINT) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT_VERSION:
        stored_format = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise PrepError(f"{path} has another format", f"it says {stored_format!r}, this prep reads {FORMAT_VERSION}")
    _check_manifest(path, manifest)
    return manifest


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the XXH3-128 of the canonical JSON of a manifest without its digest: sorted keys, no spaces, ASCII."""
    content = {key: value for key, value in manifest.items() if key != DIGEST_KEY}
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def accept_hint(folder: Path, name: str) -> str:
    """Return the hint for a file unequal to its record in a manifest."""
    return f"`prep verify {folder} --accept {name}` if you changed it on purpose, else {GET_AGAIN_HINT}"


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
    if (FILES_KEY in manifest) != (DIGEST_KEY in manifest):
        why = f"it has only one of `{FILES_KEY}` and `{DIGEST_KEY}`"
        raise DamagedError(f"{path} is broken", why, GET_AGAIN_HINT)
    for name, record in manifest.get(FILES_KEY, {}).items():
        if not _is_file_record(record):
            why = f"the record of {name!r:.60} has no size and digest"
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


def _is_file_record(record: Any) -> bool:
    """Return whether a value is the record of a file."""
    if not isinstance(record, dict) or type(record.get(SIZE_KEY)) is not int:
        return False
    return isinstance(record.get(XXH3_KEY, record.get(HEADER_KEY)), str)


def encode_manifest(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of the manifest file, with its own digest if it lists files."""
    text = json.dumps({"format": FORMAT_VERSION, **content}, indent=1)
    if FILES_KEY in content:
        # tuples and keys that are not text become lists and text: the digest is that of the stored content
        manifest = json.loads(text)
        text = json.dumps({**manifest, DIGEST_KEY: manifest_digest(manifest)}, indent=1)
    return text.encode() + b"\n"
