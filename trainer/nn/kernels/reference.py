"""Dense attention: materialize all scores [B, H, T, S] in float32.

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E width of queries and keys,
V width of values.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, nn

from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig
from trainer.nn.activation_names import name_activation
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels.options import AttentionOptions

# Finite, so that the softmax of a query without any visible key is not nan: -inf - -inf is.
MASKED_SCORE = -1e30


def reference_attention(
    q: Array, kv: KV, arch_config: ArchConfig, mask: AttentionMask, options: AttentionOptions
) -> Array:
    """Compute the formula of `trainer.nn.kernels` directly, with all scores in float32.

    In einsum subscripts `k` is a key and value head and `g` a query head of its group.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys [B, S, K, E] and values [B, S, K, V]. K divides H.
        arch_config: `attn_scale` and `attn_logit_softcap`.
        mask: Visible keys, score bias, sinks, dropout and the layer's score scale.
        options: Unused: there are no tiles.

    Returns:
        [B, T, H, V] in the dtype of the values.
    """
    b, t, num_heads, head_dim = q.shape
    k, v = kv
    # [B, T, H, E] -> [B, T, K, G, E]: head h is query head h % G of group h // G
    grouped_q = q.reshape(b, t, k.shape[2], num_heads // k.shape[2], head_dim)
    # scores = softcap(q k^T * attn_scale * layer_score_scale) + bias: [B, K, G, T, S]
    scores = jnp.einsum("btkge,bske->bkgts", grouped_q, k, preferred_element_type=jnp.float32)
    scores = scores * arch_config.attn_scale
    if mask.layer_score_scale is not None:
        scores = scores * mask.layer_score_scale
    if arch_config.attn_logit_softcap != NO_SOFTCAP:
        # c * tanh(x / c) is x for small x, and stays in (-c, c) (Gemma 2, arXiv:2408.00118, section 2).
        scores = arch_config.attn_logit_softcap * jnp.tanh(scores / arch_config.attn_logit_softcap)
    # [H, T, S] or [B, H, T, S] -> [1 or B, K, G, T, S]
    if (bias := mask.score_bias()) is not None:
        scores = scores + bias.reshape(-1, *scores.shape[1:])
    if (visible := mask.materialize()) is not None:
        # [T, S] broadcasts as it is, and [B, T, S] becomes [B, 1, 1, T, S].
        if visible.ndim == 3:
            visible = visible[:, None, None]
        scores = jnp.where(visible, scores, MASKED_SCORE)
    if mask.sinks is None:
        probabilities = nn.softmax(scores, axis=-1)
    else:
        # [H] -> [1, K, G, 1, 1], the score of one more key, whose probability has no value to weigh.
        sinks = mask.sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
        column = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
        probabilities = nn.softmax(jnp.concatenate([scores, column], -1), axis=-1)[..., :-1]
    if visible is not None and mask.kv_valid is not None and mask.window != FULL_ATTENTION:
        # A window over padding may have no valid key. The softmax is then uniform over hidden keys,
        # and blockwise attention returns 0.
        probabilities = jnp.where(visible, probabilities, 0)
    probabilities = mask.drop(probabilities).astype(v.dtype)
    output = jnp.einsum("bkgts,bske->btkge", probabilities, v)
    return name_activation(output.reshape(b, t, num_heads, v.shape[-1]), "attention_output")
