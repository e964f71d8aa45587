"""Multimodal checkpoints: the text part as a model of its family, and the towers (image and audio encoders)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from prepcli.errors import PrepError
from prepcli.formats.manifest import TOWERS_KEY
from prepcli.planning.manifest_fields import ManifestFields
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.state_names import TOWERS, qualify
from prepcli.planning.tensor_match import TensorNames
from prepcli.sources.appended_files import append_files, shift_file_numbers
from prepcli.sources.source import Source, SourceTensor, Wrapper
from prepcli.sources.transposed_tensors import without_transposed_tensors
from trainer.models.json_types import HFConfig
from trainer.models.registry import FAMILIES
from trainer.models.text_part import TextPart, read_text_part, uses_mrope

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
    config: HFConfig, names: Iterable[str], drop: Sequence[str] = ()
) -> TextPart | None:
    """Return the text part of a multimodal checkpoint, or None if it has no supported one.

    See `read_text_part` for the arguments.
    """
    try:
        return read_text_part(config, frozenset(names), drop)
    except PrepError:
        return None


def split_text_part(source: Source, drop: Sequence[str] = ()) -> Source:
    """Return a multimodal source with its text part as parameters, and the other tensors as towers.

    Args:
        source: A source of the verbatim family. Without a supported text part, it is returned unchanged.
        drop: Patterns of tensors that may lie among those of the text part.
    """
    part = find_text_part(source.config, (tensor.name for tensor in source.tensors), drop)
    if part is None:
        return source
    names = TensorNames(part.family)
    parameters: list[tuple[SourceTensor, str]] = []
    towers: list[tuple[SourceTensor, str]] = []
    file_names = source.tensor_file_names or ("",) * len(source.tensors)
    for tensor, file_name in zip(source.tensors, file_names, strict=True):
        if tensor.name in part.names:
            parameters.append((replace(tensor, name=names.bare_name(tensor.name)), file_name))
        else:
            towers.append((replace(tensor, name=qualify(TOWERS, tensor.name)), file_name))
    return replace(
        source,
        family=part.family,
        config=part.config,
        names=names,
        tensors=tuple(tensor for tensor, _ in parameters),
        tower_tensors=tuple(tensor for tensor, _ in towers),
        tensor_file_names=tuple(name for _, name in (*parameters, *towers) if name),
        wrapper=Wrapper(source.config, part.config),
    )


def towers_entry(source: Source) -> ManifestFields:
    """Return the manifest's entry of a multimodal model: its type, and the prefixes of its text part in files."""
    recorded = source.tree_manifest.towers
    if recorded is not None:
        return {TOWERS_KEY: recorded}
    if source.wrapper is None:
        return {}
    entry: dict[str, object] = {
        "model_type": source.wrapper.config.get("model_type"),
        "prefix": source.family.prefix,
        "head_prefix": source.family.head_prefix,
    }
    if uses_mrope(source.wrapper.config):
        # Training reads this entry: a recipe must not change the rope type of a model with M-RoPE.
        entry["mrope"] = True
    return {TOWERS_KEY: entry}


def text_model(source: Source) -> Source:
    """Return the text part of a multimodal source as a separate model, as its class in transformers reads it."""
    source = without_transposed_tensors(source)
    family = FAMILIES[source.family.name]
    nbytes = sum(tensor.nbytes for tensor in source.tower_tensors)
    dropped = (DroppedTensor(TOWERS, nbytes, TEXT_ONLY_RULE),) if nbytes else ()
    return replace(
        source,
        family=family,
        names=TensorNames(family),
        tensor_file_names=source.tensor_file_names[: len(source.tensors)],
        small_files=tuple(f for f in source.small_files if f.name not in PROCESSOR_FILES),
        extra_entries=(*source.extra_entries, *dropped),
        config_path=None,
        wrapper=None,
        tower_tensors=(),
    )


def with_towers(source: Source, other: Source) -> Source:
    """Return the text part in one source with the towers of another one.

    Args:
        source: A training step of the text part.
        other: The multimodal model.
    """
    first = len(source.byte_sources)
    return replace(
        append_files(source, other),
        config_path=None,
        wrapper=other.wrapper,
        tower_tensors=tuple(shift_file_numbers(tensor, first) for tensor in other.tower_tensors),
    )
