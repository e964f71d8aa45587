"""Random numbers as a function of integers: the same on every device, in every order and for every shape of a call.

Keys come from Threefry-2x32 with 20 rounds, a counter-based generator (Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405): about 110 operations per key. A key selects a stream with one uint32 per
index: about 10 operations each, two rounds of a multiplicative hash with the constants `21f0aaad` and `d35a2d97` of
https://github.com/skeeto/hash-prospector, with one word of the key before each round.

All functions broadcast their arguments. Their arithmetic is modulo 2^32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# Threefry-2x32-20: rotations of the even and odd groups of 4 rounds, the number of groups, and the
# parity constant of the key schedule (Salmon et al. 2011, section 3.3).
ROTATIONS = np.array([[13, 15, 26, 6], [17, 29, 16, 24]], np.uint32)
NUM_GROUPS = 5
KEY_PARITY = np.uint32(0x1BD11BDA)
# Multipliers of the hash [16 21f0aaad 15 d35a2d97 15] of hash-prospector, found by search.
MULTIPLIERS = (np.uint32(0x21F0AAAD), np.uint32(0xD35A2D97))


class RandomKey(NamedTuple):
    """The keys of random streams: two uint32 arrays of the same shape, or of shapes that broadcast."""

    first: Array
    second: Array

    def reshape(self, *shape: int) -> RandomKey:
        """Return the keys in another shape."""
        return RandomKey(self.first.reshape(shape), self.second.reshape(shape))


def uint32(value: Array | int) -> Array:
    """Return an integer modulo 2^32."""
    if isinstance(value, Array):
        return value.astype(jnp.uint32)
    return jnp.uint32(value)


def derive_key(key: RandomKey, first: Array | int, second: Array | int = 0) -> RandomKey:
    """Derive a key from a key and two integers, by Threefry-2x32 of the integers.

    Distinct pairs of integers have distinct keys. The rounds are a loop: they compile fast, and the compiler does not
    fuse them with the use of the key, where it would compute them for each element.
    """
    # The key schedule has three words k0, k1 and k2 = k0 ^ k1 ^ parity. They enter in turn: group g adds
    # the next two, and g + 1. Groups then differ even if all words are equal.
    parity = key.first ^ key.second ^ KEY_PARITY
    x = uint32(first) + key.first
    y = uint32(second) + key.second
    shape = jnp.broadcast_shapes(x.shape, y.shape)

    def run_group(group: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x, y, last, next_x, next_y = carry
        for rotation in jnp.asarray(ROTATIONS)[group % 2]:
            # One round: add, rotate y to the left, exclusive or.
            x = x + y
            y = (y << rotation | y >> (32 - rotation)) ^ x
        return x + next_x, y + next_y + uint32(group + 1), next_x, next_y, last

    initial = (
        jnp.broadcast_to(x, shape),
        jnp.broadcast_to(y, shape),
        key.first,
        key.second,
        parity,
    )
    x, y, *_ = lax.fori_loop(0, NUM_GROUPS, run_group, initial)
    return RandomKey(x, y)


def random_bits(key: RandomKey, index: Array) -> Array:
    """Return the uint32 at an index of each stream."""
    x = uint32(index) ^ key.first
    x = (x ^ x >> 16) * MULTIPLIERS[0] + key.second
    x = (x ^ x >> 15) * MULTIPLIERS[1]
    return x ^ x >> 15
