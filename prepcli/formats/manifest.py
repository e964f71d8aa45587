"""The manifest of an output, `prep-manifest.json`: its source, model, layout and digests.

prep writes it last, so an output without a manifest is incomplete. Later commands read from it what the files of
other libraries do not say: how leaves map to tensors, and which bytes each of them must have.
"""

# pyright: reportTypedDictNotRequiredAccess=false
# `parse_manifest` checks that the required keys exist.

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from prepcli.core.errors import GET_AGAIN_HINT, Command, DamagedError, Option, PrepError, text
from prepcli.core.json_types import HFConfig, JsonObject
from prepcli.core.json_values import load_json
from prepcli.engine.digest import digest
from prepcli.formats.orbax import MODEL_ITEMS, find_item
from prepcli.formats.typed_json import find_type_fault
from prepcli.formats.untrusted import quote_name, read_small_file
from prepcli.planning.layout_scales import is_scale_record
from prepcli.planning.manifest_fields import (
    PADDING_RULE,
    PREP_KEYS,
    REPLACED_PADDING_RULE,
    FileRecord,
    LeafRecord,
    ManifestFields,
    MergedAdapter,
    OriginRecord,
    QuantizedRecord,
    ScaleRecord,
    SourceRecord,
    TensorRecord,
    TensorRecords,
)
from prepcli.planning.tensors import ITEM_BITS, CastEntry

MANIFEST_FILE = "prep-manifest.json"
# Item of a training step. The step's manifest is in the parent folder.
STATE_ITEM = "state"
# Step of a model that prep writes for another trainer.
EXPORTED_STEP = 0
FORMAT_VERSION = 1

FILES_KEY: Final = "files"
DIGEST_KEY: Final = "digest"
BASE_KEY: Final = "base"
LORA_KEY: Final = "lora"
QUANTIZATION_KEY: Final = "quantization"
QUANTIZED_KEY: Final = "quantized"
SCALES_KEY: Final = "scales"
TOWERS_KEY: Final = "towers"
ORIGIN_KEY: Final = "origin"
DROPPED_KEY: Final = "dropped"
SIZE_KEY: Final = "bytes"
XXH3_KEY: Final = "xxh3"
HEADER_KEY: Final = "header"
# An adapter's record of its base model has this key. `restore.digest_checks.sample_digest` computes the value.
SAMPLE_DIGEST_KEY = "sample_digest"

# Keys that later commands read without a default.
REQUIRED_KEYS = ("kind", "request", "plan", "config", "tensors", "prefixed", "tied")
LAYOUT_KEYS = ("scan", "scan_axis", "rules")
STATE_KEYS = ("step", "slots", "others")
# The kinds of a manifest that describes an Orbax tree, with the keys that they add.
KEYS_BY_KIND = {"init": LAYOUT_KEYS, "train": LAYOUT_KEYS + STATE_KEYS}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a manifest, with a typed attribute for each key that commands read.

    `fields` is the JSON object as it is stored, in its order, with the keys of later versions.
    The attributes read from it, so the stored content and its digest never depend on this class.
    An attribute has a default where earlier versions of prep wrote no such key.

    Only `read_manifest` and its like check the types of the keys: construct a manifest from
    their result, or from fields that prep is about to write.

    Example:
        >>> Manifest({"kind": "init", "scan": False, "mesh": "1,2,1"}).mesh
        '1,2,1'
        >>> NO_MANIFEST.scan, bool(NO_MANIFEST)
        (True, False)
    """

    fields: ManifestFields

    def __bool__(self) -> bool:
        """Return whether there is a manifest. Only NO_MANIFEST is false."""
        return bool(self.fields)

    @property
    def kind(self) -> str:
        """`init`, `train`, or the kind of a folder without an Orbax tree. Empty without a manifest."""
        return self.fields.get("kind", "")

    @property
    def is_tree(self) -> bool:
        """Return whether the manifest describes an Orbax tree: an init or a training step."""
        return self.kind in KEYS_BY_KIND

    @property
    def is_for_trainer(self) -> bool:
        """Return whether the manifest describes an Orbax item in the layout of another trainer."""
        return self.kind == "hf" and self.leaves is not None and bool(self.leaves)

    @property
    def is_training_step(self) -> bool:
        """Return whether the checkpoint has a training state in addition to the parameters."""
        return self.kind == "train"

    @property
    def towers(self) -> Mapping[str, object] | None:
        """Record of the multimodal model with these parameters: its type and name prefixes. None for other models."""
        return self.fields.get(TOWERS_KEY)

    @property
    def is_adapter(self) -> bool:
        """Return whether the parameters belong to an adapter."""
        return LORA_KEY in self.fields

    @property
    def request(self) -> str:
        """Command line that made the output."""
        return self.fields["request"]

    @property
    def plan(self) -> str:
        """Digest of the plan that made the output. Empty in a damaged manifest."""
        return self.fields.get("plan", "")

    @property
    def command(self) -> str | None:
        """Name of the command that made the output."""
        return self.fields.get("command")

    @property
    def name(self) -> object:
        """Name of the model. Its type is not checked."""
        return self.fields.get("name")

    @property
    def config(self) -> HFConfig:
        """Return the model's config.json. Empty without a manifest."""
        return self.fields.get("config", {})

    @property
    def family(self) -> str | None:
        """Name of the model family."""
        return self.fields.get("family")

    @property
    def layout(self) -> str | None:
        """Name of the layout of the tree."""
        return self.fields.get("layout")

    @property
    def mesh(self) -> str | None:
        """Mesh that the chunks were divided for."""
        return self.fields.get("mesh")

    @property
    def rules(self) -> Sequence[str]:
        """Partition rules that replace the default ones."""
        return self.fields.get("rules", ())

    @property
    def scan(self) -> bool:
        """Return whether layers are stacked."""
        return self.fields.get("scan", True)

    @property
    def scan_axis(self) -> int:
        """Axis on which layers are stacked."""
        return self.fields.get("scan_axis", 0)

    @property
    def is_prefixed(self) -> bool:
        """Return whether names of tensors have the family's prefix."""
        return self.fields.get("prefixed", True)

    @property
    def is_tied(self) -> bool:
        """Return whether the output head is the embedding."""
        return self.fields["tied"]

    @property
    def step(self) -> int | None:
        """Number of a training step."""
        return self.fields.get("step")

    @property
    def tensors(self) -> TensorRecords:
        """Records of the parameters, by the names of the Hugging Face layout."""
        return self.fields.get("tensors", {})

    @property
    def slots(self) -> Mapping[str, TensorRecords]:
        """Records of the optimizer's tensors, by slot (`opt.mu`) and name of the parameter."""
        return self.fields.get("slots", {})

    @property
    def others(self) -> TensorRecords:
        """Records of the leaves of a training state that belong to no parameter."""
        return self.fields.get("others", {})

    @property
    def leaves(self) -> Mapping[str, LeafRecord] | None:
        """Shape and chunk shape of each leaf, in the order of their checksums."""
        return self.fields.get("leaves")

    @property
    def has_file_records(self) -> bool:
        """Return whether the manifest lists its files. Manifests of early versions do not."""
        return FILES_KEY in self.fields

    @property
    def files(self) -> Mapping[str, FileRecord]:
        """Records of the files, by path in the output."""
        return self.fields.get(FILES_KEY, {})

    @property
    def digest(self) -> str | None:
        """Recorded digest of the manifest itself."""
        return self.fields.get(DIGEST_KEY)

    @property
    def checksums(self) -> object:
        """Record of the checksum file. None if there is no such file. Its type is not checked."""
        return self.fields.get("checksums")

    @property
    def casts(self) -> Sequence[CastEntry]:
        """Counts of the values that casts changed."""
        return self.fields.get("casts", [])

    @property
    def compress(self) -> str | None:
        """Method and level of compression, e.g. `zstd:3`."""
        return self.fields.get("compress")

    @property
    def packed(self) -> Mapping[str, int]:
        """Stored size of each compressed data file. Empty without compression."""
        return self.fields.get("packed", {})

    @property
    def quantization(self) -> Mapping[str, object]:
        """Quantisation config of the model whose weights were decoded. Empty if none were."""
        return self.fields.get(QUANTIZATION_KEY, {})

    @property
    def quantized(self) -> Mapping[str, QuantizedRecord]:
        """Records of the decoded weights, by name. Empty if their scales were not kept."""
        return self.fields.get(QUANTIZED_KEY, {})

    @property
    def scales(self) -> Mapping[str, ScaleRecord]:
        """Records of the tensors with a scale in the tree of another trainer, by name."""
        return self.fields.get(SCALES_KEY, {})

    @property
    def lost_values(self) -> int:
        """Number of values that the scale of another trainer's layout has rounded."""
        return sum(record["lost"] for record in self.scales.values())

    @property
    def dropped(self) -> Sequence[Mapping[str, object]]:
        """Records of the tensors, rows and state slots of the source that are not in the output."""
        return self.fields.get("dropped", ())

    @property
    def earlier_drops(self) -> ManifestFields:
        """Entry of an output's manifest with the parts of the model that this checkpoint lacks. Empty without any."""
        rules = (PADDING_RULE, REPLACED_PADDING_RULE)
        entries = [entry for entry in self.dropped if entry.get("rule") not in rules]
        return {DROPPED_KEY: entries} if entries else {}

    @property
    def may_lack_prediction(self) -> bool:
        """Return whether the writing version left out multi-token prediction, and no earlier drop is recorded.

        That version wrote `dropped` before `tensors`. Later versions do so only to continue the records of the source.
        """
        keys = [key for key in self.fields if key in (DROPPED_KEY, "tensors")]
        return keys == [DROPPED_KEY, "tensors"] and not self.earlier_drops

    @property
    def source_name(self) -> str:
        """Name of the source of a conversion, as the user named it. Empty if it is not recorded."""
        source = self.fields.get("source")
        name = source.get("name") if isinstance(source, dict) else None
        return name if isinstance(name, str) else ""

    @property
    def source_files(self) -> Sequence[Mapping[str, object]]:
        """Stamps of the files of the source. Empty if they are malformed."""
        source = self.fields.get("source", {"name": "", "files": ()})
        return () if find_type_fault(source, SourceRecord) else source["files"]

    @property
    def origin(self) -> OriginRecord:
        """Identity of the source of a conversion, or of the start of a training run. Empty if it is malformed."""
        origin = self.fields.get(ORIGIN_KEY, {})
        return {} if find_type_fault(origin, OriginRecord) else origin

    @property
    def merged_adapter(self) -> MergedAdapter | None:
        """The adapter of a merged model. None for other outputs, and if its name is malformed."""
        merged = self.fields.get("merged")
        if isinstance(merged, dict) and isinstance(merged.get("adapter"), str):
            return merged
        return None

    @property
    def base(self) -> Mapping[str, object]:
        """Name and digests of the model that an adapter belongs to."""
        return self.fields.get(BASE_KEY, {})


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


def step_fields(manifest: Manifest) -> ManifestFields:
    """Return the keys of a training step that its copies keep: the trainer's, and the number of the step.

    A resumed run reads them.
    """
    fields = manifest.fields.copy()
    for key in PREP_KEYS - {"step"}:
        fields.pop(key, None)
    return fields


def adapter_fields(manifest: Manifest) -> ManifestFields:
    """Return the keys of a checkpoint of adapters: their settings and their base. Empty for other checkpoints."""
    fields: ManifestFields = {}
    if LORA_KEY in manifest.fields:
        fields[LORA_KEY] = manifest.fields[LORA_KEY]
    if BASE_KEY in manifest.fields:
        fields[BASE_KEY] = manifest.fields[BASE_KEY]
    return fields


# The manifest of a checkpoint that prep did not write: every attribute has its default.
NO_MANIFEST = Manifest({})


# The folder and the bytes of `unwritten_manifest`.
_UNWRITTEN: ContextVar[tuple[Path, bytes] | None] = ContextVar("unwritten_manifest", default=None)


@contextmanager
def unwritten_manifest(folder: Path, data: bytes) -> Iterator[None]:
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


def read_manifest(folder: Path) -> Manifest | None:
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


def decode_manifest(path: Path, data: bytes) -> Manifest:
    """Decode the bytes of a manifest file and check its digest.

    Raises:
        PrepError: The manifest is invalid or damaged.
    """
    manifest = parse_manifest(path, data)
    # Outputs of early versions have no digest to compare.
    recorded = manifest.digest
    if recorded is not None and recorded != manifest_digest(manifest.fields):
        why = f"its content differs from the digest {recorded:.40} that it records"
        raise DamagedError(f"{path} is damaged", why, accept_hint(path.parent, MANIFEST_FILE))
    return manifest


def parse_manifest(path: Path, data: bytes) -> Manifest:
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
    if fields.get("format") != FORMAT_VERSION:
        raise _version_error(path, fields.get("format"))
    _check_manifest(path, fields)
    # The check has narrowed the keys that later commands read.
    return Manifest(cast("ManifestFields", fields))


def _version_error(path: Path, version: object) -> PrepError:
    why = f"its `format` is {version!r:.80}, this version of prep reads {FORMAT_VERSION}"
    what = f"{path} has an unsupported format version"
    return PrepError(what, why, "install the version of prep that wrote it")


def manifest_digest(fields: Mapping[str, object]) -> str:
    """Return the XXH3-128 of the canonical JSON of a manifest without its digest: sorted keys, no spaces, ASCII."""
    content = {key: value for key, value in fields.items() if key != DIGEST_KEY}
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def encode_manifest(fields: Mapping[str, object]) -> bytes:
    """Return the bytes of the manifest file, with its own digest if it lists files."""
    content: dict[str, object] = {"format": FORMAT_VERSION, **fields}
    if FILES_KEY in fields:
        # JSON turns tuples into lists and keys into text. The digest is one of the stored
        # content, which a reader gets back, so it is computed from the text and not from `fields`.
        # The first text has no indent: Python encodes indented JSON without its encoder in C.
        content = json.loads(json.dumps(content))
        content[DIGEST_KEY] = manifest_digest(content)
    return json.dumps(content, indent=1).encode() + b"\n"


def accept_hint(folder: Path, name: str) -> str:
    """Return the hint for a file unequal to its record in a manifest."""
    command = Command("verify", str(folder), Option("accept", name))
    return text("{} if you changed it on purpose, else {}", command, GET_AGAIN_HINT)


def foreign_output_error(output: str) -> PrepError:
    """Return the error for an output path at which something exists that prep did not write."""
    why = f"it has no {MANIFEST_FILE}: prep only replaces its own outputs"
    hint = text("choose another {}, or remove it", Option("out"))
    return PrepError(f"{output} exists and is something else", why, hint)


def find_manifest_folder(path: Path) -> Path:
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


def _check_manifest(path: Path, fields: JsonObject) -> None:
    """Raise PrepError unless the manifest has all keys that later commands read, and values of the declared types."""
    if fault := find_type_fault(fields, ManifestFields) or _find_fault(
        cast("ManifestFields", fields)
    ):
        raise DamagedError(f"{path} is broken", fault, GET_AGAIN_HINT)


def _find_fault(fields: ManifestFields) -> str:
    """Return what is wrong with the values of a manifest of correct types, or empty."""
    for key in (*REQUIRED_KEYS, *KEYS_BY_KIND.get(fields.get("kind", ""), ())):
        if key not in fields:
            return f"`{key}` is missing"
    # One version of prep added both keys. If only one is there, the other was removed by hand.
    if (FILES_KEY in fields) != (DIGEST_KEY in fields):
        return f"it has only one of `{FILES_KEY}` and `{DIGEST_KEY}`"
    for name, file in fields.get(FILES_KEY, {}).items():
        if XXH3_KEY not in file and HEADER_KEY not in file:
            return f"the record of {quote_name(name)} has no size and digest"
    groups = [fields["tensors"], *fields.get("slots", {}).values(), fields.get("others", {})]
    for records in groups:
        for name, record in records.items():
            if fault := _find_record_fault(record):
                return f"the record of {quote_name(name)} is invalid: {fault}"
    for name, record in fields.get(QUANTIZED_KEY, {}).items():
        if min(record["shape"], default=0) < 0 or record["dtype"] not in ITEM_BITS:
            return f"the record of the quantised {quote_name(name)} is invalid"
    for name, record in fields.get(SCALES_KEY, {}).items():
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
