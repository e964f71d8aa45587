"""Multi-head attention with grouped key and value heads (arXiv:1706.03762, arXiv:2305.13245).

q = rotate(norm(clip(x W_q))), k = rotate(norm(clip(x W_k))), v = clip(x W_v)
attention(x) = (sigmoid(x W_gate) * attend(q, k, v)) W_o

Clipping (MPT, OLMo), norms (arXiv:2010.04245), rotation and the gate (arXiv:2505.06708) are optional. The norm may
follow the rotation. Gemma 4 has norms of values, and v = x W_k in some layers. Other layers attend to the keys and
values of an earlier layer.

Other forms: latent attention (DeepSeek), differential attention (DiffLlama) and scores of keys (Doge).

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E width of queries and keys,
V width of values, D model width, R rotated elements of a head. Of latent attention: P rotated elements, C width of the
latent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, nn

from prepcli.models.architecture import LAMBDA_VECTORS, NO_CLIP, ArchConfig
from trainer.distributed.sharding import UNSPLIT, ShardingContext
from trainer.nn.attention_mask import KV, CosSin, apply_rotary
from trainer.nn.cache import KVCache
from trainer.nn.context import LayerContext
from trainer.nn.dropout import DropoutSite
from trainer.nn.kernels import attend
from trainer.nn.model_spec import name_activation
from trainer.nn.projections import (
    NO_PARAMETERS,
    Leaves,
    Projections,
    linear,
    norm,
    plain_rms_norm,
    scale_by,
)
from trainer.nn.token_chunks import TokenFunction, over_token_chunks

# The steps that follow the projections in all forms of attention: the kernel and the output projection.

# Key in the weights of a chunk: the norm of the input, not of queries or keys.
INPUT_NORM = "input"
# Key of the norm of the input of the output projection.
OUTPUT_NORM = "o_norm"


def attend_and_project(
    q: Array,
    kv: KV,
    weights: Projections,
    context: LayerContext,
    *,
    gate: Array | None = None,
    dropout_site: DropoutSite = DropoutSite.ATTENTION,
) -> Array:
    """Compute attention and its output projection.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys [B, S, K, E] and values [B, S, K, V].
        weights: Output projection `o`, the optional norm `o_norm` of its input (BitNet), optional `sinks`, and the
            optional vectors of differential attention.
        context: Mask, sharding, kernel and dropout.
        gate: [B, T, H, V], the output of attention is multiplied by its sigmoid. None means no gate.
        dropout_site: Site of the dropout of probabilities.

    Returns:
        [B, T, D].
    """
    sharding = context.sharding
    q, kv = _name_kernel_inputs(q, _repeat_kv(q, kv, sharding))
    mask = context.mask.with_chunk_segments(len(q))
    if context.dropout is not None:
        dropout = context.dropout.attention(dropout_site, q.shape[2])
        mask = dataclasses.replace(mask, dropout=dropout)
    if "sinks" in weights:
        mask = dataclasses.replace(mask, sinks=weights["sinks"]["bias"])
    mixed = attend(
        q,
        kv,
        arch_config=context.arch_config,
        mask=mask,
        options=context.attention_options,
        sharding=sharding,
    )
    mixed = sharding.constrain(mixed, "batch", "seq", "heads", "head_dim")

    def project_out(inputs: list[Array], weights: Projections, constants: None) -> Array:
        mixed, *gates = inputs
        for gate in gates:
            mixed = mixed * nn.sigmoid(gate)
        if PAIR_FACTORS in weights:
            mixed = subtract_pairs(mixed, weights[PAIR_FACTORS], context.arch_config.norm_eps)
        if OUTPUT_NORM in weights:
            # Over the elements of all heads of a token.
            mixed = norm(mixed, weights[OUTPUT_NORM], context.arch_config, axes=(-2, -1))
        return linear(mixed, weights["o"], num_devices=sharding.num_devices)

    output_weights = {name: weights[name] for name in ("o", OUTPUT_NORM) if name in weights}
    if context.initial_lambda is not None:
        output_weights[PAIR_FACTORS] = pair_factors(weights, context.initial_lambda, mixed.dtype)
    inputs = [mixed] if gate is None else [mixed, gate]
    # [B, T, H, V] -> [B, T, D]
    output = over_token_chunks(
        project_out,
        mixed.shape[1],
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )(inputs, output_weights, None)
    return name_activation(output, "o")


def rotary_tables(context: LayerContext) -> CosSin | None:
    """Return the rotation of queries and keys with an axis of rows, [1 or B, T, ...]. None if there is none."""
    cos_sin = context.mask.cos_sin
    if cos_sin is None or cos_sin.cosine.ndim == 3:
        return cos_sin
    return jax.tree.map(lambda table: table[None], cos_sin)


def _name_kernel_inputs(q: Array, kv: KV) -> tuple[Array, KV]:
    """Name queries, keys and values, so that a rematerialization policy can save them."""
    q = name_activation(q, "q")
    return q, KV(name_activation(kv.keys, "k"), name_activation(kv.values, "v"))


def _repeat_kv(q: Array, kv: KV, sharding: ShardingContext) -> KV:
    """Repeat keys and values [B, S, K, E] to [B, S, H, E] if the mesh splits H into more shards than K."""
    # Each device then computes its own query heads without communication.
    num_heads = q.shape[2]
    num_kv_heads = kv.keys.shape[2]
    if sharding.num_shards("heads", num_heads) == sharding.num_shards("kv_heads", num_kv_heads):
        return kv

    def repeat(array: Array) -> Array:
        repeated = jnp.repeat(array, num_heads // num_kv_heads, axis=2)
        return sharding.constrain(repeated, "batch", "seq", "heads", "head_dim")

    return KV(repeat(kv.keys), repeat(kv.values))


# Scores of keys from their values, added to attention scores (dynamic mask attention, arXiv:2412.11834).
#
#     score_ts = scale q_t . k_s + exp(a_j softplus(v_s W_j + b_j))     for the keys and values of head j
#
# `v_s` has the values of all heads. The score of a key does not depend on the query, so the kernel gets it as one more
# element of the key, which meets a 1 in each query:
#
#     q_t' = [q_t, 1]        k_s' = [k_s, exp(...) / scale]
#
# With more keys than `keep_window_size`, Doge drops those with the smallest scores. Such lengths are not supported.
# Source: `DogeAttention` of transformers.

# Keys of the projection W, b and of the rates a among the weights of attention.
SCORE_STEP = "score_step"
SCORE_RATE = "score_rate"


def append_key_scores(
    q: Array, kv: KV, weights: Projections, context: LayerContext
) -> tuple[Array, KV]:
    """Append an element to queries and keys, so that their products include the scores of keys.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys and values [B, S, K, E].
        weights: Weights of attention with SCORE_STEP and SCORE_RATE.
        context: Scale of attention, and sharding.

    Returns:
        Queries [B, T, H, E + 1], and keys [B, S, K, E + 1] with the same values.
    """
    sharding = context.sharding
    steps = nn.softplus(linear(kv.values, weights[SCORE_STEP], num_devices=sharding.num_devices))
    scores = jnp.exp(weights[SCORE_RATE]["weight"] * steps)
    scores = scores / jnp.asarray(context.arch_config.attn_scale, scores.dtype)
    keys = jnp.concatenate([kv.keys, scores[..., None]], axis=-1)
    ones = jnp.ones((*q.shape[:-1], 1), q.dtype)
    q = jnp.concatenate([q, ones], axis=-1)
    return (
        sharding.constrain(q, "batch", "seq", "heads", "head_dim"),
        KV(sharding.constrain(keys, "batch", "seq", "kv_heads", "head_dim"), kv.values),
    )


# Differential attention (arXiv:2410.05258, section 2.1), in the form of DiffLlama.
#
# Heads p and p + H/2 form a pair. Both attend to the values of two heads of keys and values, side by side. The second
# attention is subtracted from the first:
#
#     A_h      = softmax(q_h k_h^T / sqrt(E)) [v_j, v_(j + K/2)]     with j = (h // G) mod K/2 and G = H / K
#     output_p = (1 - initial) norm(A_p - lambda A_(p + H/2))         an RMS norm without a scale
#     lambda   = exp(q1 . k1) - exp(q2 . k2) + initial                with four learned vectors per layer
#     initial  = 0.8 - 0.6 exp(-0.3 l)                                in layer l, counted from 0

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


# Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1, equations 9 to 19).
#
# c = norm(x W_kv_down)                        the latent of keys and values, one per token for all heads
# r = rotate(x W_k_rope)                       the rotated part of the keys, shared by all heads
# [k_h, v_h] = c W_kv_up,h                     per head h
# q_h = norm(x W_q_down) W_q_up,h              or x W_q,h without a latent of queries
# score_h = [q_h, rotate(q'_h)] . [k_h, r]     q'_h is the last part of each query
# output = [p_1 v_1, ..., p_H v_H] W_o
#
# The KV cache holds c and r only. Each step computes the keys and values of all tokens from them.

PROJECTIONS = ("q", "q_down", "q_latent_norm", "q_up", "kv_down", "kv_latent_norm", "k_rope")


def latent_attention(
    x: Array,
    weights: Projections,
    context: LayerContext,
    *,
    input_norm: Leaves | None = None,
) -> tuple[Array, KVCache | None]:
    """Compute self-attention whose keys and values come from a latent.

    Args:
        x: Hidden states [B, T, D].
        weights: PROJECTIONS, `kv_up` and `o`. Either `q`, or `q_down`, `q_latent_norm` and `q_up`.
        context: Mask, sharding, kernel, dropout, and the cache that the latents of `x` are appended to.
        input_norm: Weights of the norm of `x`. None skips the norm.

    Returns:
        The attention output [B, T, D], and the cache with the latents of `x`.
    """
    sharding = context.sharding
    kv_cache = context.kv_cache
    selected = {name: weights[name] for name in PROJECTIONS if name in weights}
    if input_norm is not None:
        selected[INPUT_NORM] = input_norm
    # q: [B, T, H, E], latent: [B, T, 1, C], k_rope: [B, T, 1, P]
    q, latent, k_rope = _latent_projection(context, num_tokens=x.shape[1])(
        x, selected, rotary_tables(context)
    )
    compressed = KV(latent, k_rope)
    if kv_cache is not None:
        kv_cache, compressed = kv_cache.append(compressed, context.mask.window, sharding)
    expand = over_token_chunks(
        _expansion(context),
        compressed.keys.shape[1],
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )
    kv = KV(*expand(compressed, weights["kv_up"], None))
    return attend_and_project(q, kv, weights, context), kv_cache


def _latent_projection(context: LayerContext, *, num_tokens: int) -> TokenFunction:
    """Return a function that projects [B, T, D] to queries, latents and shared keys, in chunks of tokens."""
    arch_config = context.arch_config
    sharding = context.sharding
    num_devices = sharding.num_devices
    is_interleaved = arch_config.rotary_pairs == "interleaved"
    latent_norm = dataclasses.replace(arch_config, norm_eps=arch_config.latent_norm_eps)

    def project_chunk(x: Array, weights: Projections, cos_sin: CosSin | None) -> list[Array]:
        assert cos_sin is not None
        if INPUT_NORM in weights:
            x = norm(x, weights[INPUT_NORM], arch_config)
        x = sharding.constrain(x, "batch", "seq", "embed")
        latent = linear(x, weights["kv_down"], num_devices=num_devices)
        latent = norm(latent, weights["kv_latent_norm"], latent_norm)
        latent = sharding.constrain(latent, "batch", "seq", UNSPLIT)[:, :, None]
        k_rope = linear(x, weights["k_rope"], num_devices=num_devices)
        k_rope = sharding.constrain(k_rope, "batch", "seq", UNSPLIT)[:, :, None]
        k_rope = apply_rotary(k_rope, cos_sin.cosine, cos_sin.sine, is_interleaved=is_interleaved)
        q = _queries(x, weights, latent_norm, num_devices)
        q = sharding.constrain(q, "batch", "seq", "heads", "head_dim")
        plain, rotated = jnp.split(q, [q.shape[-1] - k_rope.shape[-1]], axis=-1)
        rotated = apply_rotary(rotated, cos_sin.cosine, cos_sin.sine, is_interleaved=is_interleaved)
        q = jnp.concatenate([plain, rotated], axis=-1)
        if cos_sin.query_scale is not None:
            q = q * cos_sin.query_scale[..., None].astype(q.dtype)
        return [q, latent, k_rope]

    return over_token_chunks(
        project_chunk,
        num_tokens,
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )


def _queries(x: Array, weights: Projections, latent_norm: ArchConfig, num_devices: int) -> Array:
    """Project [B, T, D] to queries [B, T, H, E], directly or by a latent."""
    if "q" in weights:
        return linear(x, weights["q"], num_devices=num_devices)
    latent = linear(x, weights["q_down"], num_devices=num_devices)
    latent = norm(latent, weights["q_latent_norm"], latent_norm)
    return linear(latent, weights["q_up"], num_devices=num_devices)


def _expansion(context: LayerContext) -> TokenFunction:
    """Return a function that computes keys [B, S, H, E] and values [B, S, H, V] of latents and shared keys."""
    sharding = context.sharding

    def expand_chunk(
        compressed: KV, kv_up: Mapping[str, Array], constants: None
    ) -> tuple[Array, Array]:
        latent, k_rope = compressed
        expanded = linear(latent[:, :, 0], kv_up, num_devices=sharding.num_devices)
        expanded = sharding.constrain(expanded, "batch", "seq", "heads", "head_dim")
        # The last V of [B, S, H, E - P + V] are values.
        keys, values = jnp.split(expanded, [context.arch_config.latent_key_dim], axis=-1)
        shared = jnp.broadcast_to(k_rope, (*keys.shape[:-1], k_rope.shape[-1]))
        return jnp.concatenate([keys, shared], axis=-1), values

    return expand_chunk


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
    """Return a function that projects [B, T, D] to queries, keys, values or gates, in chunks of tokens."""
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
