"""Select the tensors of two checkpoints for a comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from prepcli.console.formatting import format_bytes
from prepcli.console.observer import Observer
from prepcli.errors import Command, PrepError, text
from prepcli.planning.state_names import split_name
from prepcli.sources.dequantized import decode_alike
from prepcli.sources.model_family import as_verbatim
from prepcli.sources.openers.peft_folder import ADAPTER_FAMILY
from prepcli.sources.source import Source, SourceTensor


def comparable_sources(
    source: Source, against_source: Source, observer: Observer
) -> tuple[Source, Source]:
    """Return two checkpoints with only the kinds of tensors in both, e.g. without towers.

    Both are decoded if one is. The observer gets a line per ignored kind.
    """
    source, against_source = decode_alike(source, against_source)
    if not (source.state_tensors and against_source.state_tensors):
        for one in (source, against_source):
            why = "only parameters are compared"
            _note_ignored(one, "training state", one.state_tensors, why, observer)
        source = replace(source, state_tensors=())
        against_source = replace(against_source, state_tensors=())
    compared = _without_absent_slots(source, against_source, observer)
    against_source = _without_absent_slots(against_source, source, observer)
    source = compared
    if source.family.is_verbatim or against_source.family.is_verbatim:
        # A file has the same tensors, whether its family has rows for them or not.
        source = as_verbatim(source)
        against_source = as_verbatim(against_source)
    elif source.wrapper is None or against_source.wrapper is None:
        # A text model and a training step have no towers. A multimodal model without towers has lost them.
        for one in (source, against_source):
            why = "only the text part is compared"
            _note_ignored(one, "towers", one.tower_tensors, why, observer)
        source = replace(source, tower_tensors=())
        against_source = replace(against_source, tower_tensors=())
    return source, against_source


def check_contents(source: Source, against_source: Source) -> None:
    """Raise PrepError if one checkpoint has adapters and the other one a model: they share no tensor."""
    if _has_adapters(source) == _has_adapters(against_source):
        return
    adapters, model = (
        (source, against_source) if _has_adapters(source) else (against_source, source)
    )
    what = f"{adapters.display_name} has only adapters, and {model.display_name} is a model"
    hint = text(
        "compare with the result of {}; {} writes the adapter of a run",
        Command("merge", "ADAPTER", "BASE"),
        Command("export", "RUN"),
    )
    raise PrepError(what, "they have no tensor in common", hint)


def _has_adapters(source: Source) -> bool:
    """Return whether a checkpoint has the adapters of a model without their base."""
    return source.family is ADAPTER_FAMILY or source.tree_manifest.is_adapter


def _without_absent_slots(source: Source, other: Source, observer: Observer) -> Source:
    """Return a checkpoint without the slots absent from the training state of another framework.

    E.g. Tunix has no place for the averages of a run.
    """
    if other.training_record is None:
        return source
    slots = {_slot_or_leaf(tensor) for tensor in other.state_tensors}
    kept: list[SourceTensor] = []
    ignored = defaultdict[str, list[SourceTensor]](list)
    for tensor in source.state_tensors:
        slot = _slot_or_leaf(tensor)
        if slot in slots:
            kept.append(tensor)
        else:
            ignored[slot].append(tensor)
    for slot, tensors in ignored.items():
        _note_ignored(source, slot, tensors, f"{other.display_name} has none", observer)
    return replace(source, state_tensors=tuple(kept))


def _slot_or_leaf(tensor: SourceTensor) -> str:
    """Return the slot of a tensor in a training state, or the name of a leaf outside of slots."""
    slot, name = split_name(tensor.name)
    return slot or name


def _note_ignored(
    source: Source, kind: str, tensors: Sequence[SourceTensor], why: str, observer: Observer
) -> None:
    """Print a note about the ignored tensors of a kind, if there are any."""
    if tensors:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        size = format_bytes(nbytes)
        observer.note(f"{kind} of {source.display_name} ({size}) ignored: {why}")
