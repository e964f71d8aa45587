"""The schema of a manifest: its keys, the types of their values, and the defaults of missing keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NotRequired, TypedDict

from prepcli.core.json_values import HFConfig, JsonRecord, JsonValue, Lenient, Omittable
from prepcli.planning.tensors import DEFAULT_DIGEST, CastEntry

# Rules of dropped rows of padding. They are in no model.
PADDING_RULE = "padding taken off"
REPLACED_PADDING_RULE = "padding replaced"


class TensorRecord(TypedDict):
    """Record of a tensor: its values, and the digest of each range of rows.

    `digests` has one entry [first row, one past the last, digest] per range, e.g. [[0, 512, "9f..."]].
    """

    dtype: NotRequired[str]
    shape: NotRequired[Sequence[int]]
    digests: list[tuple[int, int, str]]


class FileRecord(TypedDict):
    """Record of a file: `bytes`, and either `xxh3` of the whole file or `header`.

    The digests of tensors cover the payload of a safetensors or msgpack file. The record of such a file has `header`,
    the digest of the remaining bytes, instead of `xxh3`.
    """

    bytes: int
    xxh3: NotRequired[str]
    header: NotRequired[str]


class LeafRecord(TypedDict):
    """Record of a leaf: its shape, dtype and chunk shape."""

    shape: Sequence[int]
    dtype: str
    chunk: Sequence[int]


class QuantizedRecord(TypedDict):
    """Record of a dequantised weight.

    `codes` is the name of the stored tensor of quantised integers or float8 values, and `dtype` and `shape` describe
    this tensor. No leaf keeps it. `digest` is the digest of the decoded tensor, and empty until the tensor is written.
    """

    format: str
    codes: str
    dtype: str
    shape: list[int]
    digest: str


class ScaleFields(TypedDict):
    """A change of values in a layout. See `planning.libraries.LayoutScale`.

    `sqrt` is the number under the root, and `power` the number of divisions, 1 if it is missing. `root` is the dtype of
    the rounded root, and `offset` the number that is added.
    """

    sqrt: int
    power: NotRequired[int]
    root: NotRequired[str]
    offset: NotRequired[int]


class ScaleRecord(ScaleFields):
    """Record of a tensor with changed values in a layout.

    The way back rounds to the dtype `significant`, if it is not empty. `digests` are those of the changed values in
    Hugging Face order, as in a `TensorRecord`, and `lost` is the number of values that the way back changes. Records of
    earlier versions have one `digest`.
    """

    significant: str
    digests: NotRequired[list[tuple[int, int, str]]]
    digest: NotRequired[str]
    lost: int


class VocabularyRecord(TypedDict):
    """Rows of the vocabulary for tokens, and with padding."""

    true: int
    padded: int
    init: NotRequired[str]


# Rows of a vocabulary: token ids are 32-bit integers.
MAX_ROWS = (1 << 31) - 1


class TrainingStateRecord(TypedDict):
    """A training state that came from another framework, or goes to one.

    `step` counts the steps, and `updates` the steps without a skipped update. `optimizer` has the settings of AdamW.
    `left_out` names the parts without a counterpart.
    """

    step: int
    updates: int
    optimizer: Mapping[str, float]
    left_out: Sequence[str]


class ScheduleRecord(TypedDict):
    """The learning rate schedule of a run, as `LRSchedule.manifest_fields` returns it."""

    kind: str
    peak: float
    warmup: NotRequired[int]
    decay: NotRequired[int]
    end: NotRequired[float]
    initial: NotRequired[float]
    cooldown: NotRequired[int]
    warmup_shape: NotRequired[str]
    cooldown_shape: NotRequired[str]
    cooldown_waves: NotRequired[float]
    cycles: NotRequired[int]


class TokenRecord(TypedDict):
    """An added token."""

    id: int
    content: str


class AddedTokensRecord(TypedDict):
    """The tokens that `add-tokens` added, and the values of their rows."""

    init: str
    count: int
    tokens: Sequence[TokenRecord]


class OriginRecord(TypedDict, total=False):
    """Identity of the source of an output.

    `manifest` is the digest of its manifest, and `commit` its commit on the hub. The start model of a training step
    also has the `name` in the recipe, and without a manifest a `sample_digest` of its first rows. `is_random` means
    random parameters, without a checkpoint.
    """

    name: str
    is_random: bool
    commit: str
    manifest: str
    sample_digest: str


class MergedAdapter(TypedDict):
    """The adapter that `merge` added to the weights. `manifest` is the digest of its manifest."""

    adapter: str
    scaling: float
    tensors: int
    manifest: NotRequired[str]


class MetricRecord(TypedDict):
    """Another metric of an evaluation than the loss. `best_is` is `lowest` or `highest`."""

    name: str
    value: float
    best_is: str


# `from` and `to` are dtypes, `values` and `changed` the numbers of all and of the changed values.
CastCounts = TypedDict("CastCounts", {"from": str, "to": str, "values": int, "changed": int})
TensorRecords = Mapping[str, TensorRecord]
NOTHING: Mapping[str, Any] = {}
NO_ORIGIN: OriginRecord = {}


class PrepFields(JsonRecord):
    """The keys that prep writes itself. An earlier version of prep may have omitted a key."""

    # Version of the format.
    format: int = 1
    # `init`, `train`, or the kind of a folder without an Orbax tree.
    kind: str = ""
    # The command line, the digest of the plan, and the version of prep.
    request: str = ""
    plan: str = ""
    prep: str = ""
    # Name of the source, and the stamps of its files.
    source: Lenient[Mapping[str, object]] = NOTHING
    origin: Lenient[OriginRecord] = NO_ORIGIN
    command: Omittable[str] = None
    name: object = None
    family: str | None = None
    config: HFConfig = NOTHING
    vocab: VocabularyRecord | None = None
    layout: str | None = None
    # Mesh that the chunks were divided for.
    mesh: str | None = None
    # Partition rules that replace the default ones.
    rules: Sequence[str] = ()
    # Whether layers are stacked, and on which axis.
    scan: bool = True
    scan_axis: int = 0
    # Whether names of tensors have the family's prefix.
    prefixed: bool = True
    # Whether the output head is the embedding.
    tied: bool = False
    step: Omittable[int] = None
    # Tensors, rows and state slots of the source that are not in the output.
    dropped: Sequence[Mapping[str, object]] = ()
    # Parameters by the names of the Hugging Face layout, tensors of the optimizer by slot (`opt.mu`) and name of the
    # parameter, and leaves of a training state that belong to no parameter.
    tensors: TensorRecords = NOTHING
    slots: Mapping[str, TensorRecords] = NOTHING
    others: TensorRecords = NOTHING
    # Algorithm of the digests of tensors. See `engine.digest`.
    tensor_digest: str = DEFAULT_DIGEST
    # In the order of their checksums.
    leaves: Mapping[str, LeafRecord] = NOTHING
    # Method and level of compression, e.g. `zstd:3`, and the stored size of each compressed data file.
    compress: Omittable[str] = None
    packed: Mapping[str, int] = NOTHING
    casts: Sequence[CastEntry] = ()
    # A value of `item_storage.ItemStorage` other than `ocdbt`, or `levanter` for a checkpoint of Levanter.
    # Omitted for an OCDBT database of zarr 2.
    storage: Omittable[str] = None
    # Quantisation config of the model whose weights were decoded, and their records if their scales were kept.
    quantization: Mapping[str, object] = NOTHING
    quantized: Mapping[str, QuantizedRecord] = NOTHING
    # Tensors with a scale in the tree of another trainer.
    scales: Mapping[str, ScaleRecord] = NOTHING
    # Record of the multimodal model, if the parameters are its text part: its type and name prefixes.
    towers: Omittable[Mapping[str, object]] = None
    # Name and digest of the tensor map. An export also has its content.
    map: Mapping[str, object] = NOTHING
    # Record of the checksum file. Its reader checks the type.
    checksums: object = None
    # By path in the output. Manifests of early versions list no files and have no digest.
    files: Mapping[str, FileRecord] = NOTHING
    # Digest of the other keys.
    digest: Omittable[str] = None


class Manifest(PrepFields):
    """The content of a manifest. A training step has further keys, which belong to the trainer.

    Only `read_manifest` and its like check the types of the keys: construct a manifest from their result, or from
    fields that prep is about to write.

    Example:
        >>> manifest = Manifest(kind="init", scan=False)
        >>> manifest.scan, manifest.mesh, manifest
        (False, None, {'kind': 'init', 'scan': False})
    """

    # Settings of trained adapters. Their reader checks the type.
    lora: object = None
    # Name and digests of the model that adapters belong to.
    base: Mapping[str, object] = NOTHING
    # Layer and expert numbers of the tensors in each leaf of a verbatim checkpoint.
    stacked: Mapping[str, Sequence[Sequence[int]]] = NOTHING
    merged: Lenient[MergedAdapter | None] = None
    added_tokens: Omittable[AddedTokensRecord] = None
    training_state: Omittable[TrainingStateRecord] = None
    # Of a training step: the text of its recipe, versions and settings that rounding depends on, the identity of the
    # data, the sequences of a step, the schedule of the learning rate, and the name of a user's loss.
    recipe: str = ""
    # Missing in a step of an earlier version.
    environment: Omittable[Mapping[str, object]] = None
    data: Lenient[str] = ""
    batch_size: Lenient[int] = 1
    rate: Omittable[ScheduleRecord] = None
    loss_fn: object = None
    # Loss or another metric of the evaluation after the step. Only values of the same sequences are comparable, and of
    # the same number of tokens between two windows: the stride, which is missing for sequences side by side.
    eval_loss: Lenient[float | None] = None
    eval_metric: Lenient[MetricRecord | None] = None
    eval_sequences: Lenient[int | None] = None
    eval_stride: Lenient[int | None] = None
    # Evaluations so far, for `eval.patience`. See `Patience`.
    patience: Lenient[Mapping[str, JsonValue]] = NOTHING
    # Of the cast to the dtype of the saved parameters.
    param_cast: Lenient[CastCounts | None] = None

    @property
    def is_tree(self) -> bool:
        """Whether the manifest describes an Orbax tree: an init or a training step."""
        return self.kind in KEYS_BY_KIND

    @property
    def is_for_trainer(self) -> bool:
        """Whether the manifest describes an Orbax item in the layout of another trainer."""
        return self.kind == "hf" and bool(self.leaves)

    @property
    def is_training_step(self) -> bool:
        """Whether the checkpoint has a training state in addition to the parameters."""
        return self.kind == "train"

    @property
    def is_adapter(self) -> bool:
        """Whether the parameters belong to an adapter."""
        return "lora" in self

    @property
    def lost_values(self) -> int:
        """Number of values that the scale of another trainer's layout has rounded."""
        return sum(record["lost"] for record in self.scales.values())

    @property
    def earlier_drops(self) -> Manifest:
        """Entry of an output's manifest with the parts of the model that this checkpoint lacks. Empty without any."""
        rules = (PADDING_RULE, REPLACED_PADDING_RULE)
        entries = [entry for entry in self.dropped if entry.get("rule") not in rules]
        return Manifest(dropped=entries) if entries else Manifest()

    @property
    def may_lack_prediction(self) -> bool:
        """Whether the writing version left out multi-token prediction, and no earlier drop is recorded.

        That version wrote `dropped` before `tensors`. Later versions do so only to continue the records of the source.
        """
        keys = [key for key in self if key in ("dropped", "tensors")]
        return keys == ["dropped", "tensors"] and not self.earlier_drops

    @property
    def source_name(self) -> str:
        """Name of the source of a conversion, as the user named it. Empty if it is not recorded."""
        name = self.source.get("name")
        return name if isinstance(name, str) else ""

    @property
    def source_files(self) -> Sequence[Mapping[str, object]]:
        """Stamps of the files of the source. Empty if they are malformed."""
        files = self.source.get("files")
        if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
            return ()
        return files


PREP_KEYS = frozenset(PrepFields.__annotations__)

# Keys that later commands read without a default.
REQUIRED_KEYS: Final = ("kind", "request", "plan", "config", "tensors", "prefixed", "tied")
LAYOUT_KEYS: Final = ("scan", "scan_axis", "rules")
# The kinds of a manifest that describes an Orbax tree, with the keys that they add.
KEYS_BY_KIND: Final = {
    "init": LAYOUT_KEYS,
    "train": (*LAYOUT_KEYS, "step", "slots", "others"),
}
