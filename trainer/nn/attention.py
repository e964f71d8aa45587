"""Multi-head attention with grouped key and value heads (arXiv:1706.03762, arXiv:2305.13245).

q = rotate(norm(clip(x W_q))), k = rotate(norm(clip(x W_k))), v = clip(x W_v)
attention(x) = (sigmoid(x W_gate) * attend(q, k, v)) W_o

Clipping (MPT, OLMo), norms (arXiv:2010.04245), rotation and the gate (arXiv:2505.06708) are optional. The norm may
follow the rotation. Gemma 4 has norms of values, and v = x W_k in some layers. Other layers attend to the keys and
values of an earlier layer.
`trainer.nn.latent_attention` has the form of DeepSeek, `trainer.nn.differential_attention` the one of DiffLlama.

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E head width,
D model width, R rotated elements of a head.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from prepcli.models.architecture import NO_CLIP
from trainer.nn.attention_mask import KV
from trainer.nn.attention_steps import INPUT_NORM, attend_and_project, rotary_tables
from trainer.nn.context import LayerContext
from trainer.nn.differential_attention import pair_values
from trainer.nn.dropout import DropoutSite
from trainer.nn.key_score import append_key_scores
from trainer.nn.kv_cache import KVCache
from trainer.nn.latent_attention import latent_attention
from trainer.nn.layer_weights import NO_PARAMETERS, Leaves, Projections
from trainer.nn.linear import linear, scale_by
from trainer.nn.norms import norm, plain_rms_norm
from trainer.nn.position_encoding import CosSin, apply_rotary
from trainer.nn.token_chunks import TokenFunction, over_token_chunks

ROTATED = ("q", "k")
GATE = "gate"


def attention(
    x: Array,
    weights: Projections,
    context: LayerContext,
    *,
    input_norm: Leaves | None = None,
    encoder_states: Array | KV | None = None,
) -> tuple[Array, KVCache | None]:
    """Compute self-attention or cross-attention.

    Projections run in chunks of `context.ffn_chunk_size` tokens. Between them and the kernel only
    queries, keys and values exist for all tokens.

    Args:
        x: Queries' hidden states [B, T, D].
        weights: Projections `q`, `k`, `v`, `o`, the optional norms `q_norm` and `k_norm`, and optional `sinks` and
            `gate`.
        context: Mask, sharding, kernel, dropout, and the cache that the keys and values of `x` are
            appended to.
        input_norm: Weights of the norm of `x`. None skips the norm.
        encoder_states: For cross-attention the encoder's hidden states [B, S, D], or the keys and
            values that `project_kv` computed from them. None for self-attention.

    Returns:
        The attention output [B, T, D], and the cache with the keys and values of `x`.
    """
    if context.arch_config.latent_key_dim:
        return latent_attention(x, weights, context, input_norm=input_norm)
    kv_cache = context.kv_cache
    is_self = encoder_states is None
    window = context.mask.window
    key_source = encoder_states
    if context.key_values == "reused":
        assert kv_cache is not None
        key_source = kv_cache.shared[window]
    names = ("q", "k", "v") if key_source is None else ("q",)
    if GATE in weights:
        names = (GATE, *names)
    # q and gate: [B, T, H, E], k and v: [B, T, K, E]
    project = _projection(names, context, num_tokens=x.shape[1])
    projected = project(x, _select_weights(weights, names, input_norm), rotary_tables(context))
    gate = projected.pop(0) if GATE in weights else None
    q, *own_kv = projected
    if key_source is None:
        kv = KV(*own_kv)
    elif isinstance(key_source, KV):
        kv = key_source
    else:
        kv = project_kv(key_source, weights, context)
    # Keys enter the cache normed and rotated, so that no later step rotates them again.
    if kv_cache is not None and context.key_values != "reused":
        kv_cache, kv = kv_cache.append(kv, window, context.sharding)
    if kv_cache is not None and context.key_values == "stored":
        kv_cache = kv_cache.share(window, kv)
    if context.arch_config.has_key_scores:
        q, kv = append_key_scores(q, kv, weights, context)
    if context.arch_config.has_differential_attention:
        kv = pair_values(kv, context.sharding)
    site = DropoutSite.ATTENTION if is_self else DropoutSite.CROSS_ATTENTION
    output = attend_and_project(q, kv, weights, context, gate=gate, dropout_site=site)
    return scale_by(output, context.arch_config.attn_output_scale), kv_cache


def project_kv(x: Array, weights: Projections, context: LayerContext) -> KV:
    """Project hidden states [B, S, D] to keys and values [B, S, K, E]. Keys are normed and rotated."""
    names = ("k", "v")
    project = _projection(names, context, num_tokens=x.shape[1])
    return KV(*project(x, _select_weights(weights, names, None), rotary_tables(context)))


def _projection(names: tuple[str, ...], context: LayerContext, *, num_tokens: int) -> TokenFunction:
    """Return a function that projects [B, T, D] to queries, keys, values or gates, in chunks of tokens.

    Args:
        names: The projections, of "q", "k", "v" and GATE.
        context: Inputs of the layer.
        num_tokens: T.
    """
    arch_config = context.arch_config
    sharding = context.sharding
    is_interleaved = arch_config.rotary_pairs == "interleaved"
    norm_axes = (-2, -1) if arch_config.qk_norm_axes == "all_heads" else (-1,)

    def norm_heads(heads: Array, weights: Leaves | None) -> Array:
        if weights is None:
            return heads
        if weights is NO_PARAMETERS:
            return plain_rms_norm(heads, arch_config.norm_eps, norm_axes)
        return norm(heads, weights, arch_config, norm_axes)

    def project_chunk(x: Array, weights: Projections, cos_sin: CosSin | None) -> list[Array]:
        if INPUT_NORM in weights:
            x = norm(x, weights[INPUT_NORM], arch_config)
        x = scale_by(x, arch_config.attn_input_scale)
        x = sharding.constrain(x, "batch", "seq", "embed")
        projected: list[Array] = []
        for name in names:
            projection = weights.get(name)
            if projection is None and name == "v" and arch_config.has_key_values:
                projection = weights["k"]
            assert projection is not None
            heads = linear(x, projection, num_devices=sharding.num_devices)
            head_axis = "heads" if name in ("q", GATE) else "kv_heads"
            heads = sharding.constrain(heads, "batch", "seq", head_axis, "head_dim")
            if arch_config.qkv_clip != NO_CLIP:
                heads = jnp.clip(heads, -arch_config.qkv_clip, arch_config.qkv_clip)
            norm_weights = weights.get(f"{name}_norm")
            rotates = cos_sin is not None and cos_sin.cosine.shape[-1] > 0
            if arch_config.has_plain_qk_norm and name != "v" and rotates:
                norm_weights = NO_PARAMETERS
            if arch_config.has_plain_value_norm and name == "v":
                norm_weights = NO_PARAMETERS
            if not arch_config.rotates_before_qk_norm:
                heads = norm_heads(heads, norm_weights)
            if name in ROTATED and cos_sin is not None:
                heads = apply_rotary(
                    heads, cos_sin.cosine, cos_sin.sine, is_interleaved=is_interleaved
                )
            if name == "q" and cos_sin is not None and cos_sin.query_scale is not None:
                heads = heads * cos_sin.query_scale[..., None].astype(heads.dtype)
            if arch_config.rotates_before_qk_norm:
                heads = norm_heads(heads, norm_weights)
            projected.append(heads)
        return projected

    return over_token_chunks(
        project_chunk,
        num_tokens,
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )


def _select_weights(
    weights: Projections, names: tuple[str, ...], input_norm: Leaves | None
) -> Projections:
    """Return the weights of some projections with their norms, and the norm of their input."""
    selected: dict[str, Leaves] = {
        name: value for name, value in weights.items() if name.removesuffix("_norm") in names
    }
    if input_norm is not None:
        selected[INPUT_NORM] = input_norm
    return selected
