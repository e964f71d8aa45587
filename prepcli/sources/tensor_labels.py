"""Names of tensors in messages: the leaf's path, then the tensor's name in the checkpoint's files in brackets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prepcli.core.errors import PrepError
from prepcli.planning.state_names import TOWERS, split_name
from prepcli.planning.tensor_match import DEFAULT_MATCH_OPTIONS, TensorUse
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, stored_axis_maps


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
    """Return the label of each tensor of a source, by its name in `source.all_tensors`.

    Args:
        source: The checkpoint.
        uses: The leaves of each parameter's tensor, from matching the source with its family.
    """
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
        uses = match_source_tensors(source, stored_axis_maps(source), DEFAULT_MATCH_OPTIONS).uses
    except PrepError:
        # E.g. the base of a merge with the matrices of an adapter.
        uses = {}
    return label_tensors(source, uses).get(tensor.name, TensorLabel("", tensor.name))
