"""Checkpoints as `verify` compares them: the tensors of the model, with their names for messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prepcli.algebra.boxes import Range
from prepcli.commands.operations.verification_results import LeftOutTensor
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.planning.tensor_match import (
    DEFAULT_MATCH_OPTIONS,
    TensorMatch,
)
from prepcli.sources.dropped_tensors import without_recorded_drops
from prepcli.sources.openers.peft_folder import ADAPTER_FAMILY
from prepcli.sources.source import (
    Source,
    SourceTensor,
    TensorLabel,
    label_tensors,
    match_source_tensors,
    stored_axis_maps,
)
from prepcli.sources.vocabulary_tensors import vocabulary_names


@dataclass(frozen=True, slots=True)
class VerifiedModel:
    """Source with the tensors to verify."""

    source: Source
    match: TensorMatch
    tensors: dict[str, SourceTensor]  # the tensors of the model and of its training state, by name
    labels: dict[str, TensorLabel]  # names in messages
    vocab_tensors: frozenset[str]  # names of the tensors with a vocabulary axis
    true_vocab: int  # rows without padding


def collect_model(source: Source, other: Source | None = None) -> VerifiedModel:
    """Return the tensors to verify. Ignored tensors, such as buffers, are omitted.

    Args:
        source: The checkpoint.
        other: The other checkpoint of a comparison. Tensors that `--drop` left out of it are ignored.
    """
    if source.family is ADAPTER_FAMILY:
        return _collect_adapter(source)
    if other is not None:
        source = without_recorded_drops(source, other.manifest or NO_MANIFEST)
    match = match_source_tensors(source, stored_axis_maps(source), DEFAULT_MATCH_OPTIONS)
    matched = [t for t in source.tensors if t.name in match.uses]
    tensors = {t.name: t for t in (*matched, *source.tower_tensors, *source.state_tensors)}
    vocabulary = source.vocabulary()
    return VerifiedModel(
        source,
        match=match,
        tensors=tensors,
        labels=label_tensors(source, match.uses),
        vocab_tensors=vocabulary_names(source, match, vocabulary),
        true_vocab=vocabulary.true_size,
    )


def unused_tensors(model: VerifiedModel, other: VerifiedModel) -> Iterator[LeftOutTensor]:
    """Yield the tensors outside of the model, such as buffers, that the other checkpoint does not have."""
    other_names = {tensor.name for tensor in other.source.tensors}
    duplicates = {check.name for check in model.match.checks}
    source = model.source
    for tensor in model.match.dropped:
        if tensor.name not in other_names | duplicates:
            # Tensors that the source itself drops have their names in the file.
            name = tensor.name
            if tensor not in source.dropped:
                name = source.names.display_name(name)
            yield {"tensor": name, "checkpoint": source.display_name, "why": tensor.rule}


def _collect_adapter(source: Source) -> VerifiedModel:
    """Return the tensors of an adapter. Their leaves and vocabulary are unknown without the base model."""
    tensors = {tensor.name: tensor for tensor in source.tensors}
    return VerifiedModel(
        source,
        match=TensorMatch(uses={}, dropped=(), checks=(), is_tied=False),
        tensors=tensors,
        labels={name: TensorLabel("", name) for name in tensors},
        vocab_tensors=frozenset(),
        true_vocab=0,
    )


def unpadded_rows(model: VerifiedModel, tensor: SourceTensor) -> Range:
    """Return the rows of a tensor without padding."""
    rows = tensor.shape[0] if tensor.shape else 1
    return (0, model.true_vocab) if tensor.name in model.vocab_tensors else (0, rows)


def unpadded_shape(model: VerifiedModel, tensor: SourceTensor) -> tuple[int, ...]:
    """Return the shape of a tensor without padding rows."""
    if tensor.name not in model.vocab_tensors:
        return tensor.shape
    return (model.true_vocab, *tensor.shape[1:])
