"""Splash attention: JAX's Pallas kernel of flash attention for TPUs, which skips blocks without visible keys.

Axes: B rows of the batch, T tokens, H query heads, K key and value heads, E head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from trainer.models.architecture import ArchConfig
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels.options import AttentionOptions
from trainer.nn.token_axis import pad_tokens

LENGTH_MULTIPLE = 128  # of the kernel's blocks
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

    Sequences are padded to whole blocks: padding follows all tokens, so that no token sees it. The kernel has no factor
    of scores, so queries are multiplied by it.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys and values [B, T, K, E]; K divides H.
        arch_config: `attn_scale` and `attn_logit_softcap`.
        mask: Window, segments and the layer's score scale.
        options: Unused: the kernel has tiles of its own.
        interpret: Whether to run the kernel's operations one by one on any device, for tests.

    Returns:
        [B, T, H, E] in the dtype of the values.
    """
    from trainer.nn.kernels.splash_kernel import make_row_kernel  # loads Pallas, which other kernels do not need

    num_tokens = q.shape[1]
    padding = -num_tokens % LENGTH_MULTIPLE
    scale = arch_config.attn_scale * (1.0 if mask.layer_score_scale is None else mask.layer_score_scale)
    scaled_q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    rows_q, rows_k, rows_v = (jnp.swapaxes(pad_tokens(array, padding), 1, 2) for array in (scaled_q, *kv))
    segment_ids = None if mask.q_segment_ids is None else pad_tokens(mask.q_segment_ids, padding, PADDING_SEGMENT)
    kernel = make_row_kernel(
        num_tokens + padding,
        num_heads=q.shape[2],
        window=mask.window,
        softcap=arch_config.attn_logit_softcap,
        interpret=interpret,
    )
    output = jax.vmap(kernel)(rows_q, rows_k, rows_v, segment_ids)
    return jnp.swapaxes(output, 1, 2)[:, :num_tokens].astype(kv.values.dtype)
