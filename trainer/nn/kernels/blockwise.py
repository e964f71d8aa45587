"""Blockwise attention: scores exist for one tile of queries and keys at a time.

The forward pass is FlashAttention's online softmax (arXiv:2205.14135, algorithm 1). It saves the log-sum-exp of each
query, from which the backward pass computes the probabilities again (arXiv:2307.08691, algorithm 2). Both passes
skip a tile if the ranges of its positions or segments show that it has no visible key. Gradients are summed in float32.

Within the loops tiles are head-major: each product then multiplies contiguous matrices, and transposes at most the
smaller operand or the result.

Axes: B rows, T queries, S keys, H query heads, K key and value heads, G = H / K query heads of a group, E head width,
N tiles of queries or keys, t queries and s keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig, RelativePositionBias
from trainer.models.chunk_sizes import chunk_length
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels.options import AttentionOptions
from trainer.nn.score_bias import ScoreBias
from trainer.nn.token_axis import join_chunks, pad_tokens, split_chunks

LOWEST = -1e30  # initial maximum of the scores of a query; finite, so that no difference is nan
FAR = 1 << 30  # beyond all positions
Q_PADDING, KV_PADDING = -1, -2  # position and segment of padding; the segments match no real segment


@dataclass(frozen=True, slots=True)
class _TileConfig:
    """Static settings of a call: tile sizes, scaling of scores, and the rule of visible keys."""

    q_size: int
    kv_size: int
    scale: float
    softcap: float
    window: int
    is_causal: bool
    bias_config: RelativePositionBias | None
    sharding: ShardingContext


class _Labels(NamedTuple):
    """Positions and segments of queries or keys, and which keys are valid: [B or 1, T or S] each, or None."""

    positions: Array | None = None
    segment_ids: Array | None = None
    valid: Array | None = None


class _Constants(NamedTuple):
    """The inputs without a gradient."""

    q_labels: _Labels
    kv_labels: _Labels
    score_scale: Array  # float32 []


class _SoftmaxState(NamedTuple):
    """The softmax of the queries of a tile over the keys seen so far.

    Attributes:
        weighted_sum: Values weighted by exp(score - maximum), float32 [B, K, G, t, E].
        maximum: Largest score [B, K, G, t].
        normalizer: Sum of exp(score - maximum) [B, K, G, t].
    """

    weighted_sum: Array
    maximum: Array
    normalizer: Array


class _Saved(NamedTuple):
    """Residuals of the forward pass: q and output [B, T, K, G, E], k and v [B, S, K, E], both padded to whole tiles.

    `log_normalizer` [N, B, K, G, t] is the log-sum-exp of the scores.
    """

    q: Array
    k: Array
    v: Array
    bias_table: Array | None
    constants: _Constants
    output: Array
    log_normalizer: Array


def blockwise_attention(
    q: Array, kv: KV, arch_config: ArchConfig, mask: AttentionMask, options: AttentionOptions
) -> Array:
    """Compute softmax(q k^T * scale) v with memory linear in the lengths.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys and values [B, S, K, E]; K divides H.
        arch_config: `attn_scale` and `attn_logit_softcap`.
        mask: Visible keys, score bias and the layer's score scale.
        options: Sizes of tiles; lengths need not be multiples of them.

    Returns:
        [B, T, H, E] in the dtype of the values. The output of a query without visible keys is 0.
    """
    b, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = kv.keys.shape[1:3]
    config = _TileConfig(
        q_size=chunk_length(options.q_chunk_size, num_queries),
        kv_size=chunk_length(options.k_chunk_size, num_keys),
        scale=arch_config.attn_scale,
        softcap=arch_config.attn_logit_softcap,
        window=mask.window,
        is_causal=mask.is_causal,
        bias_config=None if mask.bias is None else mask.bias.config,
        sharding=ShardingContext() if mask.bias is None else mask.bias.sharding,
    )
    q_padding, kv_padding = -num_queries % config.q_size, -num_keys % config.kv_size
    valid = jnp.ones((1, num_keys), bool) if mask.kv_valid is None else mask.kv_valid
    constants = _Constants(
        _pad_labels(_Labels(mask.q_positions, mask.q_segment_ids), q_padding, Q_PADDING),
        _pad_labels(_Labels(mask.kv_positions, mask.kv_segment_ids, valid), kv_padding, KV_PADDING),
        jnp.float32(1) if mask.layer_score_scale is None else mask.layer_score_scale,
    )
    grouped_q = q.reshape(b, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    output = _attend(
        config,
        pad_tokens(grouped_q, q_padding),
        pad_tokens(kv.keys, kv_padding),
        pad_tokens(kv.values, kv_padding),
        None if mask.bias is None else mask.bias.table,
        constants,
    )
    return output[:, :num_queries].reshape(b, num_queries, num_heads, head_dim)


def _pad_labels(labels: _Labels, count: int, padding_id: int) -> _Labels:
    """Add a row axis to all labels and append padding; no query sees a padding key, because it is not valid."""
    return _Labels(
        _pad_label(labels.positions, count, padding_id),
        _pad_label(labels.segment_ids, count, padding_id),
        _pad_label(labels.valid, count, False),
    )


def _pad_label(label: Array | None, count: int, fill: int | bool) -> Array | None:
    """Return a label as [B or 1, T], with padding."""
    return None if label is None else pad_tokens(label if label.ndim == 2 else label[None], count, fill)


def _attend_tiles(
    config: _TileConfig, q: Array, k: Array, v: Array, bias_table: Array | None, constants: _Constants
) -> Array:
    """Attend from q [B, T, K, G, E] to k and v [B, S, K, E]; T and S are multiples of the tile sizes."""
    return _forward(config, q, k, v, bias_table, constants)[0]


def _forward(
    config: _TileConfig, q: Array, k: Array, v: Array, bias_table: Array | None, constants: _Constants
) -> tuple[Array, _Saved]:
    # Without the barrier a scan over layers would compute the masks of all tiles once, and keep them: [T, S] in memory.
    tiled_q, labels = lax.optimization_barrier((q, constants))
    cut_q, cut_kv = (partial(split_chunks, chunk_size=size) for size in (config.q_size, config.kv_size))
    q_tiles = jax.tree.map(cut_q, (tiled_q, labels.q_labels))
    kv_tiles = _head_major(cut_kv(k)), _head_major(cut_kv(v)), jax.tree.map(cut_kv, labels.kv_labels)

    def run_q_tile(_: None, q_tile: tuple[Array, _Labels]) -> tuple[None, tuple[Array, Array]]:
        queries, q_labels = _head_major(q_tile[0], 1), q_tile[1]
        maximum = jnp.full(queries.shape[:-1], LOWEST, jnp.float32)
        state = _SoftmaxState(jnp.zeros(queries.shape, jnp.float32), maximum, jnp.zeros_like(maximum))

        def run_kv_tile(state: _SoftmaxState, kv_tile: tuple[Array, Array, _Labels]) -> tuple[_SoftmaxState, None]:
            keys, values, kv_labels = kv_tile

            def update(state: _SoftmaxState) -> _SoftmaxState:
                scores, _ = _masked_scores(config, queries, keys, bias_table, labels.score_scale, q_labels, kv_labels)
                return _update_softmax(state, scores, values)

            return lax.cond(_has_visible(config, q_labels, kv_labels), update, lambda same: same, state), None

        state, _ = lax.scan(run_kv_tile, state, kv_tiles)
        normalizer = jnp.where(state.normalizer == 0, 1.0, state.normalizer)
        output = jnp.moveaxis(state.weighted_sum / normalizer[..., None], 3, 1).astype(v.dtype)
        return None, (output, state.maximum + jnp.log(normalizer))

    _, (output_tiles, log_normalizer) = lax.scan(run_q_tile, None, q_tiles)
    output = join_chunks(output_tiles)
    return output, _Saved(q, k, v, bias_table, constants, output, log_normalizer)


def _update_softmax(state: _SoftmaxState, scores: Array, values: Array) -> _SoftmaxState:
    """Add the keys of a tile: scores [B, K, G, t, s] and values [B, K, s, E]."""
    maximum = jnp.maximum(state.maximum, scores.max(-1))
    weights = jnp.exp(scores - maximum[..., None])
    rescale = jnp.exp(state.maximum - maximum)
    return _SoftmaxState(
        state.weighted_sum * rescale[..., None] + _einsum("bkgts,bkse->bkgte", weights.astype(values.dtype), values),
        maximum,
        state.normalizer * rescale + weights.sum(-1),
    )


class _Gradients(NamedTuple):
    """Float32 gradients: q [B, K, G, t, E] of one tile, k and v [N, B, s, K, E] of all tiles, and the bias table."""

    q: Array
    k_tiles: Array
    v_tiles: Array
    bias_table: Array | None


def _backward(config: _TileConfig, saved: _Saved, output_gradient: Array) -> tuple[Any, ...]:
    output_gradient, labels = lax.optimization_barrier((output_gradient, saved.constants))
    row_dots = (saved.output.astype(jnp.float32) * output_gradient.astype(jnp.float32)).sum(-1)  # [B, T, K, G]
    cut_q, cut_kv = (partial(split_chunks, chunk_size=size) for size in (config.q_size, config.kv_size))
    q_tiles = (*jax.tree.map(cut_q, (saved.q, labels.q_labels, output_gradient, row_dots)), saved.log_normalizer)
    k_tiles, v_tiles = map(cut_kv, (saved.k, saved.v))
    kv_tiles = _head_major(k_tiles), _head_major(v_tiles), jax.tree.map(cut_kv, labels.kv_labels)

    def run_q_tile(sums: tuple[Array, Array, Array | None], q_tile: tuple[Any, ...]) -> tuple[Any, Array]:
        queries, q_labels, d_output, row_dot, log_normalizer = q_tile
        queries, d_output, row_dot = (_head_major(array, 1) for array in (queries, d_output, row_dot[..., None]))

        def run_kv_tile(index: Array, gradients: _Gradients) -> _Gradients:
            keys, values, kv_labels = jax.tree.map(lambda tiles: tiles[index], kv_tiles)

            def update(gradients: _Gradients) -> _Gradients:
                scores, d_scores_d_dots = _masked_scores(
                    config, queries, keys, saved.bias_table, labels.score_scale, q_labels, kv_labels
                )
                probabilities = jnp.exp(scores - log_normalizer[..., None])
                d_scores = probabilities * (_einsum("bkgte,bkse->bkgts", d_output, values) - row_dot)
                d_dots = (d_scores * d_scores_d_dots).astype(queries.dtype)
                d_values = _einsum("bkgte,bkgts->bske", d_output, probabilities.astype(d_output.dtype))
                return _Gradients(
                    gradients.q + _einsum("bkgts,bkse->bkgte", d_dots, keys),
                    gradients.k_tiles.at[index].add(_einsum("bkgte,bkgts->bske", queries, d_dots)),
                    gradients.v_tiles.at[index].add(d_values),
                    _add_bias_gradient(gradients.bias_table, config, saved.bias_table, d_scores, q_labels, kv_labels),
                )

            return lax.cond(_has_visible(config, q_labels, kv_labels), update, lambda same: same, gradients)

        initial = _Gradients(jnp.zeros(queries.shape, jnp.float32), *sums)
        gradients = lax.fori_loop(0, len(k_tiles), run_kv_tile, initial)
        return gradients[1:], jnp.moveaxis(gradients.q, 3, 1).astype(queries.dtype)

    zeros = jnp.zeros(k_tiles.shape, jnp.float32)
    table_zeros = None if saved.bias_table is None else jnp.zeros(saved.bias_table.shape, jnp.float32)
    (dk_tiles, dv_tiles, d_table), dq_tiles = lax.scan(run_q_tile, (zeros, zeros, table_zeros), q_tiles)
    d_table = None if saved.bias_table is None else d_table.astype(saved.bias_table.dtype)
    dk, dv = join_chunks(dk_tiles).astype(saved.k.dtype), join_chunks(dv_tiles).astype(saved.v.dtype)
    return join_chunks(dq_tiles), dk, dv, d_table, None


_attend = jax.custom_vjp(_attend_tiles, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)


def _head_major(x: Array, token_axis: int = 2) -> Array:
    """Move the token axis before the last one: [N, B, s, K, E] to [N, B, K, s, E], or [B, t, K, G, E] with axis 1."""
    return jnp.moveaxis(x, token_axis, -2)


def _masked_scores(
    config: _TileConfig,
    queries: Array,
    keys: Array,
    bias_table: Array | None,
    score_scale: Array,
    q_labels: _Labels,
    kv_labels: _Labels,
) -> tuple[Array, Array]:
    """Compute the scores of a tile, float32 [B, K, G, t, s], and their derivative by the dot products of q and k.

    Scores of keys that are not visible are -inf.
    """
    scale = config.scale * score_scale
    scores = _einsum("bkgte,bkse->bkgts", queries, keys) * scale
    derivative = scale
    if config.softcap != NO_SOFTCAP:
        ratio = jnp.tanh(scores / config.softcap)
        scores, derivative = config.softcap * ratio, scale * (1.0 - jnp.square(ratio))
    mask = _tile_mask(config, q_labels, kv_labels)
    if bias_table is not None:
        scores = scores + _tile_bias(config, bias_table, q_labels, kv_labels).reshape(-1, *scores.shape[1:])
    if (visible := mask.materialize()) is not None:
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    return scores, derivative


def _tile_mask(config: _TileConfig, q_labels: _Labels, kv_labels: _Labels) -> AttentionMask:
    """Return the mask of a tile; its rule of visible keys is the one of whole sequences."""
    return AttentionMask(
        q_positions=q_labels.positions,
        kv_positions=kv_labels.positions,
        kv_valid=kv_labels.valid,
        q_segment_ids=q_labels.segment_ids,
        kv_segment_ids=kv_labels.segment_ids,
        window=config.window,
        is_causal=config.is_causal,
    )


def _tile_bias(config: _TileConfig, bias_table: Array, q_labels: _Labels, kv_labels: _Labels) -> Array:
    """Compute the score bias of a tile [B or 1, H, t, s]."""
    assert config.bias_config is not None
    assert q_labels.positions is not None
    assert kv_labels.positions is not None
    bias = ScoreBias(bias_table, config.bias_config, config.sharding)
    return bias.materialize(q_labels.positions, kv_labels.positions)


def _add_bias_gradient(
    gradient: Array | None,
    config: _TileConfig,
    bias_table: Array | None,
    d_scores: Array,
    q_labels: _Labels,
    kv_labels: _Labels,
) -> Array | None:
    """Add the gradient of a tile's scores [B, K, G, t, s] to the one of the bias table."""
    if bias_table is None or gradient is None:
        return None
    bias, pullback = jax.vjp(
        lambda table: _tile_bias(config, table, q_labels, kv_labels), bias_table.astype(jnp.float32)
    )
    d_bias = d_scores.reshape(d_scores.shape[0], -1, *d_scores.shape[3:])  # [B, H, t, s]
    d_bias = d_bias.sum(0, keepdims=True) if bias.shape[0] == 1 else d_bias
    return gradient + pullback(d_bias)[0]


def _has_visible(config: _TileConfig, q_labels: _Labels, kv_labels: _Labels) -> Array:
    """Return whether a tile may have a visible key, bool []; false only if it has none."""
    assert kv_labels.valid is not None
    visible = kv_labels.valid.any()
    if config.is_causal and q_labels.positions is not None and kv_labels.positions is not None:
        first_key = jnp.where(kv_labels.valid, kv_labels.positions, FAR).min()
        visible &= q_labels.positions.max() >= first_key
        if config.window != FULL_ATTENTION:
            last_key = jnp.where(kv_labels.valid, kv_labels.positions, -FAR).max()
            visible &= q_labels.positions.min() - last_key < config.window
    if q_labels.segment_ids is not None and kv_labels.segment_ids is not None:
        visible &= q_labels.segment_ids.max() >= kv_labels.segment_ids.min()
        visible &= q_labels.segment_ids.min() <= kv_labels.segment_ids.max()
    return visible


def _einsum(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
