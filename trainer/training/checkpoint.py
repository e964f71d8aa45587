"""Training state to and from checkpoints: each device reads only its own shard of each leaf."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from trainer.distributed.sharding import ShardingContext
from trainer.models.checkpoint_store import CheckpointReader, HostLeaf, HostShard, LeafSpec
from trainer.models.errors import PrepError
from trainer.models.param_tree import Tree, unflatten_tree
from trainer.models.partition import Box
from trainer.nn.model_spec import ModelSpec
from trainer.training.step import StepSetup, TrainState, init_train_state, leaf_name, state_shapes

# Alignment of host buffers: direct I/O reads into them, and a CPU device takes them over without a copy.
ALIGNMENT_NBYTES = 4096
OPT_STATE = "opt_state"


def restore_state(reader: CheckpointReader, setup: StepSetup) -> TrainState:
    """Restore a training state onto the mesh of `setup`, whatever mesh it was saved on.

    Host memory holds one leaf's shards for the devices of this host at a time.

    Raises:
        PrepError: The checkpoint lacks a leaf, or a leaf has another shape.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _load_leaf(reader, leaf_name(path), leaf), _sharded_shapes(setup)
    )


def init_state(reader: CheckpointReader, setup: StepSetup) -> TrainState:
    """Return the state before the first step: parameters from the checkpoint, zero moments and counters.

    Raises:
        PrepError: The checkpoint lacks a parameter, or a parameter has another shape.
    """
    shapes = _sharded_shapes(setup)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    init_rest = jax.jit(
        lambda: _without_params(init_train_state(_zeros(shapes["params"]), setup)),
        out_shardings=_without_params(shardings),
    )
    return {"params": load_float32_params(reader, setup), **init_rest()}


def _without_params(state: TrainState) -> TrainState:
    return {name: value for name, value in state.items() if name != "params"}


def load_float32_params(reader: CheckpointReader, setup: StepSetup) -> Tree:
    """Load the parameters in float32; each shard is read once for all devices that hold it."""
    return load_params(reader, setup.model, sharding=setup.sharding, dtype_of=lambda path: "float32")


def load_params(
    reader: CheckpointReader, model: ModelSpec, *, sharding: ShardingContext, dtype_of: Callable[[str], str]
) -> Tree:
    """Load the parameters of a model.

    Args:
        reader: An open checkpoint.
        model: The model whose parameters are read.
        sharding: Mesh and partition rules; without a mesh, parameters go to the first device.
        dtype_of: Returns the dtype for a parameter's path.

    Raises:
        PrepError: The checkpoint lacks a parameter, or a parameter has another shape.
    """
    first_device = SingleDeviceSharding(jax.devices()[0])
    params = {}
    for path, leaf in model.leaves.items():
        dtype = jax.numpy.dtype(dtype_of(path))
        target = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding.param_sharding(leaf) or first_device)
        params[path] = _load_leaf(reader, f"params.{path}", target)
    return unflatten_tree(params)


def host_leaves(state: TrainState, optimizer_state: bool = True) -> dict[str, HostLeaf]:
    """Return every leaf of the state by name, with the shards that this process saves.

    Args:
        state: The training state.
        optimizer_state: Include the optimizer's moments.
    """
    kept = state if optimizer_state else {name: value for name, value in state.items() if name != OPT_STATE}
    leaves = jax.tree_util.tree_flatten_with_path(kept)[0]
    return {leaf_name(path): _host_leaf(leaf, number) for number, (path, leaf) in enumerate(leaves)}


def _host_leaf(leaf: jax.Array, number: int) -> HostLeaf:
    """Return leaf `number` of a state. Replicas take turns, leaf by leaf, so that all processes save a part."""
    shard_counts = (-(-n // max(1, m)) for n, m in zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape)))
    num_replicas = len(leaf.sharding.device_set) // max(1, math.prod(shard_counts))
    shards = tuple(
        HostShard(_box(shard.index, leaf.shape), partial(_fetch_shard, shard))
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


def _sharded_shapes(setup: StepSetup) -> TrainState:
    """Return the state's shapes with a sharding each; without a mesh, the first device."""
    first_device = SingleDeviceSharding(jax.devices()[0])

    def with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first_device)

    return jax.tree.map(with_sharding, state_shapes(setup))


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), shapes)


def _load_leaf(reader: CheckpointReader, name: str, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Load one leaf with the shape, dtype and sharding of `target`; replicas share one read."""
    _check_leaf(name, reader.leaves.get(name), target.shape)
    sharding = target.sharding
    assert isinstance(sharding, Sharding)
    indices = sharding.addressable_devices_indices_map(target.shape)
    boxes = {device: _box(index or (), target.shape) for device, index in indices.items()}
    buffers = {
        box: _empty_aligned([high - low for low, high in box], target.dtype) for box in dict.fromkeys(boxes.values())
    }
    reader.read(name, buffers)
    shards = [jax.device_put(buffers[box], device) for device, box in boxes.items()]
    return jax.make_array_from_single_device_arrays(target.shape, sharding, shards)


def _check_leaf(name: str, spec: LeafSpec | None, shape: tuple[int, ...]) -> None:
    if spec is None:
        raise PrepError(f"the checkpoint has no {name}", "the model or the optimizer needs it")
    if spec.shape != shape:
        why = f"its shape is {list(spec.shape)}, the model has {list(shape)}"
        raise PrepError(f"the checkpoint's {name} has another shape", why)


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(axis_slice.indices(extent)[:2] for axis_slice, extent in zip(index, shape, strict=True))


def _empty_aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocate an uninitialised array that begins at a multiple of ALIGNMENT_NBYTES."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT_NBYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_NBYTES
    return raw[start : start + nbytes].view(dtype).reshape(shape)
