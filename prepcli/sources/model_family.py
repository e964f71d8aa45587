"""The family of a checkpoint, and the tensors beside those of the family.

The family is the one that its config names, or the verbatim family of its tensors. The other tensors are the towers
(image and audio encoders) of a multimodal model, and layers of multi-token prediction. They are stored beside the
parameters, bit for bit, and no command of prep computes with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from prepcli.algebra.axis_map import INPUT_LAYERS
from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.models.parameters import VERBATIM, Family
from prepcli.models.registry import FAMILIES, family_of
from prepcli.models.text_part import TextPart, read_text_part, text_section, uses_mrope
from prepcli.models.truncation import (
    later_layers,
    missing_tensors,
    prediction_names,
    prediction_tensors,
    tensors_of_all_layers,
    truncate_config,
    without_prediction,
)
from prepcli.models.verbatim import CANNOT_TRAIN, TensorTypes, split_numbers, verbatim_family
from prepcli.planning.manifest_fields import Manifest, QuantizedRecord
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.tensors import QUANTIZATION, TOWERS, qualify, split_name
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.references import CONFIG, SourceHints
from prepcli.sources.side_files import SideFiles, find_side_files
from prepcli.sources.source import (
    Source,
    SourceTensor,
    Wrapper,
    append_files,
    shift_file_numbers,
    without_transposed_tensors,
)
from prepcli.sources.tensor_match import TensorNames, detect_names, find_wrapper_prefix
from prepcli.stores.files import is_there
from prepcli.stores.paths import AnyPath

# Rule that drops the towers of an export of the text model.
TEXT_ONLY_RULE = "--text-only"
# Settings of images and sounds, which the text model does not have.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# Rule of tensors that belong to removed layers.
LAYERS_RULE = "--layers"


def find_text_part(
    config: HFConfig, names: Iterable[str], drop: Sequence[str] = (), *, wrapper: str = ""
) -> TextPart | None:
    """Return the text part of a multimodal checkpoint, or None if it has no supported one.

    See `read_text_part` for the arguments.
    """
    try:
        return read_text_part(config, frozenset(names), drop, wrapper=wrapper)
    except PrepError:
        return None


def multimodal_wrapper_prefix(
    config: HFConfig, full_names: Collection[str], drop: Sequence[str] = ()
) -> str:
    """Return the prefix of all names of a multimodal model from a wrapper. Empty for any other model."""
    if text_section(config) is None or config.get("model_type") in FAMILIES:
        return ""

    def has_text_part(prefix: str) -> bool:
        names = (name.removeprefix(prefix) for name in full_names)
        return find_text_part(config, names, drop, wrapper=prefix) is not None

    return find_wrapper_prefix(full_names, has_text_part)


def text_part_fault(source: Source, drop: Sequence[str] = ()) -> str:
    """Return why a multimodal checkpoint is read under the names in its files. Empty for any other source."""
    if not source.family.is_verbatim or text_section(source.config) is None:
        return ""
    try:
        read_text_part(source.config, {tensor.name for tensor in source.tensors}, drop)
    except PrepError as error:
        return str(error.why)
    return ""


def split_towers(source: Source, drop: Sequence[str] = ()) -> Source:
    """Return a source with the tensors of its family as parameters, and the other ones as towers.

    The other tensors are those outside of the text part of a multimodal model, and those of multi-token prediction.

    A source without the names of transformers is returned unchanged.
    """
    if source.family.is_verbatim:
        # The names of a verbatim output have the prefix. So have those of a model with a text part only with `drop`.
        prefix = multimodal_wrapper_prefix(source.config, {t.name for t in source.tensors}, drop)
        if prefix:
            source = with_bare_names(source, replace(source.names, wrapper_prefix=prefix))
        wrapper = source.names.wrapper_prefix
        stored_names = (tensor.name for tensor in source.tensors)
        part = find_text_part(source.config, stored_names, drop, wrapper=wrapper)
        if part is None:
            return source
        names = TensorNames(part.family, wrapper_prefix=wrapper)
        text_part = replace(source, family=part.family, config=part.config, names=names)
        return _with_parameters(source, text_part, part.names)
    stored = {tensor.name for tensor in source.tensors}
    prediction = prediction_names(source.family, source.config, stored)
    if not prediction:
        return source
    parameters = {source.names.stored_name(name) for name in stored - prediction}
    return _with_parameters(source, source, parameters)


def with_bare_names(source: Source, names: TensorNames) -> Source:
    """Return a source with a naming scheme, and with the bare names of its tensors and of the scales of its weights."""
    tensors = [replace(tensor, name=names.bare_name(tensor.name)) for tensor in source.tensors]
    prefix = names.wrapper_prefix
    state_tensors: list[SourceTensor] = []
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot == QUANTIZATION:
            tensor = replace(tensor, name=qualify(QUANTIZATION, name.removeprefix(prefix)))
        state_tensors.append(tensor)
    quantized: dict[str, QuantizedRecord] = {}
    for name, record in source.quantized.items():
        codes = record["codes"].removeprefix(prefix)
        quantized[name.removeprefix(prefix)] = {**record, "codes": codes}
    return replace(
        source,
        names=names,
        tensors=tuple(tensors),
        state_tensors=tuple(state_tensors),
        quantized=quantized,
    )


def _with_parameters(source: Source, model: Source, parameters: Collection[str]) -> Source:
    """Return a source with some of its tensors as parameters, and the other ones as towers."""
    kept: list[tuple[SourceTensor, str]] = []
    towers: list[tuple[SourceTensor, str]] = []
    file_names = source.tensor_file_names or ("",) * len(source.tensors)
    for tensor, file_name in zip(source.tensors, file_names, strict=True):
        name = source.names.stored_name(tensor.name)
        if name in parameters:
            kept.append((replace(tensor, name=model.names.bare_name(name)), file_name))
        else:
            towers.append((replace(tensor, name=qualify(TOWERS, name)), file_name))
    return replace(
        model,
        tensors=tuple(tensor for tensor, _ in kept),
        tower_tensors=tuple(tensor for tensor, _ in towers),
        tensor_file_names=tuple(name for _, name in (*kept, *towers) if name),
        wrapper=Wrapper(source.config, model.config),
    )


def towers_title(source: Source) -> str:
    """Return the title of the tensors beside the parameters of a source, for messages."""
    return "towers" if source.is_multimodal else "multi-token prediction"


def models_title(source: Source) -> str:
    """Return the title of models with such tensors, for messages."""
    return "multimodal models" if source.is_multimodal else "models with multi-token prediction"


def towers_entry(source: Source) -> Manifest:
    """Return the manifest's entry of a model with towers: its type, and the prefixes of its parameters in files."""
    recorded = source.tree_manifest.towers
    if recorded is not None:
        return Manifest(towers=recorded)
    if source.wrapper is None:
        return Manifest()
    entry: dict[str, object] = {
        "model_type": source.wrapper.config.get("model_type"),
        "prefix": source.family.prefix,
        "head_prefix": source.family.head_prefix,
    }
    if uses_mrope(source.wrapper.config):
        # Training reads this entry: a recipe must not change the rope type of a model with M-RoPE.
        entry["mrope"] = True
    return Manifest(towers=entry)


def without_towers(source: Source) -> Source:
    """Return a source without its towers."""
    file_names = source.tensor_file_names[: len(source.tensors)]
    return replace(source, tower_tensors=(), tensor_file_names=file_names)


def text_model(source: Source) -> Source:
    """Return the parameters of a source with towers as a separate model, as its class in transformers reads it.

    Its config states no multi-token prediction.
    """
    source = without_transposed_tensors(source)
    nbytes = sum(tensor.nbytes for tensor in source.tower_tensors)
    source = without_towers(source)
    family = FAMILIES[source.family.name]
    # A training step has no towers to drop. The entry then states that the output is complete without them.
    dropped = DroppedTensor(TOWERS, nbytes, TEXT_ONLY_RULE)
    return replace(
        source,
        family=family,
        config=without_prediction(source.config),
        names=replace(source.names, family=family),
        side_files=tuple(f for f in source.side_files if f.name not in PROCESSOR_FILES),
        extra_entries=(*source.extra_entries, dropped),
        config_path=None,
        wrapper=None,
    )


def with_towers(source: Source, other: Source) -> Source:
    """Return the parameters in one source with the towers of another one."""
    first = len(source.byte_sources)
    return replace(
        append_files(source, other),
        config_path=None,
        wrapper=other.wrapper,
        tower_tensors=tuple(shift_file_numbers(tensor, first) for tensor in other.tower_tensors),
    )


@dataclass(frozen=True, slots=True)
class FolderModel:
    """The model in a folder, as its config and the names of its tensors describe it.

    Attributes:
        config_path: The config.json, or None if there is none.
        config: Content of the config.json. Empty without one.
        family: Model family.
        names: Naming scheme of the tensors.
        side_files: Files of the model to copy to an output, and files to leave.
    """

    config_path: AnyPath | None
    config: HFConfig
    family: Family
    names: TensorNames
    side_files: SideFiles


def read_folder_model(
    located: LocatedCheckpoint,
    config_path: AnyPath | None,
    hints: SourceHints,
    tensors: TensorTypes,
    *,
    manifest: Manifest | None = None,
) -> FolderModel:
    """Read the model of a folder with weight files.

    Args:
        located: The located checkpoint.
        config_path: Path of the config.json. None without one: then the tensors are kept under their names,
            which is called the verbatim family.
        hints: User-supplied facts about the checkpoint.
        tensors: Dtype and shape of each tensor, by its name in the files.
        manifest: Manifest of a folder that prep wrote.
    """
    config: HFConfig = {}
    if config_path is not None:
        config = located.read_config(config_path)
    # Of a multimodal model, the family of the text part is selected by the names without the prefix.
    prefix = ""
    if not hints.verbatim and text_section(config) is not None:
        prefix = multimodal_wrapper_prefix(config, tensors.keys(), hints.drop)
    bare_tensors = {name.removeprefix(prefix): types for name, types in tensors.items()}
    family = select_family(config, hints, bare_tensors, manifest, wrapper=prefix)
    folder = located.files.path
    listed = located.files.listed_names if folder.is_dir() else None
    side_files = find_side_files(folder, hints.copied_files, listed)
    names = detect_names(family, config, full_names=bare_tensors.keys())
    if prefix:
        names = replace(names, wrapper_prefix=prefix)
    return FolderModel(config_path, config, family, names, side_files)


def select_family(
    config: HFConfig,
    hints: SourceHints,
    tensors: TensorTypes,
    manifest: Manifest | None = None,
    *,
    wrapper: str = "",
) -> Family:
    """Return the family of a checkpoint.

    A multimodal checkpoint is opened with the names of its file, before `split_towers` finds its text part.

    Args:
        config: Content of its config.json. Empty without one.
        hints: Whether the verbatim family is required, allowed or excluded.
        tensors: Dtype and shape of each tensor, by its name in the files without the prefix of a wrapper.
        manifest: Manifest of a folder that prep wrote. The family that it records is used again.
        wrapper: Prefix that a wrapper gave to all names of a multimodal model. Patterns of `--drop` may have it.

    Raises:
        PrepError: No family has the model_type and the verbatim family is excluded, or the text part of a multimodal
            checkpoint is not supported.
    """
    model_type = config.get("model_type")
    is_unknown = model_type is None or (isinstance(model_type, str) and model_type not in FAMILIES)
    was_verbatim = manifest is not None and manifest.family == VERBATIM
    if hints.verbatim or (hints.verbatim is None and (was_verbatim or is_unknown)):
        return verbatim_family(tensors)
    if is_unknown and text_section(config) is not None:
        read_text_part(config, tensors.keys(), hints.drop, wrapper=wrapper)
        return verbatim_family(tensors)
    return family_of(config)


def find_config_path(hints: SourceHints, folder: AnyPath, display_name: str) -> AnyPath | None:
    """Return the path of the user's config.json or of the folder's, or None if no config is needed."""
    # A broken link is an error of its own, and no checkpoint without a config.
    needs_config = hints.verbatim is False or hints.config_path is not None
    if not needs_config and not is_there(folder / CONFIG):
        return None
    return hints.resolve_config_path(folder, display_name)


def as_verbatim(source: Source, dtype: str | None = None) -> Source:
    """Return a source with the verbatim family of its tensors.

    Tensors of two dtypes form one leaf if both are cast to `dtype`, the requested one of the output.
    """
    types: dict[str, tuple[str, tuple[int, ...]]] = {}
    tensors: list[SourceTensor] = []
    for tensor in source.tensors:
        name = source.names.stored_name(tensor.name)
        types[name] = (tensor.cast(dtype).dtype, tensor.shape)
        tensors.append(replace(tensor, name=name))
    for tensor in source.tower_tensors:
        name = source.file_name(tensor)
        types[name] = (tensor.cast(dtype).dtype, tensor.shape)
        tensors.append(replace(tensor, name=name))
    family = verbatim_family(types)
    return replace(
        source,
        family=family,
        names=TensorNames(family, is_prefixed=False),
        tensors=tuple(tensors),
        tower_tensors=(),
        wrapper=None,
    )


def truncate_layers(source: Source, layers: int) -> tuple[Source, tuple[DroppedTensor, ...]]:
    """Return a source with the first layers of its model and their config, and the tensors of the other layers."""
    names = [tensor.name for tensor in source.tensors]
    later = later_layers(source.family, source.config, names, layers)
    if not later:
        what = text("{} removes no layer", Option("layers", layers))
        why = f"{source.display_name} has no more layers"
        raise usage_error(what, why, text("use a smaller {}", Option("layers")))
    # Of a family, they are beside the model. They would follow another layer.
    beside = {source.names.bare_name(source.file_name(t)): t for t in source.tower_tensors}
    prediction = prediction_tensors(source.family, source.config, [*names, *beside])
    later |= prediction
    config = truncate_config(source.config, layers, removes_prediction=bool(prediction))
    if not source.family.is_verbatim and _has_later_layers(source, config, names, layers):
        what = text("{} is not supported for {}", Option("layers"), source.display_name)
        raise PrepError(what, "its config does not state the number of layers", f"edit {CONFIG}")
    if not source.family.is_verbatim:
        absent = missing_tensors(source.family, source.config, config)
        if absent:
            what = text("{} is not supported for {}", Option("layers"), source.display_name)
            why = (
                f"the last layer of a model has tensors of its own, and {absent[0]} does not exist"
            )
            raise PrepError(what, why, text("convert it without {}", Option("layers")))
    _check_attention_is_kept(source, config, layers)
    table_dims = tensors_of_all_layers(source.family, source.config)
    kept: list[SourceTensor] = []
    dropped: list[DroppedTensor] = []
    for tensor in source.tensors:
        if tensor.name in later:
            dropped.append(DroppedTensor(tensor.name, tensor.nbytes, LAYERS_RULE))
        elif tensor.name in table_dims:
            table, rest = _truncate_table(source, tensor, table_dims[tensor.name], layers)
            kept.append(table)
            dropped.append(rest)
        else:
            kept.append(tensor)
    later_names = {source.names.full_name(name) for name in later}
    towers: list[SourceTensor] = []
    for name, tensor in beside.items():
        if name in prediction:
            file_name = source.file_name(tensor)
            later_names.add(file_name)
            dropped.append(DroppedTensor(file_name, tensor.nbytes, LAYERS_RULE))
        else:
            towers.append(tensor)
    scales, dropped_scales, records = _truncate_scales(source, later_names)
    dropped += dropped_scales
    truncated = replace(
        source,
        tensors=tuple(kept),
        tower_tensors=tuple(towers),
        wrapper=source.wrapper if towers or source.is_multimodal else None,
        state_tensors=scales,
        quantized=records,
        config=config,
        config_path=None,
    )
    if source.family.is_verbatim:
        truncated = as_verbatim(truncated)
    return truncated, tuple(dropped)


def _check_attention_is_kept(source: Source, config: HFConfig, layers: int) -> None:
    """Raise PrepError if the truncated config gives a layer another attention.

    E.g. the last layer of Gemma 4 has full attention by default, also as the third of three layers.
    """
    try:
        windows = source.family.arch_config(source.config).sliding_windows[:layers]
        truncated_windows = source.family.arch_config(config).sliding_windows
    except PrepError:
        # A family without a computation, or a config that it does not support: the tensors are converted all the same.
        return
    for layer, (before, after) in enumerate(zip(windows, truncated_windows)):
        if before != after:
            what = text("{} changes the attention of layer {}", Option("layers", layers), layer)
            why = "its config has no list of layer types, and their order depends on the number of layers"
            raise PrepError(what, why, f"add `layer_types` to {CONFIG}")


def _truncate_table(
    source: Source, tensor: SourceTensor, axis: int, layers: int
) -> tuple[SourceTensor, DroppedTensor]:
    """Return the part of a tensor with the values of the first layers, and the record of the rest.

    The part has no recorded digest of its own.

    The layers are in order in the dim `axis`: 0 for rows, 1 for columns.
    """
    extent = tensor.shape[axis]
    length = extent // source.family.sizes(source.config)[INPUT_LAYERS] * layers
    location = tensor.placement[0].cut(axis, length)
    if len(tensor.placement) > 1 or location is None:
        what = text("{} is not supported for {}", Option("layers"), source.display_name)
        why = f"{tensor.name} has the values of all layers, and is stored in parts"
        raise PrepError(what, why, text("convert it without {}", Option("layers")))
    shape = (*tensor.shape[:axis], length, *tensor.shape[axis + 1 :])
    part = replace(tensor, shape=shape, placement=(location,), digests=(), made_from=tensor.stored)
    removed = (length, extent)
    nbytes = tensor.nbytes - part.nbytes
    if axis:
        return part, DroppedTensor(tensor.name, nbytes, LAYERS_RULE, columns=removed)
    return part, DroppedTensor(tensor.name, nbytes, LAYERS_RULE, removed)


def _truncate_scales(
    source: Source, later_names: Collection[str]
) -> tuple[tuple[SourceTensor, ...], list[DroppedTensor], dict[str, QuantizedRecord]]:
    """Return the scales of the first layers, the scales of the other ones, and the records of the first layers."""
    later_numbers = {_up_to_number(name) for name in later_names}
    kept: list[SourceTensor] = []
    dropped: list[DroppedTensor] = []
    for tensor in source.state_tensors:
        if _up_to_number(split_name(tensor.name)[1]) in later_numbers:
            dropped.append(DroppedTensor(tensor.name, tensor.nbytes, LAYERS_RULE))
        else:
            kept.append(tensor)
    records = {name: record for name, record in source.quantized.items() if name not in later_names}
    return tuple(kept), dropped, records


def _up_to_number(name: str) -> str:
    """Return a name up to its first number: `model.layers.3.mlp.1.w` -> `model.layers.3`."""
    pieces, numbers = split_numbers(name)
    if not numbers:
        return name
    return f"{pieces[0]}{numbers[0]}"


def _has_later_layers(source: Source, config: HFConfig, names: Iterable[str], layers: int) -> bool:
    """Return whether a truncated config still describes tensors of layers after the first `layers` ones."""
    try:
        return bool(later_layers(source.family, config, names, layers))
    except PrepError as error:
        what = text("{} leaves a model that is not supported", Option("layers", layers))
        raise PrepError(what, error.why, text("use a larger {}", Option("layers"))) from error


def verbatim_error(display_name: str) -> PrepError:
    """Return the error of commands that compute with a model, for a verbatim checkpoint."""
    hint = text(
        "use a checkpoint of a supported family, converted without {}", Option("verbatim", True)
    )
    return PrepError(f"prep cannot compute with {display_name}", CANNOT_TRAIN, hint)
