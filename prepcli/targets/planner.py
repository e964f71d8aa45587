"""The planner of all outputs: a draft, which edits have made from a source, and a layout become a plan.

An export, for example:

    draft = start_draft(source, stored_rows(source))    # the parameters, as the source has them
    draft = with_rows(draft, 131)                            # edits: each one returns a new draft
    placed = place_safetensors(draft, shard_nbytes)          # a layout: where each tensor is written
    plan = make_plan(draft, placed, command="export", request=line, name="llama")

Streams, settings and small files follow from the draft and its layout, not from the command.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prepcli.algebra.axis_map import ParsedAxisMap
from prepcli.core.json_values import HFConfig
from prepcli.engine.casts import LowRankUpdate, value_operations
from prepcli.engine.fills import Fill
from prepcli.formats.manifest import NO_MANIFEST, adapter_fields, step_fields
from prepcli.models.partition import Spec
from prepcli.planning.arrays import Locations
from prepcli.planning.item_storage import Compression
from prepcli.planning.libraries import LayoutScale
from prepcli.planning.manifest_fields import PADDING_RULE, Manifest
from prepcli.planning.plan import (
    DroppedTensor,
    OutputFile,
    OutputLeaf,
    Plan,
    SmallFile,
    Stream,
    ValueOperation,
)
from prepcli.planning.tensors import (
    DECODED,
    DEFAULT_DIGEST,
    OPT_STATE,
    OPT_STATE_RULE,
    QUANTIZATION,
    TRAINING_STATE_RULE,
    is_decoded_tensor,
    split_name,
)
from prepcli.sources.adam_state import AdamState
from prepcli.sources.dequantized import quantization_entries
from prepcli.sources.mapped import map_record
from prepcli.sources.model_family import towers_entry
from prepcli.sources.source import (
    HF_FOLDER,
    Source,
    SourceTensor,
    match_source_tensors,
    shift_file_numbers,
)
from prepcli.sources.state_rows import QUANTIZATION_RULE
from prepcli.sources.tensor_match import (
    DEFAULT_MATCH_OPTIONS,
    MatchOptions,
    TensorMatch,
    Vocabulary,
)
from prepcli.sources.vocabulary_tensors import (
    VocabularyTensors,
    check_prediction_rows,
    vocabulary_names,
)
from prepcli.targets.hf_folder import config_files, copied_small_files, output_config


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """Target of a tensor.

    Attributes:
        writes: Locations of the tensor in the output.
        rows: Rows of the tensor in the output, or 1 for a 0-d tensor.
        dtype: Dtype in the output, or empty for the tensor's own.
        scale: Scale of the values in the output, or None.
        update: Matrix to add to the values, or None.
    """

    writes: Locations
    rows: int
    dtype: str = ""
    scale: LayoutScale | None = None
    update: LowRankUpdate | None = None

    def operations(self, dtype: str) -> tuple[ValueOperation, ...]:
        """Return the operations on values of a dtype."""
        return value_operations(dtype, self.dtype or dtype, update=self.update, scale=self.scale)


@dataclass(frozen=True, slots=True)
class VocabResize:
    """Resize of the vocabulary.

    Attributes:
        vocabulary: True and stored size in the source.
        tensors: Names of the tensors with one row per token.
        fill: Fill of the rows missing in the source.
        keeps_padding: Whether padding of the source is copied. Otherwise all rows after the true ones are filled.
        added_count: Number of tokens to add after the true vocabulary, if padding is not copied.
        added_fill: Fill of their rows.
        dropped_rule: Rule of the omitted rows.
        zero_tensors: Names of tensors whose added rows are zeros, e.g. moments: no step has changed the rows.
    """

    vocabulary: Vocabulary
    tensors: Collection[str]
    fill: Fill
    keeps_padding: bool = True
    added_count: int = 0
    added_fill: Fill | None = None
    dropped_rule: str = PADDING_RULE
    zero_tensors: Collection[str] = ()

    def copied_rows(self, tensor: SourceTensor, rows: int) -> int:
        """Return how many rows of a vocabulary tensor are copied to an output with `rows` rows."""
        if self.keeps_padding:
            return min(tensor.shape[0], rows)
        return self.vocabulary.true_size


def output_rows(
    tensors: Iterable[SourceTensor], vocab_tensors: Collection[str], *, vocab_size: int
) -> dict[str, int]:
    """Return the rows of each tensor in an output with `vocab_size` vocabulary rows, or 1 for a 0-d tensor."""
    rows: dict[str, int] = {}
    for tensor in tensors:
        if tensor.name in vocab_tensors:
            rows[tensor.name] = vocab_size
        else:
            rows[tensor.name] = _num_rows(tensor)
    return rows


def _num_rows(tensor: SourceTensor) -> int:
    """Return the rows of a tensor, or 1 for a 0-d tensor."""
    return tensor.shape[0] if tensor.shape else 1


def build_streams(
    source: Source,
    targets: Mapping[str, TensorTarget],
    *,
    resize: VocabResize,
    compared: Collection[str] = (),
) -> tuple[Stream, ...]:
    """Return the streams of all tensors with a target, in the source's order.

    A vocabulary tensor is split into its true rows and its padding. Padding is copied as far as the source has it.

    Raises:
        UsageError: Multi-token prediction has an embedding or a head that would not fit the resized vocabulary.
    """
    has_new_tokens = resize.added_count > 0
    for tensor in source.all_tensors:
        target = targets.get(tensor.name)
        if target is None or tensor.name not in resize.tensors:
            continue
        if has_new_tokens or target.rows != tensor.shape[0]:
            # A tensor of multi-token prediction may not keep its rows while the other ones are resized.
            check_prediction_rows(
                source, resize.tensors, target.rows, has_new_tokens=has_new_tokens
            )
            break
    streams: list[Stream] = []
    for tensor in source.all_tensors:
        target = targets.get(tensor.name)
        if target is None and tensor.name in compared:
            # A tied duplicate has no place in the output. It is read to check that it equals the original.
            target = TensorTarget((), tensor.shape[0])
        if target is None:
            continue
        if tensor.name in resize.tensors:
            streams += _vocab_streams(tensor, target, resize)
        else:
            streams.append(
                Stream(
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    (0, _num_rows(tensor)),
                    tensor.placement,
                    target.writes,
                    target.operations(tensor.dtype),
                )
            )
    return tuple(streams)


def _vocab_streams(
    tensor: SourceTensor, target: TensorTarget, resize: VocabResize
) -> Iterator[Stream]:
    """Yield the streams of a vocabulary tensor: true rows, copied padding by digest range, and filled rows."""
    # A digest covers the rows of one stream. 100 true rows of 128 stored ones, resized to 192, are the
    # streams 0:100, 100:128 (copied padding) and 128:192 (filled). Padding that was filled by several
    # runs has several recorded digests, and becomes one stream for each.
    shape = (max(tensor.shape[0], target.rows), *tensor.shape[1:])
    true_size = resize.vocabulary.true_size
    true_stream = Stream(
        tensor.name,
        tensor.dtype,
        shape,
        (0, true_size),
        tensor.placement,
        target.writes,
        target.operations(tensor.dtype),
    )
    yield true_stream
    kept_rows = resize.copied_rows(tensor, target.rows)
    edges = {true_size, kept_rows}
    edges.update(low for low, _, _ in tensor.digests)
    inside = [edge for edge in edges if true_size <= edge <= kept_rows]
    # E.g. true size 100, 128 stored rows, a digest from row 110: streams 100:110 and 110:128.
    for low, high in itertools.pairwise(sorted(inside)):
        yield replace(true_stream, rows=(low, high))
    added_stop = kept_rows + resize.added_count
    added_fill = resize.added_fill
    if tensor.name in resize.zero_tensors:
        added_fill = Fill("zeros")
    for rows, fill in (
        ((kept_rows, added_stop), added_fill),
        ((added_stop, target.rows), resize.fill),
    ):
        if fill is None or rows[0] >= rows[1]:
            continue
        # New rows of a head's bias are zeros, except for the mean of a token's pieces.
        if len(shape) == 1 and fill.kind != "pieces":
            fill = Fill("zeros")
        # A fill writes values of the output's dtype, so nothing is left to cast. An export fills with zeros, which a
        # root keeps.
        dtype = true_stream.written_dtype
        yield replace(true_stream, dtype=dtype, rows=rows, reads=(), operations=(fill,))


def dropped_state(source: Source) -> Iterator[DroppedTensor]:
    """Yield the parts of a training state other than parameters.

    They are the optimizer slots (subtrees with one leaf per parameter) and each leaf outside of slots.
    """
    groups: dict[str, int] = {}
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot == DECODED:
            continue
        groups[slot or name] = groups.get(slot or name, 0) + tensor.nbytes
    for name, nbytes in groups.items():
        rule = TRAINING_STATE_RULE
        if name == QUANTIZATION:
            rule = QUANTIZATION_RULE
        if name.split(".")[0] == OPT_STATE:
            rule = OPT_STATE_RULE
        yield DroppedTensor(name, nbytes, rule)
    yield from source.extra_entries


def dropped_padding(
    source: Source, targets: Mapping[str, TensorTarget], *, resize: VocabResize
) -> Iterator[DroppedTensor]:
    """Yield the rows of the source's vocabulary left out of the output."""
    for tensor in source.all_tensors:
        target = targets.get(tensor.name)
        if target is None or tensor.name not in resize.tensors:
            continue
        copied_rows = resize.copied_rows(tensor, target.rows)
        if copied_rows < tensor.shape[0]:
            rows = tensor.shape[0] - copied_rows
            # Exact, because all rows have one size: 28 of 128 rows with 1,024 bytes in all are 224 bytes.
            nbytes = rows * tensor.nbytes // tensor.shape[0]
            yield DroppedTensor(
                tensor.name, nbytes, resize.dropped_rule, (copied_rows, tensor.shape[0])
            )


# Keys of the settings after those of the layout, for files of tensors and for prep's own tree. A plan's digest depends
# on their order, and outputs of earlier versions record the digest.
_LAST_FOLDER_KEYS = ("prefixed", "tied", "config", "towers")
_LAST_TREE_KEYS = ("prefixed", "stacked", "towers", "compress", "storage", "tied", "config")
NATIVE_TREE = "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The model of an output before its layout: a source, and what the edits have changed.

    Attributes:
        source: The source. Edits have taken parts out of it, or added files to it.
        rows: Rows of its parameters, by path of their leaf.
        match: The match of its parameters with the leaves of their family.
        resize: The tensors of the vocabulary, and the rows to copy, to fill and to leave out.
        vocabulary: True and stored size in the output.
        tensors: The parameters and towers to write, with the dtypes of the output.
        state_tensors: The training state and the scales of decoded weights to write.
        state: The training state, if it is written in the form of another library.
        dropped: Source tensors without a place in the output, each by a rule.
        left: Other parts of the source without a place in the output.
        dtype: Requested dtype of the parameters, or None.
        scales: Scales of values in the tree of another library, by tensor.
        updates: Matrices of an adapter to add to values, by tensor.
        replaced: Tensors of an adapter in place of the base's, by tensor.
        digested: Streams to read for their digests only.
        small_files: Files other than the weights, their index and config.json, by their names in a model's folder.
        config: Content of config.json. None for an output without this file.
        settings: Fields of the manifest about the edits.
    """

    source: Source
    rows: Mapping[str, ParsedAxisMap]
    match: TensorMatch
    resize: VocabResize
    vocabulary: Vocabulary
    tensors: tuple[SourceTensor, ...]
    state_tensors: tuple[SourceTensor, ...] = ()
    state: AdamState | None = None
    dropped: tuple[DroppedTensor, ...] = ()
    left: tuple[DroppedTensor, ...] = ()
    dtype: str | None = None
    scales: Mapping[str, LayoutScale] = field(default_factory=dict)
    updates: Mapping[str, LowRankUpdate] = field(default_factory=dict)
    replaced: Mapping[str, SourceTensor] = field(default_factory=dict)
    digested: tuple[Stream, ...] = ()
    small_files: tuple[SmallFile, ...] = ()
    config: HFConfig | None = None
    settings: Manifest = field(default_factory=Manifest)

    @property
    def row_counts(self) -> dict[str, int]:
        """Rows of each tensor in the output, or 1 for a 0-d tensor."""
        return output_rows(
            (*self.source.all_tensors, *self.tensors, *self.state_tensors),
            self.resize.tensors,
            vocab_size=self.vocabulary.stored_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a layout writes the tensors of a draft.

    Attributes:
        files: The data files.
        locations: Locations of each tensor, by name. Empty for a tensor without elements.
        index: Small files of the layout, e.g. an index of several files.
        has_index_first: Whether the index comes before the side files.
        leaves: Leaves of an Orbax item, otherwise empty.
        folder: Folder of the leaves in the output, or empty for the output itself.
        empty_nodes: Paths of nodes without leaves in an Orbax item.
        specs: Partition spec of each leaf, if there is a mesh.
        compression: Compression of the chunks, or None.
        settings: Fields of the manifest about the layout.
    """

    files: tuple[OutputFile, ...]
    locations: Mapping[str, Locations]
    index: tuple[SmallFile, ...] = ()
    has_index_first: bool = False
    leaves: tuple[OutputLeaf, ...] = ()
    folder: str = ""
    empty_nodes: tuple[tuple[str | int, ...], ...] = ()
    specs: Mapping[str, Spec] = field(default_factory=dict)
    compression: Compression | None = None
    settings: Manifest = field(default_factory=Manifest)


def start_draft(
    source: Source,
    rows: Mapping[str, ParsedAxisMap],
    options: MatchOptions = DEFAULT_MATCH_OPTIONS,
    *,
    true_vocab: int | None = None,
    dtype: str | None = None,
    kept: Collection[str] = (),
) -> Draft:
    """Return the draft of an output with all parameters of a source, and its vocabulary as it is stored.

    Args:
        source: The source, without the parts to leave out.
        rows: Rows of its parameters, by path of their leaf.
        options: Options of their match.
        true_vocab: Unpadded size of the vocabulary. By default, the size in the config.
        dtype: Dtype of the parameters, or None to keep theirs.
        kept: Tensors to write although they have no leaf.

    Raises:
        PrepError: Tensors are missing, unexpected or of another shape.
    """
    vocabulary = source.vocabulary(true_vocab)
    match = match_source_tensors(source, rows, options)
    names = vocabulary_names(source, match, vocabulary)
    present = VocabularyTensors(vocabulary, rows, match, names, frozenset())
    return draft_of(source, present, dtype=dtype, kept=kept)


def draft_of(
    source: Source,
    present: VocabularyTensors,
    *,
    dtype: str | None = None,
    kept: Collection[str] = (),
) -> Draft:
    """Return the draft of an output, given the vocabulary of its source. See `start_draft`."""
    match = present.match
    parameters = [t for t in source.tensors if t.name in match.uses or t.name in kept]
    return Draft(
        source=source,
        rows=present.rows,
        match=match,
        resize=VocabResize(present.vocabulary, present.names, Fill("zeros")),
        vocabulary=present.vocabulary,
        tensors=tuple(tensor.cast(dtype) for tensor in (*parameters, *source.tower_tensors)),
        dropped=tuple(d for d in match.dropped if d.name not in kept),
        left=tuple(dropped_state(source)),
        dtype=dtype,
        small_files=copied_small_files(source),
        config=output_config(source, present.vocabulary, match.is_tied, dtype),
    )


def resize_vocabulary(draft: Draft, vocabulary: Vocabulary, resize: VocabResize) -> Draft:
    """Return a draft with other rows of the vocabulary, also in its config.json."""
    config = output_config(draft.source, vocabulary, draft.match.is_tied, draft.dtype)
    return replace(draft, vocabulary=vocabulary, resize=resize, config=config)


def with_rows(draft: Draft, num_rows: int, fill: Fill | None = None) -> Draft:
    """Return a draft with a vocabulary of `num_rows` rows. New rows are zeros, if no `fill` is given."""
    resize = replace(draft.resize, fill=fill or draft.resize.fill)
    return resize_vocabulary(draft, Vocabulary(resize.vocabulary.true_size, num_rows), resize)


def with_source_state(draft: Draft) -> Draft:
    """Return a draft with the training state of its source, and with the scales of decoded weights."""
    return replace(draft, state_tensors=draft.source.state_tensors, left=())


def with_state(draft: Draft, state: AdamState, others: Sequence[SourceTensor] = ()) -> Draft:
    """Return a draft with a training state in the form of another library."""
    source = replace(draft.source, state_tensors=state.left_out)
    return replace(
        draft,
        state=state,
        state_tensors=(*state.tensors, *others),
        left=tuple(dropped_state(source)),
    )


def with_tied_head(source: Source) -> Source:
    """Return the source with the head as a separate tensor, if it is tied to the embedding.

    The head reads the bytes of the embedding a second time, from blobs after the source's blobs.
    """
    tie = source.family.tying
    if any(tensor.name == tie.head_tensor for tensor in source.tensors):
        return source
    embedding = next(tensor for tensor in source.tensors if tensor.name == tie.embedding_tensor)
    # A plan must read every byte of its files exactly once, and here two tensors have the same bytes.
    # With 2 files, the head reads file 1 as blob 3: blobs 2 and 3 are files 0 and 1 again.
    reads = source.byte_sources
    head = replace(shift_file_numbers(embedding, len(reads)), name=tie.head_tensor)
    return replace(source, tensors=(*source.tensors, head), blobs=(*reads, *reads))


def make_plan(draft: Draft, placed: Placed, *, command: str, request: str, name: str) -> Plan:
    """Return the plan of an output.

    Args:
        draft: The model of the output.
        placed: Its layout.
        command: Name of the command.
        request: Its command line without options at their defaults.
        name: Name of the model in the manifest.
    """
    source = draft.source
    row_counts = draft.row_counts
    targets: dict[str, TensorTarget] = {}
    for tensor in (*draft.tensors, *draft.state_tensors):
        if tensor.name in placed.locations:
            targets[tensor.name] = TensorTarget(
                placed.locations[tensor.name],
                row_counts[tensor.name],
                tensor.dtype,
                draft.scales.get(tensor.name),
                draft.updates.get(tensor.name),
            )
    compared = {tensor.name for tensor in source.state_tensors if is_decoded_tensor(tensor.name)}
    compared.update(check.name for check in draft.match.checks)
    streams = list(draft.digested)
    for stream in build_streams(source, targets, resize=draft.resize, compared=compared):
        replacement = draft.replaced.get(stream.name)
        if replacement is None or stream.name not in targets or not stream.reads:
            streams.append(stream)
            continue
        # Rows of padding stay those of the base.
        if stream.rows[0] < replacement.shape[0]:
            stream = replace(
                stream,
                dtype=replacement.dtype,
                reads=replacement.placement,
                operations=targets[stream.name].operations(replacement.dtype),
            )
        streams.append(stream)
    settings = _settings(draft, placed, name)
    # An output has the algorithm of its source, so that the digests of equal tensors are equal.
    algorithm = (source.manifest or NO_MANIFEST).tensor_digest
    if algorithm != DEFAULT_DIGEST:
        streams = [replace(stream, digest_algorithm=algorithm) for stream in streams]
        settings |= Manifest(tensor_digest=algorithm)
    return Plan(
        command=command,
        request=request,
        source_name=source.display_name,
        source_files=source.file_stamps,
        streams=tuple(streams),
        files=placed.files,
        small_files=_small_files(draft, placed),
        leaves=placed.leaves,
        dropped=(
            *draft.dropped,
            *dropped_padding(source, targets, resize=draft.resize),
            *draft.left,
        ),
        checks=draft.match.checks,
        settings=settings,
        display_names=source.display_names(),
        item=placed.folder,
        compression=placed.compression,
        empty_nodes=placed.empty_nodes,
    )


def _small_files(draft: Draft, placed: Placed) -> tuple[SmallFile, ...]:
    """Return the files other than the weights. In an Orbax checkpoint they are in a folder of their own."""
    prefix = ""
    if placed.leaves:
        prefix = f"{HF_FOLDER}/"
        item = placed.leaves[0].item
        if item is not None:
            prefix = f"{item}/{prefix}"
    small_files = [replace(file, path=prefix + file.path) for file in draft.small_files]
    config: tuple[SmallFile, ...] = ()
    if draft.config is not None:
        config = config_files(draft.source, draft.config, prefix)
    if placed.has_index_first:
        return *config, *placed.index, *small_files
    return *config, *small_files, *placed.index


def _settings(draft: Draft, placed: Placed, name: str) -> Manifest:
    """Return the manifest's description of the model."""
    source = draft.source
    model = Manifest(name=name, kind="hf", family=source.family.name)
    if draft.config is not None:
        vocabulary = draft.vocabulary
        model |= Manifest(vocab={"true": vocabulary.true_size, "padded": vocabulary.stored_size})
    model |= placed.settings
    is_native = placed.settings.get("layout") == NATIVE_TREE
    last = Manifest(prefixed=source.names.is_prefixed, tied=draft.match.is_tied)
    if draft.config is not None:
        last |= Manifest(config=draft.config)
    # A text part that is written alone is no model with towers any more.
    if is_native or source.wrapper is not None:
        last |= towers_entry(source)
    model |= last
    keys = _LAST_TREE_KEYS if is_native else _LAST_FOLDER_KEYS
    first = Manifest(**{key: value for key, value in model.items() if key not in keys})
    last = Manifest(**{key: model[key] for key in keys if key in model})
    adapter = adapter_fields(source.tree_manifest)
    if not is_native:
        is_adapter = draft.settings.get("kind") == "adapter"
        return (adapter if is_adapter else Manifest()) | first | last | draft.settings
    step = Manifest()
    record = source.training_record
    if placed.settings.kind == "train" and record is not None:
        step = Manifest(step=record["step"], training_state=record)
    elif placed.settings.kind == "train":
        step = step_fields(source.tree_manifest)
    # prep's own tree keeps these fields of the source's manifest.
    inherited = step | adapter | quantization_entries(source) | map_record(source)
    return inherited | first | last | draft.settings
