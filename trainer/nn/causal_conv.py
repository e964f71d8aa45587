"""Causal convolution over tokens with one filter per channel, as in Mamba (arXiv:2312.00752, section 3.4).

y_t = sum_d w_d x_(t-d) + b, with d from 0 to L - 1

Axes: B rows of the batch, T tokens, L taps. Channels are the remaining axes.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array


def causal_conv(
    x: Array, weights: Mapping[str, Array], previous: Array | None, positions: Array | None
) -> tuple[Array, Array]:
    """Convolve each channel of [B, T, channels] with its filter.

    Args:
        x: Input [B, T, channels].
        weights: `weight` [channels, L], whose last tap is for the token itself, and optionally `bias` [channels].
        previous: The inputs of the last L - 1 tokens before `x`, [B, L - 1, channels]. None means zeros.
        positions: int32 [B, T], the position of each token in its document. No tap reads an earlier document.
            None if each row is one document.

    Returns:
        The output [B, T, channels], and the inputs of the last L - 1 tokens.
    """
    taps = weights["weight"]
    num_taps = taps.shape[-1]
    num_tokens = x.shape[1]
    if previous is None:
        previous = jnp.zeros((x.shape[0], num_taps - 1, *x.shape[2:]), x.dtype)
    inputs = jnp.concatenate([previous, x], axis=1)
    # E.g. 3 taps: the inputs are those of the tokens -2, -1, 0, ..., and tap 2 reads from token 0 on.
    output = x * taps[..., -1]
    for distance in range(1, num_taps):
        start = num_taps - 1 - distance
        shifted = inputs[:, start : start + num_tokens]
        if positions is not None:
            is_same_document = (positions >= distance).reshape(
                *positions.shape, *(1 for _ in x.shape[2:])
            )
            shifted = jnp.where(is_same_document, shifted, 0)
        output = output + shifted * taps[..., start]
    if "bias" in weights:
        output = output + weights["bias"]
    return output, inputs[:, num_tokens:]
