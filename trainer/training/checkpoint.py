"""Convert a training state to the leaves of a checkpoint. They are copied to the host one at a time."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import numpy as np

from prepcli.engine.checkpoint_store import HostLeaf, HostShard
from prepcli.models.param_tree import Tree
from trainer.distributed.leaf_slices import index_box
from trainer.training.step import TrainState, leaf_name

OPT_STATE = "opt_state"
PARAMS = "params"


def host_leaves(
    state: TrainState | dict[str, Tree],
    optimizer_state: bool = True,
    *,
    frozen: Collection[str] = (),
    saved_dtype: str | None = None,
) -> dict[str, HostLeaf]:
    """Return the leaves of the state by name, with the shards that this process saves.

    Args:
        state: The training state, or parts of it by name, e.g. `params`.
        optimizer_state: Include the optimizer's moments.
        frozen: Paths of parameters to leave out.
        saved_dtype: Dtype to which the parameters are cast on the host. None means no cast.
    """
    kept: dict[str, object] = dict(state)
    if not optimizer_state:
        del kept[OPT_STATE]
    excluded = {f"{PARAMS}.{path}" for path in frozen}
    host: dict[str, HostLeaf] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(kept)[0]:
        name = leaf_name(path)
        if name in excluded:
            continue
        # The number of a leaf chooses the replica that saves it. All processes count the same
        # leaves in the same order, so they agree without a message.
        host[name] = _host_leaf(leaf, number=len(host))
        if saved_dtype is not None and name.startswith(f"{PARAMS}."):
            host[name] = _cast_leaf(host[name], saved_dtype)
    return host


def _cast_leaf(leaf: HostLeaf, dtype: str) -> HostLeaf:
    """Return a leaf with shards that are cast when they are fetched."""
    to_dtype = jax.numpy.dtype(dtype)
    shards: list[HostShard] = []
    for shard in leaf.shards:
        shards.append(HostShard(shard.box, partial(_fetch_cast, shard, to_dtype)))
    return HostLeaf(leaf.shape, dtype, tuple(shards))


def _fetch_cast(shard: HostShard, dtype: np.dtype[Any]) -> np.ndarray:
    return shard.fetch().astype(dtype)


def _host_leaf(leaf: jax.Array, number: int) -> HostLeaf:
    """Return leaf `number` of a state. Replicas take turns, leaf by leaf, so that all processes save a part."""
    # Number of shards per axis. For shape [8, 6] and shards [2, 6] the counts are 4 and 1. On 8
    # devices that leaves 8 / 4 = 2 replicas of each shard.
    num_shards = 1
    for extent, shard_extent in zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape)):
        num_shards *= math.ceil(extent / max(1, shard_extent))
    num_replicas = len(leaf.sharding.device_set) // max(1, num_shards)
    shards: list[HostShard] = []
    for shard in leaf.addressable_shards:
        if shard.replica_id == number % num_replicas:
            box = index_box(shard.index, leaf.shape)
            shards.append(HostShard(box, partial(_fetch_shard, shard)))
    return HostLeaf(leaf.shape, leaf.dtype.name, tuple(shards))


def _fetch_shard(shard: jax.Shard) -> np.ndarray:
    """Copy a shard to the host.

    A JAX array caches its host copy for as long as it lives: a temporary array frees the copy early. The values of a
    CPU device are not copied. JAX does not donate a buffer that a NumPy array refers to, so that steps leave it alone.
    """
    data = shard.data
    # The shard is on a device of this process, so it has data.
    assert data is not None
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))
