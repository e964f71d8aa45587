"""Random initialization of parameters."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from trainer.models.architecture import ArchConfig
from trainer.models.lora import LORA_B
from trainer.models.param_tree import ParamLeaf, Tree, unflatten_tree
from trainer.nn.model_spec import ModelSpec


def init_params(model: ModelSpec, seed: int) -> Tree:
    """Initialize all parameters in float32: matrices and embeddings normal, biases zero, norm scales the identity.

    The values of a layer depend neither on how layers are stored nor on which other parameters the model has.

    Args:
        model: The model to initialize.
        seed: Seed of the random key.

    Returns:
        Nested dict of float32 arrays.
    """
    key = jax.random.key(seed)
    return unflatten_tree({path: _init_leaf(leaf, key, model.arch_config) for path, leaf in model.leaves.items()})


def _init_leaf(leaf: ParamLeaf, key: Array, arch_config: ArchConfig) -> Array:
    """Initialize one leaf with a key derived from its path without layer numbers."""
    std = arch_config.init_std
    if leaf.role in ("scale", "bias"):
        return jnp.full(leaf.shape, float(leaf.role == "scale" and arch_config.norm != "rms_offset"), jnp.float32)
    return _random_leaf(leaf, key, lambda layer_key, shape: jax.random.normal(layer_key, shape) * std)


def init_adapters(model: ModelSpec, seed: int) -> Tree:
    """Initialize the adapters of a model in float32: A uniform with the bound of PEFT, 1 / sqrt(inputs), and B zero.

    Args:
        model: A model with adapters.
        seed: Seed of the random key.

    Returns:
        Nested dict of float32 arrays.
    """
    assert model.adapters is not None
    key = jax.random.key(seed)
    return unflatten_tree({path: _init_adapter(leaf, key) for path, leaf in model.adapters.leaves.items()})


def _init_adapter(leaf: ParamLeaf, key: Array) -> Array:
    if leaf.path.endswith(LORA_B):
        return jnp.zeros(leaf.shape, jnp.float32)

    def sample(layer_key: Array, shape: tuple[int, ...]) -> Array:
        bound = math.prod(shape[1:]) ** -0.5
        return jax.random.uniform(layer_key, shape, minval=-bound, maxval=bound)

    return _random_leaf(leaf, key, sample)


def _random_leaf(leaf: ParamLeaf, key: Array, sample: Callable[[Array, tuple[int, ...]], Array]) -> Array:
    """Sample the values of each layer with a key derived from the leaf's path and the number of the layer."""
    leaf_key = jax.random.fold_in(key, zlib.crc32(re.sub(r"\{\w+\}\.", "", leaf.path_pattern).encode()))
    axis = leaf.stack_axis
    if axis is not None:
        layer_shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
        layer_keys = jax.vmap(partial(jax.random.fold_in, leaf_key))(jnp.arange(leaf.shape[axis]))
        layers = jax.vmap(lambda layer_key: sample(layer_key, layer_shape))(layer_keys)
        return jnp.moveaxis(layers, 0, axis)
    if leaf.layer_index is not None:
        leaf_key = jax.random.fold_in(leaf_key, leaf.layer_index)
    return sample(leaf_key, leaf.shape)
