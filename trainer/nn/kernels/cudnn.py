"""Flash attention of cuDNN, for NVIDIA GPUs.

Axes: B rows of the batch, T tokens, H query heads, K key and value heads, E head width.
"""

from __future__ import annotations

import jax
from jax import Array

from prepcli.models.architecture import FULL_ATTENTION, ArchConfig
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels.options import AttentionOptions


def cudnn_attention(
    q: Array, kv: KV, arch_config: ArchConfig, mask: AttentionMask, options: AttentionOptions
) -> Array:
    """Compute causal attention of whole sequences in bfloat16 with cuDNN.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys and values [B, T, K, E]. K divides H.
        arch_config: `attn_scale`.
        mask: Window and the layer's score scale.
        options: Unused: cuDNN chooses its tiles.

    Returns:
        [B, T, H, E] in the dtype of the values.
    """
    if mask.layer_score_scale is not None:
        q = (q * mask.layer_score_scale).astype(q.dtype)
    return jax.nn.dot_product_attention(
        q,
        kv.keys,
        kv.values,
        scale=arch_config.attn_scale,
        is_causal=True,
        local_window_size=None if mask.window == FULL_ATTENTION else (mask.window - 1, 0),
        implementation="cudnn",
    )
