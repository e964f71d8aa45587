"""Dropout and forgetful causal masking as functions of the seed, the step and the coordinates of an element.

The mask of an element depends on the seed, the step, the stack (encoder or decoder), the layer, the site, the row of
the step's batch, and the element's own coordinates: head, query position and key position of a probability, position
and feature of a hidden state, position of a key. It does not depend on tiles, chunks, devices, micro-batches or
layouts, and a resumed run draws the masks of the uninterrupted one.

Axes: B rows of the batch, T queries or tokens, S keys, H query heads, K key and value heads, G = H / K query heads of
a group, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from prepcli.models.layer_config import DropoutConfig

# Random numbers as a function of integers: the same on every device, in every order and for every shape of a call.
#
# Keys come from Threefry-2x32 with 20 rounds, a counter-based generator (Salmon et al. 2011,
# https://doi.org/10.1145/2063384.2063405): about 110 operations per key. A key selects a stream with one uint32 per
# index: about 10 operations each, two rounds of a multiplicative hash with the constants `21f0aaad` and `d35a2d97` of
# https://github.com/skeeto/hash-prospector, with one word of the key before each round.
#
# All functions broadcast their arguments. Their arithmetic is modulo 2^32.

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


class RandomStream(IntEnum):
    """The uses of random numbers in a training step, by number. The numbers enter the keys."""

    DROPOUT = 0
    ROUNDING = 1


def step_key(stream: RandomStream, *, seed: int, step: Array) -> RandomKey:
    """Return the key of the random numbers of a step.

    Args:
        stream: Their use. No two uses have equal numbers.
        seed: The seed of the run, from 0 to 2^32 - 1.
        step: Number of the step, int32 [].
    """
    return derive_key(RandomKey(uint32(seed), uint32(stream)), step)


def random_bits(key: RandomKey, index: Array) -> Array:
    """Return the uint32 at an index of each stream."""
    x = uint32(index) ^ key.first
    x = (x ^ x >> 16) * MULTIPLIERS[0] + key.second
    x = (x ^ x >> 15) * MULTIPLIERS[1]
    return x ^ x >> 15


# At least the number of sites. It enters the keys, so another number would change all masks.
SITES_PER_LAYER = 16
# The ratios of forgetful causal masking are multiples of 1 / UNIT_RATIO.
UNIT_RATIO = 1 << 16


class Stack(IntEnum):
    """The stacks of layers, by number. The numbers enter the keys."""

    DECODER = 0
    ENCODER = 1


class DropoutSite(IntEnum):
    """The places of random masks in a stack, by number. The numbers enter the keys."""

    ATTENTION = 0
    CROSS_ATTENTION = 1
    ATTENTION_RESIDUAL = 2
    CROSS_RESIDUAL = 3
    MLP_RESIDUAL = 4
    EMBEDDING = 5
    FORGOTTEN_KEYS = 6
    FORGOTTEN_RATIO = 7
    ADAPTERS = 8


@partial(
    jax.tree_util.register_dataclass, data_fields=["row_keys", "head_ids"], meta_fields=["rate"]
)
@dataclass(frozen=True, slots=True)
class AttentionDropout:
    """Dropout of the attention probabilities of one layer."""

    row_keys: RandomKey  # Key of each row [B]
    head_ids: Array  # Index of each query head in the model, uint32 [H]
    rate: float  # Fraction of the probabilities to drop

    def for_queries(self, q_positions: Array) -> QueryDropout:
        """Return the dropout of the probabilities of queries at int32 [T], or [B or 1, T] if rows differ."""
        keys = derive_key(self.row_keys.reshape(-1, 1, 1), self.head_ids, q_positions[..., None])
        return QueryDropout(keys, self.rate)


@partial(jax.tree_util.register_dataclass, data_fields=["keys"], meta_fields=["rate"])
@dataclass(frozen=True, slots=True)
class QueryDropout:
    """Dropout of the attention probabilities of all queries, or of a tile of queries."""

    keys: RandomKey  # Key of each query and head [B, T, H]
    rate: float  # Fraction of the probabilities to drop

    def apply(self, x: Array, kv_positions: Array) -> Array:
        """Drop elements of the probabilities, and scale the rest by 1 / (1 - rate).

        Args:
            x: Probabilities or their gradient [B, K, G, T, S].
            kv_positions: int32 [S], or [B or 1, S].
        """
        # Keys [B, T, H] -> [B, H, T] -> [B, K, G, T, 1], one stream per query and head.
        keys = RandomKey(*(words.swapaxes(1, 2).reshape(*x.shape[:-1], 1) for words in self.keys))
        return drop(x, keys, kv_positions[..., None, None, None, :], self.rate)


@dataclass(frozen=True, slots=True)
class LayerDropout:
    """The random masks of one layer in one step."""

    config: DropoutConfig  # The rates
    row_keys: RandomKey  # Key of each site and row [SITES_PER_LAYER, B]
    positions: Array  # Position of each token, int32 [T], or [B, T] if rows differ

    def attention(self, site: DropoutSite, num_heads: int) -> AttentionDropout | None:
        """Return the dropout of attention probabilities. None if the rate is 0."""
        if not self.config.attention:
            return None
        head_ids = jnp.arange(num_heads, dtype=jnp.uint32)
        return AttentionDropout(self._site_keys(site), head_ids, self.config.attention)

    def drop_residual(self, x: Array, site: DropoutSite) -> Array:
        """Drop elements of the output [B, T, D] of attention or MLP."""
        return _drop_features(x, self._site_keys(site), self.positions, self.config.residual)

    def adapter_keys(self, number: int, positions: Array) -> RandomKey:
        """Return the key of each token [B, T] of the input of an adapter.

        Args:
            number: Number of the adapted module in a layer.
            positions: Position of each token, int32 [T], or [B, T] if rows differ.
        """
        module_keys = derive_key(self._site_keys(DropoutSite.ADAPTERS), number)
        return derive_key(module_keys.reshape(-1, 1), positions)

    def _site_keys(self, site: DropoutSite) -> RandomKey:
        return RandomKey(*(words[site] for words in self.row_keys))


@dataclass(frozen=True, slots=True)
class Dropout:
    """The random masks of a stack of layers in one step."""

    config: DropoutConfig  # The rates
    key: RandomKey  # Key of the seed, the step and the stack, []
    row_ids: Array  # Index of each row in the batch of the step, uint32 [B]

    def for_stack(self, stack: Stack) -> Dropout:
        """Derive the random masks of a stack from the masks of the step."""
        return Dropout(self.config, derive_key(self.key, stack), self.row_ids)

    def layer_keys(self, num_layers: int) -> RandomKey | None:
        """Return the key of each layer, site and row [num_layers, SITES_PER_LAYER, B]. None if layers need none."""
        if not (self.config.attention or self.config.residual or self.config.adapters):
            return None
        # Site s of layer l has the number 16 l + s, e.g. the MLP residual (4) of layer 2 has
        # 2 * 16 + 4 = 36.
        numbers = jnp.arange(num_layers * SITES_PER_LAYER).reshape(num_layers, SITES_PER_LAYER, 1)
        return derive_key(self.key, numbers, self.row_ids)

    def for_layer(self, row_keys: RandomKey | None, positions: Array | None) -> LayerDropout | None:
        """Return the random masks of a layer, given its part of `layer_keys`. None if it needs none."""
        if row_keys is None:
            return None
        assert positions is not None
        return LayerDropout(self.config, row_keys, positions)

    def drop_embedding(self, x: Array, positions: Array) -> Array:
        """Drop elements of the input [B, T, D] of the first layer. Positions are [T] or [B, T]."""
        return _drop_features(
            x,
            derive_key(self.key, DropoutSite.EMBEDDING, self.row_ids),
            positions,
            self.config.embedding,
        )

    def remembered_keys(
        self, positions: Array, segment_positions: Array | None = None
    ) -> Array | None:
        """Draw the keys that forgetful causal masking (arXiv:2210.13432) leaves visible.

        Each row has a ratio of hidden keys, drawn uniformly from `fcm_ratio`. All layers hide the same keys.
        The first key of a sequence is always visible. Integers are compared, so that all devices have the same mask.

        Args:
            positions: Position of each key in its row, int32 [S] or [B, S].
            segment_positions: Position of each key in its document, int32 [B, S]. None if a row is one document.

        Returns:
            bool [B, S]. None if no key is hidden.
        """
        if not any(self.config.fcm_ratio):
            return None
        # 1 itself is clipped, so that `low * UNIT_RATIO` below stays under 2^32.
        low, high = (
            min(round(ratio * UNIT_RATIO), UNIT_RATIO - 1) for ratio in self.config.fcm_ratio
        )
        ratio_bits = random_bits(
            derive_key(self.key, DropoutSite.FORGOTTEN_RATIO, self.row_ids), uint32(0)
        )
        # ratio * 2^32, where ratio = low + u (high - low) for u = (upper 16 bits) / 2^16
        threshold = uint32(low * UNIT_RATIO) + (ratio_bits >> 16) * (high - low)
        # Bits are uniform in [0, 2^32): a key is visible if bits >= ratio * 2^32.
        row_keys = derive_key(self.key, DropoutSite.FORGOTTEN_KEYS, self.row_ids).reshape(-1, 1)
        if segment_positions is None:
            is_first = positions == 0
        else:
            is_first = segment_positions == 0
        return (random_bits(row_keys, positions) >= threshold[:, None]) | is_first


def step_dropout(config: DropoutConfig, *, seed: int, step: Array, row_ids: Array) -> Dropout:
    """Return the random masks of a step. `for_stack` derives the masks of each stack.

    Args:
        config: The rates.
        seed: The seed of the run, from 0 to 2^32 - 1.
        step: Number of the step, int32 [].
        row_ids: Index of each row in the batch of the step, uint32 [B].
    """
    return Dropout(config, step_key(RandomStream.DROPOUT, seed=seed, step=step), row_ids)


def _drop_features(x: Array, row_keys: RandomKey, positions: Array, rate: float) -> Array:
    """Drop elements of [B, T, D] by row, position and feature."""
    if not rate:
        return x
    keys = derive_key(row_keys.reshape(-1, 1), positions)
    return drop(x, keys.reshape(*keys.first.shape, 1), jnp.arange(x.shape[-1]), rate)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def drop(x: Array, keys: RandomKey, index: Array, rate: float) -> Array:
    """Drop elements of an array, and scale the rest by 1 / (1 - rate) (Srivastava et al. 2014, inverted).

    The backward pass computes the mask again instead of saving it.

    Args:
        x: Floating-point array.
        keys: Random streams. They broadcast to the shape of `x`.
        index: Index of each element in its stream. It broadcasts to the shape of `x`.
        rate: Fraction of the elements to drop, from 0 to below 1.
    """
    # Bits are uniform in [0, 2^32), so bits >= rate * 2^32 with probability 1 - rate.
    threshold = min(round(rate * 2**32), 2**32 - 1)
    is_kept = random_bits(keys, index) >= uint32(threshold)
    return jnp.where(is_kept, (x.astype(jnp.float32) / (1 - rate)).astype(x.dtype), 0)


def _drop_forward(
    x: Array, keys: RandomKey, index: Array, rate: float
) -> tuple[Array, tuple[RandomKey, Array]]:
    return drop(x, keys, index, rate), (keys, index)


def _drop_backward(
    rate: float, saved: tuple[RandomKey, Array], gradient: Array
) -> tuple[Array, None, None]:
    # Without the barrier the compiler would merge this mask with the forward pass's mask, and keep it.
    gradient, (keys, index) = lax.optimization_barrier((gradient, saved))
    return drop(gradient, keys, index, rate), None, None


drop.defvjp(_drop_forward, _drop_backward)
