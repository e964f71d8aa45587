"""The keys of a manifest and the types of their values, for plans and for `formats.manifest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NotRequired, TypedDict

from prepcli.core.json_types import HFConfig
from prepcli.planning.tensors import CastEntry

# Mark of a key with a type that its reader checks: a manifest with another value there is read all the same.
CHECKED_BY_READER: Final = "checked by its reader"
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
    """A change of values in a layout. See `planning.layout_scales.LayoutScale`.

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


# Key of the manifest with the training state of another framework.
TRAINING_STATE_KEY = "training_state"


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


class SourceRecord(TypedDict):
    """Name of the source of a conversion, and the stamps of its files."""

    name: str
    files: Sequence[Mapping[str, object]]


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


TensorRecords = Mapping[str, TensorRecord]


class PrepFields(TypedDict, total=False):
    """The keys that prep writes itself. An earlier version of prep may have omitted a key."""

    # Version of the format.
    format: int
    kind: str
    request: str
    plan: str
    prep: str
    # A malformed record proves no link of a chain.
    source: Annotated[SourceRecord, CHECKED_BY_READER]
    origin: Annotated[OriginRecord, CHECKED_BY_READER]
    command: str
    # A value that is no text is ignored.
    name: object
    family: str | None
    config: HFConfig
    vocab: VocabularyRecord | None
    layout: str | None
    mesh: str | None
    rules: Sequence[str]
    scan: bool
    scan_axis: int
    prefixed: bool
    tied: bool
    step: int
    dropped: Sequence[Mapping[str, object]]
    tensors: TensorRecords
    leaves: Mapping[str, LeafRecord]
    slots: Mapping[str, TensorRecords]
    others: TensorRecords
    compress: str
    casts: Sequence[CastEntry]
    packed: Mapping[str, int]
    # A value of `item_storage.Storage` other than `ocdbt`, or `levanter` for a checkpoint of Levanter.
    # Omitted for an OCDBT database of zarr 2.
    storage: str
    quantization: Mapping[str, object]
    quantized: Mapping[str, QuantizedRecord]
    # Tensors with a scale in the tree of another trainer.
    scales: Mapping[str, ScaleRecord]
    # Record of the multimodal model, if the parameters are its text part.
    towers: Mapping[str, object]
    # Name and digest of the tensor map. An export also has its content.
    map: Mapping[str, object]
    # Its reader checks the type.
    checksums: object
    files: dict[str, FileRecord]
    digest: str


class ManifestFields(PrepFields, total=False):
    """The content of a manifest. A training step has further keys, which belong to the trainer."""

    # Settings of trained adapters. Their reader checks the type.
    lora: object
    # The model that adapters belong to.
    base: Mapping[str, object]
    # Layer and expert numbers of the tensors in each leaf of a verbatim checkpoint.
    stacked: Mapping[str, Sequence[Sequence[int]]]
    merged: Annotated[MergedAdapter, CHECKED_BY_READER]
    added_tokens: AddedTokensRecord
    # Loss or another metric of a step, and the sequences that it was computed on. Their reader checks the types.
    eval_loss: object
    eval_metric: object
    eval_sequences: object
    eval_stride: object
    # Evaluations of a run that may end early.
    patience: object
    training_state: TrainingStateRecord
    # Of a training step: the text of its recipe, the schedule of its learning rate, and what rounding depends on.
    recipe: str
    rate: ScheduleRecord
    environment: Mapping[str, object]


PREP_KEYS = frozenset(PrepFields.__annotations__)
