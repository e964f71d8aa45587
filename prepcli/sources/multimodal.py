"""Models with tensors beside those of a family: the towers of a multimodal model, and layers of multi-token prediction.

Towers are image and audio encoders. Both kinds are stored beside the parameters, bit for bit, and no command of prep
computes with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from prepcli.core.errors import PrepError
from prepcli.core.json_values import HFConfig
from prepcli.models.prediction import prediction_names, without_prediction
from prepcli.models.registry import FAMILIES
from prepcli.models.text_part import TextPart, read_text_part, text_section, uses_mrope
from prepcli.planning.manifest_fields import Manifest, QuantizedRecord
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.quantization_leaves import QUANTIZATION
from prepcli.planning.state_names import TOWERS, qualify, split_name
from prepcli.planning.tensor_match import TensorNames, find_wrapper_prefix
from prepcli.sources.appended_files import append_files, shift_file_numbers
from prepcli.sources.source import Source, SourceTensor, Wrapper
from prepcli.sources.transposed_tensors import without_transposed_tensors

# Formats of files with the names of transformers.
MULTIMODAL_KINDS = ("safetensors", "torch", "dcp")
# Rule that drops the towers of an export of the text model.
TEXT_ONLY_RULE = "--text-only"
# Settings of images and sounds, which the text model does not have.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


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
    """Return the prefix that a wrapper gave to all names of a multimodal model. Empty for any other model.

    Args:
        config: Content of its config.json.
        full_names: Names of its tensors in the file.
        drop: Patterns of tensors of the text part that its family need not have.
    """
    if text_section(config) is None or config.get("model_type") in FAMILIES:
        return ""

    def has_text_part(prefix: str) -> bool:
        names = (name.removeprefix(prefix) for name in full_names)
        return find_text_part(config, names, drop, wrapper=prefix) is not None

    return find_wrapper_prefix(full_names, has_text_part)


def text_part_fault(source: Source, drop: Sequence[str] = ()) -> str:
    """Return why a multimodal checkpoint is read under the names in its files. Empty for any other source.

    Args:
        source: The opened source.
        drop: Patterns of tensors that may lie among those of the text part.
    """
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

    Args:
        source: A source with the names of transformers. Without such tensors, it is returned unchanged.
        drop: Patterns of tensors that may lie among those of the text part.
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
    """Return a source with some of its tensors as parameters, and the other ones as towers.

    Args:
        source: The source.
        model: It has the family, the config and the names of the parameters.
        parameters: Names of the parameters in the file, without the prefix of a wrapper.
    """
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
        small_files=tuple(f for f in source.small_files if f.name not in PROCESSOR_FILES),
        extra_entries=(*source.extra_entries, dropped),
        config_path=None,
        wrapper=None,
    )


def with_towers(source: Source, other: Source) -> Source:
    """Return the parameters in one source with the towers of another one.

    Args:
        source: A training step.
        other: The model with towers.
    """
    first = len(source.byte_sources)
    return replace(
        append_files(source, other),
        config_path=None,
        wrapper=other.wrapper,
        tower_tensors=tuple(shift_file_numbers(tensor, first) for tensor in other.tower_tensors),
    )
