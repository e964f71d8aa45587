"""Training state from checkpoints, onto the devices of all processes."""

from __future__ import annotations

from collections.abc import Callable

import jax

from trainer.distributed.sharding import ShardingContext, local_device_sharding
from trainer.models.checkpoint_store import CheckpointReader
from trainer.models.param_tree import Tree, unflatten_tree
from trainer.nn.initialization import init_params
from trainer.nn.model_spec import ModelSpec
from trainer.training.leaf_loading import LeafLoader, exchange_is_faster
from trainer.training.step import StepSetup, TrainState, init_train_state, leaf_name, state_shapes


def restore_state(reader: CheckpointReader, setup: StepSetup) -> TrainState:
    """Restore a training state onto the mesh of `setup`, whatever mesh it was saved on.

    Host memory holds two slabs of a leaf at a time, or two read units if these are larger. CPU devices keep the host
    memory that a leaf is read into.

    Raises:
        PrepError: The checkpoint lacks a leaf, or a leaf has another shape.
    """
    loader = LeafLoader(reader, exchange_is_faster(reader))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: loader.load(leaf_name(path), leaf), _sharded_shapes(setup)
    )


def init_state(reader: CheckpointReader, setup: StepSetup) -> TrainState:
    """Return the state before the first step: parameters from the checkpoint, zero moments and counters.

    Raises:
        PrepError: The checkpoint lacks a parameter, or a parameter has another shape.
    """
    shapes = _sharded_shapes(setup)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    init_rest = jax.jit(
        lambda params: _without_params(init_train_state(params, setup)), out_shardings=_without_params(shardings)
    )
    params = load_float32_params(reader, setup)
    return {"params": params, **init_rest(params)}


def random_state(setup: StepSetup, seed: int) -> TrainState:
    """Return the state before the first step of a model with random parameters, which do not depend on the mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, _sharded_shapes(setup))
    init = jax.jit(lambda: init_train_state(init_params(setup.model, seed), setup), out_shardings=shardings)
    return init()


def _without_params(state: TrainState) -> TrainState:
    return {name: value for name, value in state.items() if name != "params"}


def load_float32_params(reader: CheckpointReader, setup: StepSetup) -> Tree:
    """Load the parameters in float32."""
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
    loader = LeafLoader(reader, exchange_is_faster(reader))
    return load_leaves(loader, model, sharding=sharding, dtype_of=dtype_of)


def load_leaves(
    loader: LeafLoader, model: ModelSpec, *, sharding: ShardingContext, dtype_of: Callable[[str], str]
) -> Tree:
    """Load the parameters of a model with a loader; the other arguments are those of `load_params`."""
    first_device = local_device_sharding()
    params = {}
    for path, leaf in model.leaves.items():
        dtype = jax.numpy.dtype(dtype_of(path))
        target = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding.param_sharding(leaf) or first_device)
        params[path] = loader.load(f"params.{path}", target)
    return unflatten_tree(params)


def _sharded_shapes(setup: StepSetup) -> TrainState:
    """Return the state's shapes with a sharding each; without a mesh, the first device."""
    first_device = local_device_sharding()

    def with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first_device)

    return jax.tree.map(with_sharding, state_shapes(setup))
