"""Tensor names in a training state: parameters, optimizer slots, and other leaves.

A slot is a subtree of the optimizer state with one leaf per parameter, such as `opt_state.adam.mu`. Its tensors are
named `SLOT/TENSOR` after the parameters' tensors. A leaf that belongs to no parameter is a tensor named `/LEAF`.
Tensors of a multimodal model's towers are named `towers/TENSOR`.
"""

from __future__ import annotations

from collections.abc import Mapping

PARAMS = "params"
OPT_STATE = "opt_state"
# Tree of the tensors of a multimodal model outside of its text part.
TOWERS = "towers"
# Rules that drop such leaves
OPT_STATE_RULE = "optimizer state"
TRAINING_STATE_RULE = "training state"
SEPARATOR = "/"
# Slots of AdamW.
FIRST_MOMENT = f"{OPT_STATE}.adam.mu"
SECOND_MOMENT = f"{OPT_STATE}.adam.nu"
MOMENTS = (FIRST_MOMENT, SECOND_MOMENT)
# Leaves outside of slots: updates of Adam, steps, and steps without an update.
NUM_UPDATES = f"{OPT_STATE}.adam.count"
STEP = "step"
SKIPPED = "skipped"
SKIPPED_IN_ROW = "skipped_in_row"
COUNTERS = (NUM_UPDATES, STEP, SKIPPED, SKIPPED_IN_ROW)

Shapes = Mapping[str, tuple[int, ...]]


def qualify(slot: str, tensor: str) -> str:
    """Return the qualified name: TENSOR for a parameter, SLOT/TENSOR in an optimizer slot, /LEAF for other leaves."""
    if slot == PARAMS:
        return tensor
    return f"{slot}{SEPARATOR}{tensor}"


def split_name(name: str) -> tuple[str, str]:
    """Split a name that `qualify` returned into slot and tensor."""
    # E.g. `opt_state.mu/wte.weight` -> `opt_state.mu`, `wte.weight`, and `/step` -> empty slot, `step`.
    slot, separator, tensor = name.partition(SEPARATOR)
    if not separator:
        return PARAMS, name
    return slot, tensor


def find_slots(leaves: Shapes, parameters: Shapes) -> tuple[str, ...]:
    """Return the dotted names of the slots (subtrees with one leaf per parameter) in an optimizer state.

    Args:
        leaves: Shapes of all leaves of the state, by dotted name.
        parameters: Shapes of the parameters, by dotted path.

    Returns:
        The subtrees of `opt_state` that contain every parameter in its shape, sorted.
    """
    # Every complete slot has the first parameter, so that its leaves alone give all candidates.
    first_path = next(iter(parameters), "")
    slots: list[str] = []
    for name in leaves:
        slot = name.removesuffix(f".{first_path}")
        if slot == name or slot.split(".")[0] != OPT_STATE:
            continue
        if all(leaves.get(f"{slot}.{path}") == shape for path, shape in parameters.items()):
            slots.append(slot)
    return tuple(sorted(slots))
