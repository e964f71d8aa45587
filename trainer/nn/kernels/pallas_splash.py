"""Splash attention: JAX's Pallas kernel of flash attention for TPUs, which skips blocks without visible keys.

Axes: B rows of the batch, T tokens, H query heads, K key and value heads, E head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from prepcli.models.architecture import ArchConfig
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels.options import AttentionOptions
from trainer.nn.token_axis import pad_tokens

# The length of a sequence must be a multiple of the kernel's block size.
LENGTH_MULTIPLE = 128
PADDING_SEGMENT = -1


def splash_attention(
    q: Array,
    kv: KV,
    arch_config: ArchConfig,
    mask: AttentionMask,
    options: AttentionOptions,
    *,
    interpret: bool = False,
) -> Array:
    """Compute causal attention of whole sequences.

    Sequences are padded to whole blocks: padding follows all tokens, so that no token sees it. The kernel has no
    argument for the score scale, so queries are multiplied by it.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys and values [B, T, K, E]. K divides H.
        arch_config: `attn_scale` and `attn_logit_softcap`.
        mask: Window, segments and the layer's score scale.
        options: Unused: the kernel has its own tiles.
        interpret: Whether to run the kernel's operations one by one on any device, for tests.

    Returns:
        [B, T, H, E] in the dtype of the values.
    """
    # The import loads Pallas, which other kernels do not need.
    from trainer.nn.kernels.splash_kernel import make_row_kernel

    num_tokens = q.shape[1]
    padding = -num_tokens % LENGTH_MULTIPLE
    scale = arch_config.attn_scale
    if mask.layer_score_scale is not None:
        scale = scale * mask.layer_score_scale
    scaled_q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    # [B, T, H, E] -> [B, H, T, E], as the kernel reads them
    rows_q = jnp.swapaxes(pad_tokens(scaled_q, padding), 1, 2)
    rows_k = jnp.swapaxes(pad_tokens(kv.keys, padding), 1, 2)
    rows_v = jnp.swapaxes(pad_tokens(kv.values, padding), 1, 2)
    segment_ids = mask.q_segment_ids
    if segment_ids is not None:
        segment_ids = pad_tokens(segment_ids, padding, PADDING_SEGMENT)
    kernel = make_row_kernel(
        num_tokens + padding,
        num_heads=q.shape[2],
        window=mask.window,
        softcap=arch_config.attn_logit_softcap,
        interpret=interpret,
    )
    output = jax.vmap(kernel)(rows_q, rows_k, rows_v, segment_ids)
    return jnp.swapaxes(output, 1, 2)[:, :num_tokens].astype(kv.values.dtype)
