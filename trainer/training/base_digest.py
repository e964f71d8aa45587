"""The digest of frozen parameters, computed on the devices that hold them.

It is a sum over the elements of a leaf in integers modulo 2^32, so that it depends neither on the mesh nor on the order
of summation. A zero adds 0 to the sum, so the padding of the vocabulary does not change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

UINT_BY_ITEMSIZE = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# One seed for each half of a digest.
SEEDS = (0x9E3779B9, 0x85EBCA6B)


def digest_base_params(leaves: Mapping[str, Array]) -> str:
    """Return the digest of parameters by path, as 16 hexadecimal digits.

    All processes of a job call it together.

    Args:
        leaves: Arrays of elements of at most 4 bytes.
    """
    halves = np.asarray(_sum_leaves(dict(sorted(leaves.items()))))
    return "".join(f"{int(half):08x}" for half in halves)


@jax.jit
def _sum_leaves(leaves: dict[str, Array]) -> Array:
    """Return both halves of the digest, uint32 [2]."""
    total = jnp.zeros(len(SEEDS), jnp.uint32)
    for number, leaf in enumerate(leaves.values()):
        sums = [_weighted_sum(leaf, seed) for seed in SEEDS]
        # `number + 1` ties each sum to the position of its leaf, so two leaves with exchanged
        # values change the digest.
        total = total + _mix_bits(jnp.stack(sums) + jnp.uint32(number + 1))
    return total


def _weighted_sum(leaf: Array, seed: int) -> Array:
    """Sum the bits of all elements, each times an odd number that depends on its position."""
    bits = lax.bitcast_convert_type(leaf, UINT_BY_ITEMSIZE[leaf.dtype.itemsize]).astype(jnp.uint32)
    # The position is the row-major index plus the seed. For shape [2, 3] the strides are 3 and 1,
    # and element [1, 2] has index 1 * 3 + 2 * 1 = 5. A global index does not depend on the
    # sharding.
    position = jnp.full(leaf.shape, seed, jnp.uint32)
    for axis in range(leaf.ndim):
        stride = math.prod(leaf.shape[axis + 1 :]) % 2**32
        position = position + lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(
            stride
        )
    # An odd factor is invertible modulo 2^32: a change of one element always changes the sum.
    return jnp.sum(bits * (2 * _mix_bits(position) + 1), dtype=jnp.uint32)


def _mix_bits(x: Array) -> Array:
    """Mix the bits of uint32 numbers (the finalizer of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
