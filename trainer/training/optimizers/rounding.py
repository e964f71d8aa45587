"""Moments and parameters in bfloat16 between steps, rounded stochastically.

A random number of 16 bits is added to the 16 low bits that bfloat16 cuts off, so that the expected
value of a rounded number is the number. The random number depends on the seed, the step, the name
of the leaf, the layer and the coordinates of the element. It does not depend on devices or on the
stacking of layers, and a resumed run draws the same numbers as the uninterrupted one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from prepcli.models.param_tree import ParamLeaf, Tree, find_param_path, flatten_tree, unflatten_tree
from prepcli.models.rules import path_without_layers
from trainer.nn.dropout import RandomKey, derive_key, random_bits, uint32

# Second word of the seed's key. Dropout has 0, so the two random streams differ.
ROUNDING_STREAM = 1
# Bits of float32 that bfloat16 does not have.
LOW_BITS = 16


class RoundingKey(NamedTuple):
    """The seed of a run and the number of a step, int32 []."""

    seed: int
    step: Array


def bfloat16_to_float32(tree: Any) -> Any:
    """Return a tree of arrays, such as an optimizer state, with float32 in place of bfloat16."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree
    )


def narrow_moments(
    state: Any, leaves: Mapping[str, ParamLeaf], dtype: str, key: RoundingKey | None
) -> Any:
    """Return an optimizer state with moments in a dtype.

    State that belongs to no parameter keeps its dtype.

    Args:
        state: The state with float32 moments.
        leaves: Parameters by path.
        dtype: Dtype of the moments.
        key: Seed and step of stochastic rounding. None for values that are exact in the dtype.
    """
    if dtype == "float32":
        return state

    def narrow(path: tuple[Any, ...], moment: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        param_path = find_param_path(name, leaves)
        if param_path is None or moment.dtype != jnp.float32:
            return moment
        if key is None:
            return moment.astype(dtype)
        bits = _rounding_bits(key, name, leaves[param_path], moment.shape)
        return round_stochastically(moment, bits)

    return jax.tree_util.tree_map_with_path(narrow, state)


def narrow_params(
    updated: Tree, before: Tree, *, leaves: Mapping[str, ParamLeaf], key: RoundingKey
) -> Tree:
    """Return updated parameters in the dtypes that they had before the step.

    Args:
        updated: The updated parameters in float32.
        before: The parameters before the step.
        leaves: Parameters by path.
        key: Seed and step of stochastic rounding.
    """
    dtypes = {path: leaf.dtype for path, leaf in flatten_tree(before).items()}

    def narrow(path: str, param: Array) -> Array:
        if param.dtype == dtypes[path]:
            return param
        return round_stochastically(
            param, _rounding_bits(key, f"params.{path}", leaves[path], param.shape)
        )

    return unflatten_tree(
        {path: narrow(path, param) for path, param in flatten_tree(updated).items()}
    )


def round_stochastically(x: Array, bits: Array) -> Array:
    """Round float32 to bfloat16, up with the probability of the fraction that is cut off.

    Args:
        x: Float32 values. Infinities and NaN stay.
        bits: Random uint32 of the same shape. The upper half is used.
    """
    # With low bits f, 2^16 random values are added and f of them carry into the kept part: it is
    # rounded up with probability f / 2^16.
    return _cut_low_bits(x, lax.bitcast_convert_type(x, jnp.uint32) + (bits >> LOW_BITS))


def round_to_nearest(x: Array) -> Array:
    """Round float32 to bfloat16, ties to even.

    The bits are rounded as integers: devices may flush subnormal values, and XLA may leave out a
    cast to bfloat16 and back.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    is_odd = (bits >> LOW_BITS) & 1
    # Adds 0x7FFF, or 0x8000 if the kept part is odd: low bits above 0x8000 carry into the kept
    # part, and exactly 0x8000 carries only into an odd one (ties to even).
    return _cut_low_bits(x, bits + uint32(2 ** (LOW_BITS - 1) - 1) + is_odd)


def _cut_low_bits(x: Array, wide: Array) -> Array:
    """Return the upper halves of uint32 bits as bfloat16, and the values of `x` that are not finite."""
    rounded = lax.bitcast_convert_type((wide >> LOW_BITS).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _rounding_bits(key: RoundingKey, name: str, leaf: ParamLeaf, shape: tuple[int, ...]) -> Array:
    """Return a random uint32 per element of a moment, or per element of the parameter."""
    step_key = derive_key(RandomKey(uint32(key.seed), uint32(ROUNDING_STREAM)), key.step)
    # The key depends on name and layer, not on the stacking: layer 3 of a stacked leaf draws the
    # same bits as the unstacked leaf of layer 3.
    leaf_key = derive_key(step_key, zlib.crc32(path_without_layers(name).encode()))
    axes = [axis for axis in range(len(shape)) if axis != leaf.stack_axis]
    layers = uint32(leaf.layer_index or 0)
    if leaf.stack_axis is not None:
        layers = _coordinates(shape, leaf.stack_axis)
    rows = uint32(0)
    if axes:
        rows = _coordinates(shape, axes[0])
    # Layer and row are in the key, the other coordinates in a 32-bit counter: a row would need
    # more than 2^32 elements to repeat a number.
    index = jnp.zeros((1,) * len(shape), jnp.uint32)
    for axis in axes[1:]:
        index = index * uint32(shape[axis]) + _coordinates(shape, axis)
    return jnp.broadcast_to(random_bits(derive_key(leaf_key, layers, rows), index), shape)


def _coordinates(shape: tuple[int, ...], axis: int) -> Array:
    """Return the coordinates along an axis, uint32, with extent 1 in all other axes."""
    extents = [1] * len(shape)
    extents[axis] = shape[axis]
    return lax.broadcasted_iota(jnp.uint32, extents, axis)
