"""Differential attention (arXiv:2410.05258, section 2.1), in the form of DiffLlama.

Heads p and p + H/2 form a pair. Both attend to the values of two heads of keys and values, side by side. The second
attention is subtracted from the first:

    A_h      = softmax(q_h k_h^T / sqrt(E)) [v_j, v_(j + K/2)]     with j = (h // G) mod K/2 and G = H / K
    output_p = (1 - initial) norm(A_p - lambda A_(p + H/2))         an RMS norm without a scale
    lambda   = exp(q1 . k1) - exp(q2 . k2) + initial                with four learned vectors per layer
    initial  = 0.8 - 0.6 exp(-0.3 l)                                in layer l, counted from 0

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from prepcli.models.architecture import LAMBDA_VECTORS
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention_mask import KV
from trainer.nn.layer_weights import Leaves, Projections
from trainer.nn.norms import plain_rms_norm

# Key of the result of `pair_factors` in the weights of a chunk.
PAIR_FACTORS = "pair_factors"


def initial_lambdas(num_layers: int) -> list[float]:
    """Return the initial lambda of each layer."""
    return [0.8 - 0.6 * math.exp(-0.3 * layer) for layer in range(num_layers)]


def pair_factors(weights: Projections, initial: Array, dtype: jnp.dtype) -> Leaves:
    """Return the factor of the second attention of a pair in a dtype, and the factor of the output in float32.

    Args:
        weights: Weights of attention with LAMBDA_VECTORS, each [E].
        initial: Initial lambda of the layer, float32 [].
        dtype: Dtype of the computation.
    """
    q1, k1, q2, k2 = (weights[name]["weight"].astype(jnp.float32) for name in LAMBDA_VECTORS)
    difference = jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2))
    return {"lambda": (difference + initial).astype(dtype), "output": 1 - initial}


def pair_values(kv: KV, sharding: ShardingContext) -> KV:
    """Return keys [B, S, K, E] with the values of two heads side by side, [B, S, K, 2 E]."""
    # E.g. K = 4: heads 0 and 2 have the values [v_0, v_2], heads 1 and 3 have [v_1, v_3].
    first, second = jnp.split(kv.values, 2, axis=2)
    pairs = jnp.concatenate([first, second], axis=-1)
    values = jnp.concatenate([pairs, pairs], axis=2)
    return KV(kv.keys, sharding.constrain(values, "batch", "seq", "kv_heads", "head_dim"))


def subtract_pairs(mixed: Array, factors: Mapping[str, Array], eps: float) -> Array:
    """Subtract the attention of the second head of each pair from the first: [B, T, H, 2 E] -> [B, T, H, E]."""
    first, second = jnp.split(mixed, 2, axis=2)
    difference = first - factors["lambda"] * second
    output = (factors["output"] * plain_rms_norm(difference, eps)).astype(mixed.dtype)
    # The output of pair p has the 2 E elements of heads 2 p and 2 p + 1 of the output projection.
    rows, length, heads, width = mixed.shape
    return output.reshape(rows, length, heads, width // 2)
