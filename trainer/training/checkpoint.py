"""Training state to checkpoints: leaves are copied to the host one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import numpy as np
from jax.experimental import multihost_utils

from trainer.models.checkpoint_store import HostLeaf
from trainer.training.step import TrainState, leaf_name

OPT_STATE = "opt_state"


def host_leaves(state: TrainState, optimizer_state: bool = True) -> dict[str, HostLeaf]:
    """Return every leaf of the state by name, to be fetched to the host one at a time.

    Args:
        state: The training state.
        optimizer_state: Include the optimizer's moments.
    """
    kept = state if optimizer_state else {name: value for name, value in state.items() if name != OPT_STATE}
    leaves = jax.tree_util.tree_flatten_with_path(kept)[0]
    return {leaf_name(path): _host_leaf(leaf) for path, leaf in leaves}


def gathered_leaves(leaves: Mapping[str, HostLeaf]) -> dict[str, HostLeaf]:
    """Return leaves whose values are in the memory of this host; all processes call it together."""
    values = {name: leaf.fetch() for name, leaf in leaves.items()}
    return {name: HostLeaf(leaf.shape, leaf.dtype, partial(values.get, name)) for name, leaf in leaves.items()}


def _host_leaf(leaf: jax.Array) -> HostLeaf:
    return HostLeaf(leaf.shape, leaf.dtype.name, lambda: _fetch(leaf))


def _fetch(leaf: jax.Array) -> np.ndarray:
    """Copy a leaf to the host.

    A JAX array caches its host copy for as long as it lives. Fetching each shard through a temporary array frees the
    copy early.
    """
    if not leaf.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    host = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.global_shards:
        if shard.replica_id == 0:
            data = shard.data
            host[shard.index] = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return host
