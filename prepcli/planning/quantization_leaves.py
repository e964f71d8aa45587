"""Leaves for the scales of dequantised weights.

An init of decoded weights keeps the scales and all other stored tensors except the codes: the quantised integers or
float8 values. An export copies both from the original model, and compares the scales with the kept ones. The kept
tensors are in the slot `quantization`, under their names in the quantised files. The name of their leaf is one key
below `quantization`, with stacked numbers as `*`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.models.parameters import parameter_rows
from prepcli.models.verbatim import TensorTypes, verbatim_family
from prepcli.planning.state_names import split_name
from prepcli.planning.state_rows import StackedIndices

# Slot of the scales, and first key of their leaves.
QUANTIZATION = "quantization"
# Slot of tensors that are read for a check, and written nowhere: decoded weights, and tensors in their stored order of
# dims whose views in another order are written.
DECODED = "decoded"
QUANTIZATION_RULE = "scales of quantised weights"


def quantization_leaves(
    types: TensorTypes,
) -> Iterator[tuple[str, str, AxisMap, StackedIndices]]:
    """Yield the name of each stored tensor with the name of its leaf, its axis map and its place in the leaf.

    A tensor without elements has no leaf.

    Args:
        types: Dtype and shape of each stored tensor, by name.
    """
    family = verbatim_family(types)
    sizes = family.sizes({})
    for path, row in parameter_rows(family, {}).items():
        axis_map = bind_row(row, sizes)
        for name, indices in axis_map.tensors():
            leaf = f"{QUANTIZATION}.{path.format(**indices)}"
            yield name, leaf, axis_map, tuple(indices.items())


def is_quantization_leaf(name: str) -> bool:
    """Return whether a leaf has scales."""
    return name.startswith(f"{QUANTIZATION}.")


def is_quantization_tensor(name: str) -> bool:
    """Return whether the qualified name of a tensor is in the slot of the scales."""
    return split_name(name)[0] == QUANTIZATION


def is_decoded_tensor(name: str) -> bool:
    """Return whether the qualified name of a tensor is in the slot of decoded weights, which are read for a check."""
    return split_name(name)[0] == DECODED
