"""The training state in the checkpoints of JAX trainers: the parameters, the optax state of AdamW and the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from prepcli.engine.blobs import Blob, MemoryBlob
from prepcli.models.rules import DEFAULT_RULES
from prepcli.planning.item_storage import ItemStorage
from prepcli.planning.plan import Contiguous
from prepcli.planning.state_names import OPT_STATE, identity_axis_map, qualify
from prepcli.sources.adam_state import NUM_UPDATES, STEP, AdamSettings, AdamState
from prepcli.sources.averages import AVERAGE_ROOT
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.joined_items import join_items
from prepcli.targets.orbax_item import LeafUse, OrbaxItemLayout, Partitioning, lay_out_uses
from prepcli.targets.trainer_item import TRAINER_ITEMS, trainer_item_uses

COUNTER_DTYPE = "int32"
# `optimizer.max_grad_norm` of Levanter, if the state has no recipe.
LEVANTER_CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True)
class StateTree:
    """Leaves of a training state in the checkpoints of a trainer.

    Attributes:
        adam: Prefix of the state of Adam: its count, and both moments below `mu` and `nu`.
        collection: Prefix of the parameters' paths in the trees of moments.
        averages: Prefix of the averages of the parameters. Empty for a trainer without averages.
        constants: Values of further leaves, by the name of the leaf.
        step: Leaf with the number of steps. Empty for a trainer with this number only in the name of the folder.
        suffix: End of the names of leaves.
        empty_nodes: Paths of nodes without leaves.
        has_lists: Whether numbers in the paths of the optimizer state are indices of lists.
    """

    adam: str
    collection: str = ""
    averages: str = ""
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    step: str = "step"
    suffix: str = ""
    empty_nodes: tuple[tuple[str | int, ...], ...] = ()
    has_lists: bool = False

    @property
    def moments(self) -> tuple[str, str]:
        """Prefixes of the leaves of both moments."""
        return f"{self.adam}mu.{self.collection}", f"{self.adam}nu.{self.collection}"

    def counters(self, state: AdamState) -> dict[str, SourceTensor]:
        """Return the counters of a training state by their leaves."""
        counters = {f"{self.adam}count{self.suffix}": state.counters[NUM_UPDATES]}
        if self.step:
            counters[self.step] = state.counters[STEP]
        return counters


def maxtext_state_tree(state: AdamState) -> StateTree:
    """Return the leaves of a training state of MaxText.

    MaxText 0.2.5 saves one item. `common/train_state_nnx.py` reshapes its state to the layout of a Flax train state:
    `opt_state` is the list of the states in the chain `optax.adamw`: Adam, weight decay (empty) and schedule.
    """
    return StateTree(
        "opt_state.0.",
        collection="params.",
        constants={"opt_state.2.count": _count(state)},
        empty_nodes=(("opt_state", 1),),
        has_lists=True,
    )


def levanter_state_tree(state: AdamState) -> StateTree:
    """Return the leaves of a training state of Levanter.

    marin-levanter 0.2.20 saves the fields of `TrainerState` in trainer_state.py. The optimizer of `AdamConfig` in
    optim/config.py is `optax.inject_hyperparams` around a chain. Clipping by the global norm is the first part of the
    chain, if there is any, and has no leaves.
    """
    num_before_adam = 0
    if levanter_clip_norm(state):
        num_before_adam = 1
    # Levanter computes the learning rate anew in each step.
    learning_rate = 0.0
    if state.settings is not None:
        learning_rate = state.settings.lr
    constants = {
        "opt_state.count": _count(state),
        "opt_state.hyperparams.learning_rate": np.array(learning_rate, np.float32),
        "opt_state.hyperparams_states.learning_rate.count": _count(state),
        # `jax.random.PRNGKey(0)`.
        "training_key": np.zeros(2, np.uint32),
    }
    return StateTree(
        f"opt_state.inner_state.{num_before_adam}.",
        averages=AVERAGE_ROOT,
        constants=constants,
    )


def tunix_state_tree(state: AdamState, settings: AdamSettings) -> StateTree:
    """Return the leaves of a training state of Tunix.

    The optimizer of Tunix 0.1.7 (cli/config.py) is `optax.inject_hyperparams(optax.adamw)` with a schedule. It reads
    the settings from its state. `nnx.Optimizer` counts updates.
    """
    hyperparams = {
        "b1": settings.b1,
        "b2": settings.b2,
        "eps": settings.eps,
        "eps_root": 0.0,
        "learning_rate": settings.lr,
        "weight_decay": settings.weight_decay,
    }
    constants = {"opt_state.count.value": _count(state)}
    for name, value in hyperparams.items():
        constants[f"opt_state.hyperparams.{name}.value"] = np.array(value, np.float32)
    constants["opt_state.hyperparams_states.learning_rate.count.value"] = _count(state)
    constants["step.value"] = np.array(state.num_updates, np.uint32)
    return StateTree("opt_state.inner_state.0.", constants=constants, step="", suffix=".value")


def levanter_clip_norm(state: AdamState) -> float:
    """Return the maximum norm of gradients, or 0 without clipping. It determines the tree of Levanter's optimizer."""
    if state.clip_norm is None:
        return LEVANTER_CLIP_NORM
    return state.clip_norm


def _count(state: AdamState) -> np.ndarray:
    """Return the number of updates as a leaf."""
    return np.array(state.num_updates, COUNTER_DTYPE)


def lay_out_item_state(
    source: Source,
    parameters: Sequence[SourceTensor],
    state: AdamState,
    tree: StateTree,
    *,
    layout: str,
    vocab_size: int,
    storage: ItemStorage,
) -> OrbaxItemLayout:
    """Lay out parameters and training state as the leaves of a trainer's item.

    Args:
        source: The opened source.
        parameters: The parameters to write.
        state: The training state.
        tree: Leaves of the state.
        layout: Name of the layout.
        vocab_size: Vocabulary rows in the output.
        storage: Storage of the chunks.

    Raises:
        PrepError: A parameter has no leaf in the layout, or a leaf has no parameter.
    """
    root = TRAINER_ITEMS[layout].root
    slots = dict(zip(tree.moments, (state.first, state.second), strict=True))
    if state.averages:
        slots[tree.averages] = state.averages
    parameter_uses: list[LeafUse] = []
    state_uses: list[LeafUse] = []
    for use in trainer_item_uses(source, parameters, layout=layout, vocab_size=vocab_size):
        parameter_uses.append(use)
        path = use.name.removeprefix(root)
        for prefix, tensors in slots.items():
            moment_use = replace(use, tensor=tensors[use.tensor.name], name=f"{prefix}{path}")
            state_uses.append(moment_use)
    others = tree.counters(state)
    others |= zip(tree.constants, constant_tensors(source, tree), strict=True)
    for leaf, tensor in others.items():
        state_uses.append(LeafUse(tensor, leaf, identity_axis_map(leaf, tensor.shape)))
    lay_out = partial(
        lay_out_uses,
        source,
        partitioning=Partitioning(mesh=None, rules=DEFAULT_RULES),
        storage=storage,
    )
    place = TRAINER_ITEMS[layout]
    if place.state_item:
        items = {place.item: lay_out(parameter_uses), place.state_item: lay_out(state_uses)}
        return join_items(items)
    item = lay_out((*parameter_uses, *state_uses))
    if not tree.has_lists:
        return item
    leaves = tuple(replace(leaf, path=list_path(leaf.path)) for leaf in item.leaves)
    return replace(item, leaves=leaves)


def constant_tensors(source: Source, tree: StateTree) -> tuple[SourceTensor, ...]:
    """Return the constant leaves of a training state as tensors in `constant_blob`.

    A tensor has one place in an output. The counts of a state are equal, and have a tensor each.
    """
    blob_number = len(source.byte_sources)
    offset = 0
    tensors: list[SourceTensor] = []
    for leaf, value in tree.constants.items():
        placement = Contiguous(blob_number, offset)
        name = qualify("", leaf)
        tensors.append(SourceTensor(name, value.dtype.name, value.shape, (placement,)))
        offset += value.nbytes
    return tuple(tensors)


def constant_blob(tree: StateTree) -> Blob:
    """Return the bytes of the constant leaves. They follow the byte sources of the source."""
    return MemoryBlob("constants", b"".join(value.tobytes() for value in tree.constants.values()))


def list_path(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return a path with the index of a list as a number.

    >>> list_path(("opt_state", "0", "count"))
    ('opt_state', 0, 'count')
    """
    if path[0] != OPT_STATE:
        return path
    return (path[0], int(path[1]), *path[2:])
