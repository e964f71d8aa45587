"""Dense attention, and the check that a kernel supports all features of a call.

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E width of queries and keys,
V width of values.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, nn

from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig
from prepcli.models.attention_kernels import (
    AttentionFeature,
    KernelSpec,
    check_features,
    needed_features,
)
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.model_spec import AttentionOptions, name_activation

# Dense attention: materialize all scores [B, H, T, S] in float32.

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


def check_call_features(
    spec: KernelSpec, q: Array, kv: KV, *, arch_config: ArchConfig, mask: AttentionMask
) -> None:
    """Check that a kernel supports all features of a call, e.g. a window or dropout.

    A kernel is chosen by the features of its model. This check also covers masks from other callers, so that no
    kernel ignores a part of a mask. Positions of queries and keys count as equal if their shapes are equal, because
    traced values are unknown.

    Raises:
        UsageError: It does not support one of them.
    """
    q_positions, kv_positions = mask.q_positions, mask.kv_positions
    is_causal = mask.is_causal and q_positions is not None and kv_positions is not None
    has_other_positions = False
    if q_positions is not None and kv_positions is not None:
        has_other_positions = q_positions.ndim != 1 or q_positions.shape != kv_positions.shape
    is_needed = {
        AttentionFeature.CAUSAL: is_causal,
        AttentionFeature.BIDIRECTIONAL: not is_causal,
        AttentionFeature.WINDOW: is_causal and mask.window != FULL_ATTENTION,
        AttentionFeature.POSITIONS: is_causal and has_other_positions,
        AttentionFeature.GROUPED_HEADS: q.shape[2] != kv.keys.shape[2],
        AttentionFeature.KEY_PADDING: mask.kv_valid is not None,
        AttentionFeature.SEGMENTS: mask.q_segment_ids is not None
        and mask.kv_segment_ids is not None,
        AttentionFeature.DROPOUT: mask.dropout is not None,
        AttentionFeature.SCORE_BIAS: mask.bias is not None,
        AttentionFeature.VALUE_WIDTH: q.shape[-1] != kv.values.shape[-1],
        AttentionFeature.SINKS: mask.sinks is not None,
        AttentionFeature.LAYER_SCALE: mask.layer_score_scale is not None,
        AttentionFeature.SOFTCAP: arch_config.attn_logit_softcap != NO_SOFTCAP,
    }
    check_features(spec, needed_features(is_needed))
