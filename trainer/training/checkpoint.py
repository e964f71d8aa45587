"""The state of a run from and to checkpoints: each leaf's parts straight onto the devices that hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from trainer.distributed.sharding import ShardingContext
from trainer.models.checkpoint_store import CheckpointReader, HostLeaf, LeafSpec
from trainer.models.errors import PrepError
from trainer.models.mesh import Box
from trainer.models.param_tree import Tree, unflatten_tree
from trainer.nn.transformer import ModelSpec
from trainer.training.step import StepSetup, TrainState, init_train_state, leaf_name, state_shapes

ALIGNMENT_NBYTES = (
    4096  # of host memory: a CPU device then takes it over without a copy, and files are read into it directly
)
OPT_STATE = "opt_state"


def restore_state(reader: CheckpointReader, setup: StepSetup) -> TrainState:
    """The state that a training checkpoint holds, on the mesh of `setup`, whatever mesh it was saved on.

    PrepError where it lacks a leaf or has one of another shape. Host memory: one leaf's parts for this host's devices.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _load_leaf(reader, leaf_name(path), leaf), _sharded_shapes(setup)
    )


def init_state(reader: CheckpointReader, setup: StepSetup) -> TrainState:
    """The state before the first step, with the parameters of any checkpoint."""
    shapes = _sharded_shapes(setup)
    where = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    rest = jax.jit(
        lambda: {
            name: part for name, part in init_train_state(_zeros(shapes["params"]), setup).items() if name != "params"
        },
        out_shardings={name: part for name, part in where.items() if name != "params"},
    )
    return {"params": load_float32_params(reader, setup), **rest()}


def load_float32_params(reader: CheckpointReader, setup: StepSetup) -> Tree:
    """The parameters alone, in float32, each part read once for the devices that hold it."""
    return load_params(reader, setup.model, setup.forward_config.sharding, lambda path: "float32")


def load_params(
    reader: CheckpointReader, model: ModelSpec, sharding: ShardingContext, dtype_of: Callable[[str], str]
) -> Tree:
    """The parameters of a model, each in the dtype that its path is to have, on a mesh or on the first device."""
    alone = SingleDeviceSharding(jax.devices()[0])
    found = {}
    for path, leaf in model.leaves.items():
        dtype = jax.numpy.dtype(dtype_of(path))
        wanted = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding.param_sharding(leaf) or alone)
        found[path] = _load_leaf(reader, f"params.{path}", wanted)
    return unflatten_tree(found)


def host_leaves(state: TrainState, optimizer_state: bool = True) -> dict[str, HostLeaf]:
    """Every leaf of the state by name, to be fetched one by one; without moments if they are not wanted."""
    kept = state if optimizer_state else {name: part for name, part in state.items() if name != OPT_STATE}
    found = jax.tree_util.tree_flatten_with_path(kept)[0]
    return {leaf_name(path): _host_leaf(leaf) for path, leaf in found}


def _host_leaf(leaf: jax.Array) -> HostLeaf:
    return HostLeaf(leaf.shape, leaf.dtype.name, lambda: _fetch(leaf))


def _fetch(leaf: jax.Array) -> np.ndarray:
    """All of a leaf, by way of an array that is thrown away: an array keeps what it was once fetched as, and the state
    lives on after it is saved."""
    parts = [shard.data for shard in leaf.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts))


def _sharded_shapes(setup: StepSetup) -> TrainState:
    """The state's shapes, each with a place: without a mesh, the first device."""
    alone = SingleDeviceSharding(jax.devices()[0])

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or alone)

    return jax.tree.map(placed, state_shapes(setup))


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), shapes)


def _load_leaf(reader: CheckpointReader, name: str, target: jax.ShapeDtypeStruct) -> jax.Array:
    _check_leaf(name, reader.leaves.get(name), target.shape)
    sharding = target.sharding
    assert isinstance(sharding, Sharding)
    indices = sharding.addressable_devices_indices_map(target.shape)
    boxes = {device: _box(at or (), target.shape) for device, at in indices.items()}
    parts = {
        box: _empty_aligned([high - low for low, high in box], target.dtype) for box in dict.fromkeys(boxes.values())
    }
    reader.read(name, parts)
    held = [jax.device_put(parts[box], device) for device, box in boxes.items()]
    return jax.make_array_from_single_device_arrays(target.shape, sharding, held)


def _check_leaf(name: str, spec: LeafSpec | None, shape: tuple[int, ...]) -> None:
    if spec is None:
        raise PrepError(f"the checkpoint has no {name}", "the model, or the optimizer, needs it")
    if spec.shape != shape:
        why = f"shape {list(spec.shape)}, the model has {list(shape)}"
        raise PrepError(f"the checkpoint's {name} is of another model", why)


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(each.indices(extent)[:2] for each, extent in zip(index, shape, strict=True))


def _empty_aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Memory that begins at a page."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT_NBYTES, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT_NBYTES
    return raw[first : first + nbytes].view(dtype).reshape(shape)
