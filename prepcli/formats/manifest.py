"""The manifest of an output, `prep-manifest.json`: its source, model, layout and digests.

prep writes it last, so an output without a manifest is incomplete. Later commands read from it what the files of
other libraries do not say: how leaves map to tensors, and which bytes each of them must have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from prepcli.core.errors import GET_AGAIN_HINT, Command, DamagedError, Option, PrepError, text
from prepcli.core.json_values import find_type_fault, load_json, quote_name
from prepcli.engine.digest import digest
from prepcli.formats.orbax import MODEL_ITEMS, find_item
from prepcli.planning.layout_scales import is_scale_record
from prepcli.planning.manifest_fields import (
    KEYS_BY_KIND,
    PREP_KEYS,
    REQUIRED_KEYS,
    Manifest,
    OriginRecord,
    TensorRecord,
)
from prepcli.planning.tensors import ITEM_BITS
from prepcli.stores.paths import AnyPath, PathT
from prepcli.stores.reading import read_small_file

MANIFEST_FILE = "prep-manifest.json"
# Item of a training step. The step's manifest is in the parent folder.
STATE_ITEM = "state"
# Step of a model that prep writes for another trainer.
EXPORTED_STEP = 0
FORMAT_VERSION = 1

# An adapter's record of its base model has this key. `restore.digest_checks.sample_digest` computes the value.
SAMPLE_DIGEST_KEY = "sample_digest"


def origin_record(manifest: Manifest | None, commit: str | None) -> OriginRecord:
    """Return the identity of a checkpoint. Empty if it has neither a manifest with a digest nor a commit.

    Args:
        manifest: Manifest of the checkpoint, if prep wrote it.
        commit: Commit of the checkpoint on the hub.
    """
    record: OriginRecord = {}
    if commit is not None:
        record["commit"] = commit
    # Manifests of early versions have no digest.
    if manifest is not None and manifest.digest is not None:
        record["manifest"] = manifest.digest
    return record


def step_fields(manifest: Manifest) -> Manifest:
    """Return the keys of a training step that its copies keep: the trainer's, and the number of the step.

    A resumed run reads them.
    """
    removed = PREP_KEYS - {"step"}
    return Manifest(**{key: value for key, value in manifest.items() if key not in removed})


def adapter_fields(manifest: Manifest) -> Manifest:
    """Return the keys of a checkpoint of adapters: their settings and their base. Empty for other checkpoints."""
    return Manifest(**{key: manifest[key] for key in ("lora", "base") if key in manifest})


# The manifest of a checkpoint that prep did not write: it is false, and every attribute has its default.
NO_MANIFEST = Manifest()

# The folder and the bytes of `unwritten_manifest`.
_UNWRITTEN: ContextVar[tuple[AnyPath, bytes] | None] = ContextVar(
    "unwritten_manifest", default=None
)


@contextmanager
def unwritten_manifest(folder: AnyPath, data: bytes) -> Iterator[None]:
    """Let `read_manifest` return the manifest in `data` for `folder`, inside the `with` block.

    The manifest file is not read meanwhile. A command checks an output against new records this way, and writes
    them to the file only if the check succeeds.

    Args:
        folder: Folder of an output.
        data: Bytes of the new manifest file, not yet written.
    """
    token = _UNWRITTEN.set((folder.resolve(), data))
    try:
        yield
    finally:
        _UNWRITTEN.reset(token)


def read_manifest(folder: AnyPath) -> Manifest | None:
    """Read the manifest of a folder, if there is one.

    Raises:
        PrepError: The manifest is invalid or damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    unwritten = _UNWRITTEN.get()
    if unwritten is not None and unwritten[0] == folder.resolve():
        return decode_manifest(path, unwritten[1])
    return decode_manifest(path, read_small_file(path))


def decode_manifest(path: AnyPath, data: bytes) -> Manifest:
    """Decode the bytes of a manifest file and check its digest.

    Raises:
        PrepError: The manifest is invalid or damaged.
    """
    manifest = parse_manifest(path, data)
    # Outputs of early versions have no digest to compare.
    recorded = manifest.digest
    if recorded is not None and recorded != manifest_digest(manifest):
        why = f"its content differs from the digest {recorded:.40} that it records"
        raise DamagedError(f"{path} is damaged", why, accept_hint(path.parent, MANIFEST_FILE))
    return manifest


def parse_manifest(path: AnyPath, data: bytes) -> Manifest:
    """Decode the bytes of a manifest file without a check of its digest.

    Raises:
        PrepError: The file is not a manifest, or has another format version.
    """
    try:
        fields = load_json(data)
    except ValueError as error:
        raise DamagedError(f"{path} is broken", str(error), GET_AGAIN_HINT) from error
    if not isinstance(fields, dict):
        why = f"it holds a JSON {type(fields).__name__}, not an object"
        raise DamagedError(f"{path} is broken", why, GET_AGAIN_HINT)
    version = fields.get("format")
    if version != FORMAT_VERSION:
        why = f"its `format` is {version!r:.80}, this version of prep reads {FORMAT_VERSION}"
        what = f"{path} has an unsupported format version"
        raise PrepError(what, why, "install the version of prep that wrote it")
    manifest = Manifest(**fields)
    if fault := find_type_fault(fields, Manifest) or _find_fault(manifest):
        raise DamagedError(f"{path} is broken", fault, GET_AGAIN_HINT)
    return manifest


def manifest_digest(fields: Mapping[str, object]) -> str:
    """Return the XXH3-128 of the canonical JSON of a manifest without its digest: sorted keys, no spaces, ASCII."""
    content = {key: value for key, value in fields.items() if key != "digest"}
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def encode_manifest(fields: Mapping[str, object]) -> bytes:
    """Return the bytes of the manifest file, with its own digest if it lists files."""
    content: dict[str, object] = {"format": FORMAT_VERSION, **fields}
    if "files" in fields:
        # JSON turns tuples into lists and keys into text. The digest is one of the stored
        # content, which a reader gets back, so it is computed from the text and not from `fields`.
        # The first text has no indent: Python encodes indented JSON without its encoder in C.
        content = json.loads(json.dumps(content))
        content["digest"] = manifest_digest(content)
    return json.dumps(content, indent=1).encode() + b"\n"


def accept_hint(folder: AnyPath, name: str) -> str:
    """Return the hint for a file unequal to its record in a manifest."""
    command = Command("verify", str(folder), Option("accept", name))
    return text("{} if you changed it on purpose, else {}", command, GET_AGAIN_HINT)


def foreign_output_error(output: str) -> PrepError:
    """Return the error for an output path at which something exists that prep did not write."""
    why = f"it has no {MANIFEST_FILE}: prep only replaces its own outputs"
    hint = text("choose another {}, or remove it", Option("out"))
    return PrepError(f"{output} exists and is something else", why, hint)


def find_manifest_folder(path: PathT) -> PathT:
    """Return the folder with the manifest of `path`: its item, training step or last step of a run.

    Return `path` itself if it has no item.
    """
    item = find_item(path)
    if item is None:
        return path
    if (item / MANIFEST_FILE).exists():
        return item
    # A training step has its manifest next to the item: RUN/10/state and RUN/10/prep-manifest.json.
    is_state_of_step = item.name == STATE_ITEM and (item.parent / MANIFEST_FILE).exists()
    if is_state_of_step:
        return item.parent
    # An export for another trainer has one step: OUT/0/items and OUT/prep-manifest.json.
    export = item.parent.parent
    is_item_of_export = item.name in MODEL_ITEMS and item.parent.name.isdecimal()
    if is_item_of_export and (export / MANIFEST_FILE).exists():
        return export
    return item


def _find_fault(manifest: Manifest) -> str:
    """Return what is wrong with the values of a manifest of correct types, or empty."""
    for key in (*REQUIRED_KEYS, *KEYS_BY_KIND.get(manifest.kind, ())):
        if key not in manifest:
            return f"`{key}` is missing"
    # One version of prep added both keys. If only one is there, the other was removed by hand.
    if ("files" in manifest) != ("digest" in manifest):
        return "it has only one of `files` and `digest`"
    for name, file in manifest.files.items():
        if "xxh3" not in file and "header" not in file:
            return f"the record of {quote_name(name)} has no size and digest"
    for records in (manifest.tensors, *manifest.slots.values(), manifest.others):
        for name, record in records.items():
            if fault := _find_record_fault(record):
                return f"the record of {quote_name(name)} is invalid: {fault}"
    for name, record in manifest.quantized.items():
        if min(record["shape"], default=0) < 0 or record["dtype"] not in ITEM_BITS:
            return f"the record of the quantised {quote_name(name)} is invalid"
    for name, record in manifest.scales.items():
        if not is_scale_record(record):
            return f"the scale of {quote_name(name)} is invalid"
    return ""


def _find_record_fault(record: TensorRecord) -> str:
    """Return what is wrong with the record of a tensor, or empty. Early versions recorded neither dtype nor shape."""
    dtype = record.get("dtype")
    if dtype is not None and dtype not in ITEM_BITS:
        return f"its dtype is {quote_name(dtype)}"
    shape = record.get("shape", ())
    if min(shape, default=0) < 0:
        return f"its shape is {[*shape]}"
    next_row = 0
    for first, stop, _ in record["digests"]:
        if first != next_row or stop < first:
            return f"it has a digest of rows {first} to {stop} after row {next_row}"
        next_row = stop
    return ""
