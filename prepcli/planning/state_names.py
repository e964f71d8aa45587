"""Names in a training state: parameters, what the optimizer keeps of each of them, and leaves that stand alone. Pure.

A slot is a subtree of the optimizer state with a leaf for each parameter, as `opt_state.adam.mu`. What it holds is
tensors as the parameters are, called `SLOT/TENSOR`; a leaf that belongs to no parameter is a tensor called `/LEAF`.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.models.axis_map import AxisMap, Factor, TensorDim

PARAMS = "params"
OPT_STATE = "opt_state"
OPT_STATE_RULE, TRAINING_STATE_RULE = "optimizer state", "training state"  # by which such leaves are left out
SEPARATOR = "/"

Shapes = Mapping[str, tuple[int, ...]]


def qualify(slot: str, tensor: str) -> str:
    """What a tensor of a slot is called; a parameter by its own name, a leaf that stands alone has no slot."""
    return tensor if slot == PARAMS else f"{slot}{SEPARATOR}{tensor}"


def split_name(name: str) -> tuple[str, str]:
    """Slot and tensor of a name that `joined` made."""
    slot, found, tensor = name.partition(SEPARATOR)
    return (slot, tensor) if found else (PARAMS, name)


def find_slots(leaves: Shapes, parameters: Shapes) -> tuple[str, ...]:
    """The slots among the leaves, by dotted name: those that have each parameter, by path, in its shape."""
    first = next(iter(parameters), "")
    found = {name.removesuffix(f".{first}") for name in leaves if name.endswith(f".{first}")}
    whole = (slot for slot in found if all(leaves.get(f"{slot}.{path}") == s for path, s in parameters.items()))
    return tuple(sorted(slot for slot in whole if slot.split(".")[0] == OPT_STATE))


def identity_axis_map(name: str, shape: tuple[int, ...]) -> AxisMap:
    """The row of a leaf that is one tensor, dim by dim."""
    dims = tuple(Factor(f"d{i}", extent) for i, extent in enumerate(shape))
    tensor = tuple(TensorDim(dim.extent, 0, (dim,)) for dim in dims)
    return AxisMap(name, tuple((dim,) for dim in dims), (name,), tensor)
