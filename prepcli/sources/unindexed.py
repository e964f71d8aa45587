"""Records of stored tensors that the index of a model does not name. No command reads them."""

from __future__ import annotations

from collections.abc import Iterable

from prepcli.formats.model_files import UnindexedTensor
from prepcli.planning.plan import DroppedTensor

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
