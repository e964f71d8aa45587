"""Training state to checkpoints: leaves are copied to the host one at a time."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import numpy as np

from trainer.distributed.process_shards import index_box
from trainer.models.checkpoint_store import HostLeaf, HostShard
from trainer.training.step import TrainState, leaf_name

OPT_STATE = "opt_state"
PARAMS = "params"


def host_leaves(
    state: TrainState,
    optimizer_state: bool = True,
    *,
    frozen: Collection[str] = (),
    saved_dtype: str | None = None,
) -> dict[str, HostLeaf]:
    """Return the leaves of the state by name, with the shards that this process saves.

    Args:
        state: The training state.
        optimizer_state: Include the optimizer's moments.
        frozen: Paths of parameters to leave out.
        saved_dtype: Dtype to which the parameters are cast on the host. None means no cast.
    """
    kept = (
        state
        if optimizer_state
        else {name: value for name, value in state.items() if name != OPT_STATE}
    )
    excluded = {f"{PARAMS}.{path}" for path in frozen}
    named = [
        (leaf_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(kept)[0]
    ]
    leaves = [(name, leaf) for name, leaf in named if name not in excluded]
    host = {name: _host_leaf(leaf, number) for number, (name, leaf) in enumerate(leaves)}
    if saved_dtype is None:
        return host
    return {
        name: _cast(leaf, saved_dtype) if name.startswith(f"{PARAMS}.") else leaf
        for name, leaf in host.items()
    }


def _cast(leaf: HostLeaf, dtype: str) -> HostLeaf:
    """Return a leaf with shards that are cast when they are fetched."""
    to_dtype = jax.numpy.dtype(dtype)
    shards = tuple(
        HostShard(shard.box, partial(_fetch_cast, shard, to_dtype)) for shard in leaf.shards
    )
    return HostLeaf(leaf.shape, dtype, shards)


def _fetch_cast(shard: HostShard, dtype: np.dtype[Any]) -> np.ndarray:
    return shard.fetch().astype(dtype)


def _host_leaf(leaf: jax.Array, number: int) -> HostLeaf:
    """Return leaf `number` of a state. Replicas take turns, leaf by leaf, so that all processes save a part."""
    # Number of shards per axis. For shape [8, 6] and shards [2, 6] the counts are 4 and 1. On 8
    # devices that leaves 8 / 4 = 2 replicas of each shard.
    shard_counts = (
        -(-n // max(1, m)) for n, m in zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape))
    )
    num_replicas = len(leaf.sharding.device_set) // max(1, math.prod(shard_counts))
    shards = tuple(
        HostShard(index_box(shard.index, leaf.shape), partial(_fetch_shard, shard))
        for shard in leaf.addressable_shards
        if shard.replica_id == number % num_replicas
    )
    return HostLeaf(leaf.shape, leaf.dtype.name, shards)


def _fetch_shard(shard: jax.Shard) -> np.ndarray:
    """Copy a shard to the host.

    A JAX array caches its host copy for as long as it lives: a temporary array frees the copy early. The values of a
    CPU device are not copied. JAX does not donate a buffer that a NumPy array refers to, so that steps leave it alone.
    """
    data = shard.data
    assert data is not None  # it is addressable
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))
