"""`Source`: an opened checkpoint of any format as a list of tensors, and views of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from prepcli.algebra.axis_map import ParsedAxisMap, bind_row
from prepcli.core.errors import (
    BROKEN_CONFIG_HINT,
    GET_AGAIN_HINT,
    DamagedError,
    Key,
    Option,
    PrepError,
    text,
    usage_error,
)
from prepcli.core.formatting import count_text
from prepcli.core.json_values import HFConfig, JsonObject, load_json, quote_name
from prepcli.formats.manifest import NO_MANIFEST, STATE_ITEM, check_header
from prepcli.models.parameters import Family, parameter_rows
from prepcli.planning.arrays import Array, Locations
from prepcli.planning.manifest_fields import (
    Manifest,
    QuantizedRecord,
    TensorRecords,
    TrainingStateRecord,
)
from prepcli.planning.plan import DroppedTensor, SmallFile, SourceFile
from prepcli.planning.tensors import (
    DECODED,
    ITEM_BITS,
    OPT_STATE,
    PARAMS,
    QUANTIZATION,
    SEPARATOR,
    TOWERS,
    cast_dtype,
    is_leaf_path,
    qualify,
    split_name,
)
from prepcli.sources.maps import TensorMap
from prepcli.sources.side_files import SideFile
from prepcli.sources.tensor_match import (
    DEFAULT_MATCH_OPTIONS,
    NO_VOCABULARY,
    MatchOptions,
    TensorInfo,
    TensorMatch,
    TensorNames,
    TensorUse,
    Vocabulary,
    match_tensors,
    read_vocabulary,
)
from prepcli.stores.buffers import Blob
from prepcli.stores.files import MAX_CONFIG_NBYTES, is_there, read_small_file
from prepcli.stores.paths import AnyPath

if TYPE_CHECKING:
    from prepcli.formats.gguf import GgufHeader
    from prepcli.formats.model_files import FileHeader

# In an init checkpoint: config, tokenizer and the other files of the model.
HF_FOLDER = "hf"
# A file of transformers' Trainer.
SCHEDULER_FILE = "scheduler.pt"
# The moving average of a run's parameters (`optimizer.ema`).
AVERAGE_SLOT = f"{OPT_STATE}.ema"


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a source: its name in the axis maps, its location and its recorded digests.

    A tensor that is read through a transform has no recorded digest of its own. `made_from` has the stored tensors with
    digests whose values it has in another form, e.g. the codes and scales of a decoded weight.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: Locations
    digests: tuple[tuple[int, int, str], ...] = ()  # (first row, one past the last, digest)
    # Dtype in the output, unless another dtype is requested. Empty for the tensor's own dtype.
    default_dtype: str = ""
    made_from: tuple[SourceTensor, ...] = ()

    @property
    def stored(self) -> tuple[SourceTensor, ...]:
        """The stored tensors whose digests cover the values: the tensor itself, unless a transform made it."""
        return self.made_from or (self,)

    def __post_init__(self) -> None:
        """Raise DamagedError if the recorded digests do not end with the last row."""
        num_rows = self.shape[0] if self.shape else 1
        # The manifest's own check finds gaps and overlaps. It may not know the shape.
        if self.digests and self.digests[-1][1] != num_rows:
            recorded = count_text(self.digests[-1][1], "row")
            what = f"the manifest records digests of {recorded} of {quote_name(self.name)}"
            why = f"the tensor has {count_text(num_rows, 'row')}"
            raise DamagedError(what, why, GET_AGAIN_HINT)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8

    def cast(self, dtype: str | None) -> SourceTensor:
        """Return the tensor with its output dtype for a requested `dtype`."""
        return replace(self, dtype=cast_dtype(self.dtype, dtype or self.default_dtype or None))


def stored_tensor(array: Array) -> SourceTensor:
    """Return an array as a tensor of its own name."""
    return SourceTensor(array.name, array.dtype, array.shape, (array,))


def file_position(tensor: SourceTensor) -> tuple[int, int]:
    """Return file number and offset of the first chunk of a tensor."""
    return tensor.placement[0].position


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The config of the whole model around the parameters: of a multimodal one, or of one with multi-token prediction.

    Attributes:
        config: Its config.json.
        text_config: The config of the parameters, as the family reads it. It is the text config of a multimodal model,
            and else `config`.
    """

    config: HFConfig
    text_config: HFConfig


# Without slots: a cached property needs the dict of the instance.
@dataclass(frozen=True)
class MadeFiles:
    """Small files with the content of metadata. They are made at their first use: most commands do not need them.

    Attributes:
        make: Returns the files. It raises ValueError with the reason if the metadata does not describe them exactly.
        title: Name of the files' content in messages.
    """

    make: Callable[[], tuple[SmallFile, ...]]
    title: str

    @cached_property
    def files(self) -> tuple[SmallFile, ...]:
        """The files, empty if the metadata does not describe them."""
        return self._files_and_remarks[0]

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """A line with the reason, if the metadata does not describe the files. Empty otherwise."""
        return self._files_and_remarks[1]

    @cached_property
    def _files_and_remarks(self) -> tuple[tuple[SmallFile, ...], tuple[str, ...]]:
        try:
            return self.make(), ()
        except ValueError as error:
            return (), (f"{self.title} is not converted: {error}",)


NO_MADE_FILES = MadeFiles(tuple, "")


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint.

    Attributes:
        display_name: Name of the checkpoint in messages.
        root: Folder or file of the checkpoint.
        family: Model family.
        config: The model's config.json. Of a multimodal model, the config of its text part.
        names: Naming scheme of the tensors in the source.
        tensors: Parameters, in the order of their bytes in the files.
        files: Data files, by file number.
        file_stamps: Size, time and digest of each data file, to detect changes.
        side_files: Tokenizer, generation config and other files that belong to the model.
        manifest: The manifest of a checkpoint that prep wrote.
        tensor_file_names: For each parameter, then each tensor of the towers, the file name for a Hugging Face folder.
        state_tensors: The other tensors of a training checkpoint, and the scales of dequantised weights, named as in
            `planning.tensors`.
        blobs: Byte sources by the file numbers of placements. Empty if the placements refer to `files`.
        extra_entries: Other contents of the files, which no conversion uses.
        has_averages: Whether the parameters are the averages of a run. See `use_averaged_params`.
        quantization: Settings of quantised weights that are decoded. Empty if there are none.
        quantized: Records of the decoded weights with scales in `state_tensors`, by name.
        config_path: File that `config` was read from, or None.
        left_files: Side files of the model that are not copied, because no pattern selects them.
        omitted: Descriptions of the subfolders and files of the model that are not copied, e.g. `onnx/ (weights)`.
        made_files: Small files with the content of metadata, such as the tokenizer of GGUF.
        is_locked: Whether a lock approves the files and the digests of the tensors. See `sources.recorded_sources`.
        wrapper: The model with further tensors around the parameters, if any.
        tower_tensors: Its other tensors, named `towers/TENSOR`: vision and audio parts, and multi-token prediction.
        training_record: Record of the training state in `state_tensors`, if another framework wrote it.
        tensor_map: The map that made the tensors from those of the files, if any.
        notes: Lines for the user about how the files were read.
        dropped: Tensors that the user has dropped (`--drop`), by their names in the files.
    """

    display_name: str
    root: AnyPath
    family: Family
    config: HFConfig
    names: TensorNames
    tensors: tuple[SourceTensor, ...]
    files: tuple[AnyPath, ...]
    file_stamps: tuple[SourceFile, ...]
    side_files: tuple[SideFile, ...]
    manifest: Manifest | None
    tensor_file_names: tuple[str, ...] = ()
    state_tensors: tuple[SourceTensor, ...] = ()
    blobs: tuple[AnyPath | Blob, ...] = ()
    extra_entries: tuple[DroppedTensor, ...] = ()
    has_averages: bool = False
    quantization: Mapping[str, Any] = field(default_factory=dict)
    quantized: Mapping[str, QuantizedRecord] = field(default_factory=dict)
    config_path: AnyPath | None = None
    left_files: tuple[SideFile, ...] = ()
    omitted: tuple[str, ...] = ()
    made_files: MadeFiles = NO_MADE_FILES
    is_locked: bool = False
    wrapper: Wrapper | None = None
    tower_tensors: tuple[SourceTensor, ...] = ()
    training_record: TrainingStateRecord | None = None
    tensor_map: TensorMap | None = None
    notes: tuple[str, ...] = ()
    dropped: tuple[DroppedTensor, ...] = ()

    @property
    def byte_sources(self) -> tuple[AnyPath | Blob, ...]:
        """Files and blobs, in the order of the file numbers of tensor placements."""
        return self.blobs or self.files

    @property
    def folder(self) -> AnyPath:
        """Folder of the files. A single file is in the folder of its manifest."""
        return self.root if self.root.is_dir() else self.root.parent

    @property
    def all_tensors(self) -> tuple[SourceTensor, ...]:
        """Parameters and towers (vision or audio parts) in the order of the files, then the rest of a checkpoint."""
        if not self.tower_tensors:
            return *self.tensors, *self.state_tensors
        # A file on a server is read once, from its begin to its end.
        model = sorted((*self.tensors, *self.tower_tensors), key=file_position)
        return *model, *self.state_tensors

    @property
    def is_multimodal(self) -> bool:
        """Whether the parameters are the text part of a multimodal model."""
        if self.wrapper is None:
            return False
        # The type of a multimodal model is never the type of its text part.
        model_type = self.wrapper.config.get("model_type")
        return model_type != self.wrapper.text_config.get("model_type")

    @property
    def tree_manifest(self) -> Manifest:
        """Return the manifest if this is an Orbax checkpoint that prep wrote, else NO_MANIFEST."""
        if self.manifest and self.manifest.is_tree:
            return self.manifest
        return NO_MANIFEST

    def display_names(self) -> dict[str, str]:
        """Return the name of each tensor in the checkpoint's own files, by its name in `tensors`."""
        names = {t.name: self.file_name(t) for t in (*self.tensors, *self.tower_tensors)}
        for tensor in self.state_tensors:
            slot, name = split_name(tensor.name)
            if not slot:
                names[tensor.name] = name
            # Its name is the path of a leaf, or the name in the quantised files. It is the same in every naming scheme.
            elif is_leaf_path(name) or slot in (QUANTIZATION, DECODED):
                names[tensor.name] = tensor.name
            else:
                names[tensor.name] = qualify(slot, self.names.full_name(name))
        return names

    def file_name(self, tensor: SourceTensor) -> str:
        """Return the name of a parameter or of a tower's tensor in files."""
        slot, name = split_name(tensor.name)
        # Names of the verbatim family may have a slash of their own.
        if self.wrapper is not None and slot == TOWERS:
            return name
        return self.names.full_name(tensor.name)

    def stored_name(self, tensor: SourceTensor) -> str:
        """Return the name of a parameter or of a tower's tensor as `TensorNames.stored_name` spells it."""
        if tensor.name in self.names.unprefixed_names:
            return tensor.name
        return self.file_name(tensor)

    def vocabulary(self, true_size: int | None = None) -> Vocabulary:
        """Return the true and the stored vocabulary size. `true_size` overrides the config's true size."""
        if self.family.is_verbatim:
            return NO_VOCABULARY
        return read_vocabulary(
            self.config, self.family.sizes(self.config)["vocab"], true_size=true_size
        )


def match_source_tensors(
    source: Source, rows: Mapping[str, ParsedAxisMap], options: MatchOptions
) -> TensorMatch:
    """Match the tensors of a source with the axis maps of its family."""
    tensors = {t.name: TensorInfo(t.dtype, t.shape, t.nbytes) for t in source.tensors}
    match = match_tensors(
        source.names,
        source.config,
        sizes=source.family.sizes(source.config),
        rows=rows,
        tensors=tensors,
        options=options,
        source_name=source.display_name,
    )
    return replace(match, dropped=(*source.dropped, *match.dropped))


def stored_rows(source: Source) -> dict[str, ParsedAxisMap]:
    """Return the axis map of each parameter, with layers stacked as in the source.

    Layers of a checkpoint that prep did not write are stacked on axis 0.
    """
    manifest = source.tree_manifest
    return source_rows(source, manifest.scan, manifest.scan_axis)


def source_rows(source: Source, scan: bool = True, scan_axis: int = 0) -> dict[str, ParsedAxisMap]:
    """Return the axis map of each parameter of the source's family, by path."""
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    return parameter_rows(source.family, source.config, scan, scan_axis, shapes)


def read_config(path: AnyPath) -> HFConfig:
    """Read a config.json."""
    if not is_there(path, follow_links=True):
        what = f"{path.parent} has no {path.name}"
        hint = text("{}: a folder with the model's {}", Option("config", "FOLDER"), path.name)
        # Folders with the files of a model: of an init, of a step, and of a run.
        inits = (path.parent, path.parent / STATE_ITEM)
        steps = path.parent.iterdir() if path.parent.is_dir() else ()
        for folder in (*inits, *(step / STATE_ITEM for step in steps)):
            if is_there(folder / HF_FOLDER / path.name, follow_links=True):
                hint = text("{}", Option("config", str(folder / HF_FOLDER)))
        raise PrepError(what, "it describes the model of the weights", hint)
    return read_json_object(path)


def read_json_object(path: AnyPath, max_nbytes: int = MAX_CONFIG_NBYTES) -> JsonObject:
    """Read a file with a JSON object, of at most `max_nbytes`."""
    try:
        document = load_json(read_small_file(path, max_nbytes))
    except ValueError as error:
        raise DamagedError(f"{path} is broken", str(error), BROKEN_CONFIG_HINT) from error
    if not isinstance(document, dict):
        raise DamagedError(f"{path} is broken", "it is not a JSON object", BROKEN_CONFIG_HINT)
    return document


def file_stamps(headers: Iterable[FileHeader | GgufHeader]) -> tuple[SourceFile, ...]:
    """Return size, time and digest of each weight file."""
    return tuple(
        SourceFile(header.file_name, header.size, header.mtime_ns, header.digest)
        for header in headers
    )


def check_headers(folder: AnyPath, manifest: Manifest, stamps: Iterable[SourceFile]) -> None:
    """Raise DamagedError if the header of a data file differs from its record in the manifest."""
    # The digests of tensors cover the payload, this one the bytes before it: a changed offset in
    # a header would move every tensor and leave each payload as it is.
    for stamp in stamps:
        check_header(folder / stamp.path, manifest, stamp.digest)


def recorded_digests(records: TensorRecords, name: str) -> tuple[tuple[int, int, str], ...]:
    """Return the recorded digests of a tensor: (first row, one past the last, digest)."""
    return tuple(
        (first, stop, digest) for first, stop, digest in records.get(name, {}).get("digests", ())
    )


@dataclass(frozen=True, slots=True)
class TensorLabel:
    """The two names of a tensor.

    Attributes:
        leaf: Dotted path of the leaf, `params.` included. Several, separated by commas, if the tensor is split. Empty
            if the tensor belongs to no parameter.
        tensor: Name in the checkpoint's files, without the optimizer slot (such as `opt_state.adam.mu/`) if `leaf` has
            it.
    """

    leaf: str
    tensor: str

    def __str__(self) -> str:
        if self.leaf:
            return f"{self.leaf} ({self.tensor})"
        return self.tensor


def label_tensors(
    source: Source, uses: Mapping[str, tuple[TensorUse, ...]]
) -> dict[str, TensorLabel]:
    """Return the label of each tensor of a source, by its name in `source.all_tensors`."""
    labels: dict[str, TensorLabel] = {}
    for name, display_name in source.display_names().items():
        slot, parameter = split_name(name)
        if source.wrapper is not None and slot == TOWERS:
            leaf = f"{TOWERS}.{parameter}"
        elif slot:
            leaf = ", ".join(f"{slot}.{use.path}" for use in uses.get(parameter, ()))
        else:
            leaf = ""
        # The path of the leaf begins with the slot. Do not repeat it in the name of the tensor.
        if leaf and slot != TOWERS:
            display_name = source.names.full_name(parameter)
        labels[name] = TensorLabel(leaf, display_name)
    return labels


def label_tensor(source: Source, tensor: SourceTensor) -> TensorLabel:
    """Return the label of one tensor of a source. A source that does not match its family has no leaves."""
    try:
        uses = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS).uses
    except PrepError:
        # E.g. the base of a merge with the matrices of an adapter.
        uses = {}
    return label_tensors(source, uses).get(tensor.name, TensorLabel("", tensor.name))


def append_files(source: Source, other: Source) -> Source:
    """Return a source with the files of another one after its own, e.g. an adapter's after its base's.

    Its tensors stay the same. To add a tensor of the other source, see `shift_file_numbers`.
    """
    blobs: tuple[AnyPath | Blob, ...] = ()
    if source.blobs or other.blobs:
        blobs = (*source.byte_sources, *other.byte_sources)
    return replace(
        source,
        files=(*source.files, *other.files),
        file_stamps=(*source.file_stamps, *other.file_stamps),
        blobs=blobs,
    )


def shift_file_numbers(tensor: SourceTensor, count: int) -> SourceTensor:
    """Return a tensor with `count` added to the numbers of the files that store it.

    Placements name files by number. After the files 0 to 2 of one source, file 0 of an appended source is file 3.
    """
    placement = tuple(location.moved(count) for location in tensor.placement)
    made_from = tuple(shift_file_numbers(stored, count) for stored in tensor.made_from)
    return replace(tensor, placement=placement, made_from=made_from)


def without_transposed_tensors(source: Source) -> Source:
    """Return a source with its transposed tensors in the order of dims of the text class of transformers.

    Files of Qwen3-VL-MoE have the experts as [experts, embed, 2 mlp] and [experts, mlp, embed]. The class of its text
    model reads [experts, 2 mlp, embed] and [experts, embed, mlp]. The tensors become views of the stored bytes, which
    have no digest in this order. Tensors with a digest are also read in the stored order, for a check.
    """
    family = source.family
    sizes = family.sizes(source.config)
    # Without shapes, a parameter has its usual form.
    names = {tensor.name: () for tensor in source.tensors}
    usual_rows = parameter_rows(family, source.config, tensors=names)
    # The stored dim of each usual dim, for each transposed tensor, e.g. (0, 2, 1).
    orders: dict[str, tuple[int, ...]] = {}
    for path, row in source_rows(source).items():
        usual_dims = usual_rows[path].source_dims
        if row.source_dims != usual_dims:
            order = tuple(row.source_dims.index(dim) for dim in usual_dims)
            orders |= {name: order for name, _ in bind_row(row, sizes).tensors()}
    tensors: list[SourceTensor] = []
    checked: list[SourceTensor] = []
    for tensor in source.tensors:
        order = orders.get(tensor.name)
        if order is None:
            tensors.append(tensor)
            continue
        placement = tuple(location.permuted(order) for location in tensor.placement)
        shape = tuple(tensor.shape[dim] for dim in order)
        tensors.append(replace(tensor, shape=shape, placement=placement, digests=()))
        if tensor.digests:
            checked.append(replace(tensor, name=qualify(DECODED, tensor.name)))
    state_tensors = (*source.state_tensors, *checked)
    return replace(source, tensors=tuple(tensors), state_tensors=state_tensors)


def use_averaged_params(source: Source) -> Source:
    """Return the source of a training step with the averages as its parameters.

    The parameters become a part of the other training state.

    Raises:
        UsageError: The checkpoint has no averages.
        PrepError: Some of the parameters have no average.
    """
    hint = text("remove {}", Option("ema", True))
    averages: list[SourceTensor] = []
    others: list[SourceTensor] = []
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot != AVERAGE_SLOT:
            others.append(tensor)
            continue
        # The averages of a complete slot are named like the tensors of the parameters. A slot that
        # lacks parameters keeps the paths of its leaves (`sources.state_rows`).
        if is_leaf_path(name):
            why = text("a run with {} averages only the other parameters", Key("optimizer.freeze"))
            raise PrepError(
                f"{source.display_name} has averages of some parameters only", why, hint
            )
        averages.append(replace(tensor, name=qualify(PARAMS, name)))
    if not averages:
        why = text("{} was not set in the run's recipe", Key("optimizer.ema"))
        raise usage_error(f"{source.display_name} has no averaged parameters", why, hint)
    parameters = [
        replace(tensor, name=f"{PARAMS}{SEPARATOR}{tensor.name}") for tensor in source.tensors
    ]
    return replace(
        source, tensors=tuple(averages), state_tensors=(*parameters, *others), has_averages=True
    )
