"""The training state in an Orbax item of MaxText: the parameters, the optax state of AdamW and the step.

MaxText 0.2.5 saves one item. `common/train_state_nnx.py` reshapes its state to the layout of a Flax train state:
`opt_state` is the list of the states in the chain `optax.adamw`: Adam, weight decay (empty) and schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prepcli.engine.blobs import MemoryBlob
from prepcli.planning.item_storage import Storage
from prepcli.planning.plan import Contiguous
from prepcli.planning.state_names import identity_axis_map, qualify
from prepcli.sources.adam_state import NUM_UPDATES, STEP, AdamState
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.orbax_item import LeafUse, OrbaxItemLayout, Partitioning, lay_out_uses
from prepcli.targets.trainer_item import TRAINER_ITEMS, trainer_item_uses
from trainer.models.rules import DEFAULT_RULES

# Prefix of the leaves of a moment. The order is that of `adam_state.MOMENTS`.
MOMENT_ROOTS = ("opt_state.0.mu.params.", "opt_state.0.nu.params.")
STEP_LEAF = "step"
NUM_UPDATES_LEAF = "opt_state.0.count"
SCHEDULE_LEAF = "opt_state.2.count"
# The state of weight decay in the chain.
EMPTY_NODES: tuple[tuple[str | int, ...], ...] = (("opt_state", 1),)
OPT_STATE_KEY = "opt_state"
COUNTER_DTYPE = "int32"


def lay_out_item_state(
    source: Source,
    parameters: Sequence[SourceTensor],
    state: AdamState,
    *,
    layout: str,
    vocab_size: int,
    storage: Storage,
) -> OrbaxItemLayout:
    """Lay out parameters and training state as the leaves of an item of MaxText.

    Args:
        source: The opened source.
        parameters: The parameters to write.
        state: The training state.
        layout: Name of the layout.
        vocab_size: Vocabulary rows in the output.
        storage: Storage of the chunks.

    Raises:
        PrepError: A parameter has no leaf in the layout, or a leaf has no parameter.
    """
    root = TRAINER_ITEMS[layout].root
    uses: list[LeafUse] = []
    for use in trainer_item_uses(source, parameters, layout=layout, vocab_size=vocab_size):
        uses.append(use)
        path = use.name.removeprefix(root)
        pair = (state.first[use.tensor.name], state.second[use.tensor.name])
        for moment_root, moment in zip(MOMENT_ROOTS, pair, strict=True):
            uses.append(replace(use, tensor=moment, name=f"{moment_root}{path}"))
    counters = {
        STEP_LEAF: state.counters[STEP],
        NUM_UPDATES_LEAF: state.counters[NUM_UPDATES],
        SCHEDULE_LEAF: schedule_counter(source),
    }
    for leaf, counter in counters.items():
        uses.append(LeafUse(counter, leaf, identity_axis_map(leaf, ())))
    item = lay_out_uses(source, uses, Partitioning(mesh=None, rules=DEFAULT_RULES), storage=storage)
    leaves = tuple(replace(leaf, path=list_path(leaf.path)) for leaf in item.leaves)
    return replace(item, leaves=leaves)


def schedule_counter(source: Source) -> SourceTensor:
    """Return the count of the schedule, the first value of `schedule_blob`.

    It equals Adam's count. A tensor has one place in an output, so it is a tensor of its own.
    """
    placement = Contiguous(len(source.byte_sources), 0)
    return SourceTensor(qualify("", SCHEDULE_LEAF), COUNTER_DTYPE, (), (placement,))


def schedule_blob(state: AdamState) -> MemoryBlob:
    """Return the bytes of the schedule's count. They follow the byte sources of the source."""
    return MemoryBlob("counters", np.array(state.num_updates, COUNTER_DTYPE).tobytes())


def list_path(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return a path with the index of a list as a number.

    >>> list_path(("opt_state", "0", "count"))
    ('opt_state', 0, 'count')
    """
    if path[0] != OPT_STATE_KEY:
        return path
    return (path[0], int(path[1]), *path[2:])
