"""Tensors outside of every output: dropped ones (`--drop`), and ones without an entry in the index of their model.

One rule holds for each form of a checkpoint. A tensor is dropped if a pattern matches its name and the family of the
source does not need it. A verbatim checkpoint needs none of its tensors, and nor does a multimodal model those of its
towers. No command reads a tensor outside of the index.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import replace

from prepcli.core.errors import Command, Option, text, usage_error
from prepcli.formats.model_files import UnindexedTensor
from prepcli.models.text_part import matching_patterns
from prepcli.models.truncation import (
    EARLIER_RULES,
    UNRECORDED_RULE,
    prediction_names,
    without_prediction,
)
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import DroppedTensor
from prepcli.sources.model_family import as_verbatim, split_towers
from prepcli.sources.source import Source, SourceTensor, source_rows
from prepcli.sources.tensor_match import DROP_RULE, tensor_uses

# Rule of these tensors, as plans and JSON objects name it.
UNINDEXED_RULE = "not in the index"
# An index names no file with a colon.
_SEPARATOR = ": "


def unindexed_entries(tensors: Iterable[UnindexedTensor]) -> tuple[DroppedTensor, ...]:
    """Return the records of tensors, named `FILE: TENSOR`: the index may name the same tensor of another file."""
    entries: list[DroppedTensor] = []
    for tensor in tensors:
        name = f"{tensor.file}{_SEPARATOR}{tensor.name}"
        entries.append(DroppedTensor(name, tensor.nbytes, UNINDEXED_RULE))
    return tuple(entries)


def unindexed_names(entries: Iterable[DroppedTensor]) -> list[str]:
    """Return the names of these tensors, without their files, from the records of all dropped tensors."""
    names: list[str] = []
    for entry in entries:
        if entry.rule == UNINDEXED_RULE:
            names.append(entry.name.partition(_SEPARATOR)[2])
    return names


def drop_tensors(source: Source, patterns: Sequence[str]) -> Source:
    """Return a source without the tensors that match a pattern. They are recorded in `dropped`."""
    if not patterns:
        return source
    needed = _needed_names(source)
    matching: set[str] = set()  # patterns with an effect
    dropped: dict[str, DroppedTensor] = {}
    for tensor in (*source.tensors, *source.tower_tensors):
        if tensor.name in needed:
            continue
        name = source.stored_name(tensor)
        effective = matching_drops(name, source, patterns)
        if effective:
            matching.update(effective)
            dropped[tensor.name] = DroppedTensor(name, tensor.nbytes, DROP_RULE)
    for name in unindexed_names(source.extra_entries):
        matching.update(matching_drops(name, source, patterns))
    for pattern in patterns:
        if pattern not in matching:
            what = text("{} drops nothing of {}", Option("drop", pattern), source.display_name)
            why = "no unexpected tensor has such a name, and tensors that the model uses are never dropped"
            hint = text("{} lists the tensors", Command("inspect", source.display_name))
            raise usage_error(what, why, hint)
    if len(dropped) == len(source.tensors):
        what = text("{} drops every tensor of {}", Option("drop", patterns[0]), source.display_name)
        raise usage_error(what, "nothing is left to convert", "use narrower patterns")
    return _without(source, dropped)


def matching_drops(name: str, source: Source, patterns: Sequence[str]) -> list[str]:
    """Return the patterns of `--drop` that match the name of a tensor of a source."""
    wrapper = source.names.wrapper_prefix
    return matching_patterns(name, source.family.prefix, patterns, wrapper=wrapper)


def without_recorded_drops(source: Source, output: Manifest) -> Source:
    """Return a source without the tensors with a record as dropped in the manifest of its output.

    They are those of `--drop`, and those of multi-token prediction in outputs of earlier versions. Exports of such
    outputs have no record.
    """
    recorded = _recorded_rules(output)
    # Earlier versions left out multi-token prediction, and did not record it.
    is_same_family = output.family == source.family.name and not source.family.is_verbatim
    if is_same_family and output.may_lack_prediction:
        recorded |= dict.fromkeys(_stored_prediction(source), UNRECORDED_RULE)
    if not recorded:
        return source
    source = with_recorded_text_part(source, output)
    needed = _needed_names(source)
    wrapper = source.names.wrapper_prefix
    dropped: dict[str, DroppedTensor] = {}
    for tensor in (*source.tensors, *source.tower_tensors):
        name = source.stored_name(tensor)
        # A verbatim output has the prefix of a wrapper in its names. Earlier versions gave all names the prefix of the
        # family.
        spellings = (name, tensor.name, wrapper + name, source.family.prefix + name)
        rules = [recorded[spelling] for spelling in spellings if spelling in recorded]
        if rules and tensor.name not in needed:
            dropped[tensor.name] = DroppedTensor(name, tensor.nbytes, rules[0])
    return _without(source, dropped)


def with_recorded_text_part(source: Source, output: Manifest) -> Source:
    """Return a multimodal source with the text part that its output has, although it has further tensors.

    A text part with tensors outside of its family is found only if `--drop` removes them. The manifest of the output
    records their names. Any other source is returned unchanged.
    """
    recorded = _recorded_rules(output)
    if not recorded or not source.family.is_verbatim:
        return source
    patterns = [glob.escape(name) for name in sorted(recorded)]
    return split_towers(source, patterns)


def _recorded_rules(output: Manifest) -> dict[str, str]:
    """Return the names of the tensors with a record as dropped, each with its rule."""
    recorded: dict[str, str] = {}
    for entry in output.dropped:
        name, rule = entry.get("name"), entry.get("rule")
        if isinstance(name, str) and isinstance(rule, str) and rule in (DROP_RULE, *EARLIER_RULES):
            recorded[name] = rule
    return recorded


def _needed_names(source: Source) -> set[str]:
    """Return the names of the tensors in the family of a source."""
    if source.family.is_verbatim:
        return set()
    needed = set(tensor_uses(source_rows(source), source.family.sizes(source.config)))
    stored = {tensor.name for tensor in source.tensors}
    if source.family.is_tied(source.config, stored):
        # The embedding has the values of the head. A file with the head alone has it under the name of the embedding.
        needed.discard(source.family.tying.head_tensor)
    return needed


def _without(source: Source, dropped: dict[str, DroppedTensor]) -> Source:
    """Return a source without tensors. Their files still belong to it.

    The config states no multi-token prediction if all of its tensors are dropped.
    """

    def kept(tensors: tuple[SourceTensor, ...]) -> tuple[SourceTensor, ...]:
        return tuple(tensor for tensor in tensors if tensor.name not in dropped)

    file_names: list[str] = []
    if source.tensor_file_names:
        every = (*source.tensors, *source.tower_tensors)
        for tensor, file_name in zip(every, source.tensor_file_names, strict=True):
            if tensor.name not in dropped:
                file_names.append(file_name)
    rest = replace(
        source,
        tensors=kept(source.tensors),
        tower_tensors=kept(source.tower_tensors),
        tensor_file_names=tuple(file_names),
        dropped=(*source.dropped, *dropped.values()),
    )
    if source.family.is_verbatim:
        return as_verbatim(rest)
    if _stored_prediction(source) and not _stored_prediction(rest):
        rest = replace(rest, config=without_prediction(source.config))
    if not rest.tower_tensors and not rest.is_multimodal:
        rest = replace(rest, wrapper=None)
    return rest


def _stored_prediction(source: Source) -> list[str]:
    """Return the stored names of the tensors of multi-token prediction in a source of a family."""
    bare_names: dict[str, str] = {}
    for tensor in source.tower_tensors:
        bare_names[source.names.bare_name(source.file_name(tensor))] = source.stored_name(tensor)
    selected = prediction_names(source.family, source.config, bare_names)
    return [bare_names[name] for name in sorted(selected)]
