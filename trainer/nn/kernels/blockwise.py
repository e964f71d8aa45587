"""Blockwise attention: scores exist for one tile of queries and keys at a time.

The forward pass is FlashAttention's online softmax (arXiv:2205.14135, algorithm 1). It saves the log-sum-exp of each
query, from which the backward pass computes the probabilities again (arXiv:2307.08691, algorithm 2). Both passes
skip a tile if the ranges of its positions or segments show that it has no visible key. Gradients are summed in
float32.

Within the loops tiles are head-major: each product then multiplies contiguous matrices, and transposes at most the
smaller operand or the result.

Dropout multiplies the probabilities P by a mask M of elements 0 or 1 / (1 - rate): the output is O = (P * M) V. The
forward pass applies M to the weights of the values, not to the normalizer. With dA = dO V^T, the gradient of P * M,
the gradient of the scores is P * (dA * M - r) with r = sum_s P * (dA * M) = sum_s (P * M) * dA. For each query this is
dO . O, as without dropout.

A sink is the score of one more key, without a value. The forward pass starts the softmax of each query with it. Its
gradient is P * (0 - r) summed over all queries, for its probability P.

Axes: B rows, T queries, S keys, H query heads, K key and value heads, G = H / K query heads of a group, E width of
queries and keys, V width of values, N tiles of queries or keys, t queries and s keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from prepcli.models.activation_memory import chunk_length
from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig
from prepcli.models.layer_config import Alibi, RelativePositionBias
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention_mask import KV, AttentionMask, ScoreBias
from trainer.nn.dropout import AttentionDropout, QueryDropout
from trainer.nn.model_spec import AttentionOptions, name_activation
from trainer.nn.token_chunks import join_chunks, pad_tokens, split_chunks, unpad_tokens

# Beyond all positions, which are below 2^30 so that differences of two fit into int32.
FAR = 1 << 30
# Position and segment of padding. They differ, so that padding queries do not match padding keys.
Q_PADDING = -1
KV_PADDING = -2


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Static settings of a call: tile sizes, scaling of scores, and the rule of visible keys.

    With `is_partial` the keys are only a part of the visible keys. Outputs and gradients are then float32, because
    the caller merges them over all parts.
    """

    q_size: int
    kv_size: int
    scale: float
    softcap: float
    window: int
    is_causal: bool
    bias_config: RelativePositionBias | Alibi | None
    sharding: ShardingContext
    is_partial: bool = False


class Labels(NamedTuple):
    """Positions and segments of queries or keys, which keys are valid, and the dropout of queries.

    All are arrays [B or 1, T or S], or [B, T, H] in the dropout, or None.
    """

    positions: Array | None = None
    segment_ids: Array | None = None
    valid: Array | None = None
    dropout: QueryDropout | None = None


class Constants(NamedTuple):
    """The inputs without a gradient: labels, the layer's score scale, and attention dropout."""

    q_labels: Labels
    kv_labels: Labels
    score_scale: Array  # float32 []
    dropout: AttentionDropout | None = None


class AttentionInputs(NamedTuple):
    """The inputs with a gradient, or their gradients. T and S are multiples of the tile sizes."""

    q: Array  # Queries [B, T, K, G, E]
    k: Array  # Keys [B, S, K, E]
    v: Array  # Values [B, S, K, V]
    bias_table: Array | None  # Parameters of the score bias, or the slopes of ALiBi
    sinks: Array | None  # [K, G]


TileFunction = Callable[[AttentionInputs, Constants], Array]


def tile_config(
    arch_config: ArchConfig, mask: AttentionMask, *, q_size: int, kv_size: int
) -> TileConfig:
    """Return the static settings of a call with tiles of these sizes."""
    return TileConfig(
        q_size=q_size,
        kv_size=kv_size,
        scale=arch_config.attn_scale,
        softcap=arch_config.attn_logit_softcap,
        window=mask.window,
        is_causal=mask.is_causal,
        bias_config=None if mask.bias is None else mask.bias.config,
        sharding=ShardingContext() if mask.bias is None else mask.bias.sharding,
    )


def attend_in_tiles(
    attend: TileFunction,
    q: Array,
    kv: KV,
    mask: AttentionMask,
    config: TileConfig,
    *,
    num_shards: int = 1,
) -> Array:
    """Pad queries and keys to whole tiles, attend, and remove the padding.

    Args:
        attend: Attention of padded arrays. Its result is [B, T, K, G, V].
        q: Queries [B, T, H, E].
        kv: Keys [B, S, K, E] and values [B, S, K, V].
        mask: Visible keys, score bias, sinks, dropout and the layer's score scale.
        config: Sizes of tiles.
        num_shards: Number of shards of T and S on the mesh. Each shard is padded to whole tiles.

    Returns:
        [B, T, H, V].
    """
    b, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = kv.keys.shape[1:3]
    # e.g. 10 queries of a shard in tiles of 4 get 2 more
    q_padding = -(num_queries // num_shards) % config.q_size
    kv_padding = -(num_keys // num_shards) % config.kv_size
    pad_q = partial(pad_tokens, count=q_padding, num_shards=num_shards)
    pad_kv = partial(pad_tokens, count=kv_padding, num_shards=num_shards)
    valid = mask.kv_valid
    if valid is None:
        valid = jnp.ones((1, num_keys), bool)
    q_labels = _pad_labels(Labels(mask.q_positions, mask.q_segment_ids), pad_q, Q_PADDING)
    kv_labels = Labels(mask.kv_positions, mask.kv_segment_ids, valid)
    kv_labels = _pad_labels(kv_labels, pad_kv, KV_PADDING)
    score_scale = mask.layer_score_scale
    if score_scale is None:
        score_scale = jnp.float32(1)
    constants = Constants(q_labels, kv_labels, score_scale, mask.dropout)
    grouped_q = q.reshape(b, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    bias_table = None if mask.bias is None else mask.bias.table
    sinks = None if mask.sinks is None else mask.sinks.reshape(grouped_q.shape[2:4])
    inputs = AttentionInputs(
        q=pad_q(grouped_q),
        k=pad_kv(kv.keys),
        v=pad_kv(kv.values),
        bias_table=bias_table,
        sinks=sinks,
    )
    output = unpad_tokens(attend(inputs, constants), q_padding, num_shards=num_shards)
    return output.reshape(*q.shape[:-1], kv.values.shape[-1])


def _pad_labels(labels: Labels, pad: Callable[..., Array], padding_id: int) -> Labels:
    """Add a row axis to all labels and append padding. A padding key is not valid, so that no query sees it."""
    return Labels(
        _pad_label(labels.positions, pad, padding_id),
        _pad_label(labels.segment_ids, pad, padding_id),
        _pad_label(labels.valid, pad, False),
    )


def _pad_label(label: Array | None, pad: Callable[..., Array], fill: int | bool) -> Array | None:
    """Return a label as [B or 1, T], with padding."""
    if label is None:
        return None
    if label.ndim == 1:
        label = label[None]
    return pad(label, fill=fill)


def has_visible(config: TileConfig, q_labels: Labels, kv_labels: Labels) -> Array:
    """Return whether a tile or shard may have a visible key, bool [].

    Only the ranges of positions and segments are compared. False means that no key is visible, true
    that one may be.
    """
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


# The initial maximum of the scores of a query. It is finite, so that no difference of maxima is nan.
LOWEST = -1e30


class _SoftmaxState(NamedTuple):
    """The softmax of the queries of a tile over the keys seen so far."""

    weighted_sum: Array  # Values weighted by exp(score - maximum), float32 [B, K, G, t, V]
    maximum: Array  # Largest score [B, K, G, t]
    normalizer: Array  # Sum of exp(score - maximum) [B, K, G, t]


class Residuals(NamedTuple):
    """The values that the backward pass needs.

    `output` is [B, T, K, G, V]. `log_normalizer` [B, T, K, G] is the log-sum-exp of the scores over keys and sink.
    """

    inputs: AttentionInputs
    constants: Constants
    output: Array
    log_normalizer: Array


def blockwise_attention(
    q: Array, kv: KV, arch_config: ArchConfig, mask: AttentionMask, options: AttentionOptions
) -> Array:
    """Compute softmax(q k^T * scale) v with memory linear in the lengths.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys [B, S, K, E] and values [B, S, K, V]. K divides H.
        arch_config: `attn_scale` and `attn_logit_softcap`.
        mask: Visible keys, score bias, sinks, dropout and the layer's score scale.
        options: Sizes of tiles. Lengths need not be multiples of them.

    Returns:
        [B, T, H, V] in the dtype of the values. The output of a query without visible keys is 0.
    """
    config = tile_config(
        arch_config,
        mask,
        q_size=chunk_length(options.q_chunk_size, q.shape[1]),
        kv_size=chunk_length(options.k_chunk_size, kv.keys.shape[1]),
    )
    return attend_in_tiles(partial(_attend, config), q, kv, mask, config)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: TileConfig, inputs: AttentionInputs, constants: Constants) -> Array:
    """Compute the output [B, T, K, G, V]."""
    return forward(config, inputs, constants)[0]


def forward(
    config: TileConfig, inputs: AttentionInputs, constants: Constants
) -> tuple[Array, Residuals]:
    """Compute the output [B, T, K, G, V], and the residuals of the backward pass."""
    # Without the barrier a scan over layers would compute the masks of all tiles once, and keep
    # them: an array [T, S], which blockwise attention exists to avoid.
    tiled_q, labels = lax.optimization_barrier((inputs.q, constants))
    # q_tiles: [N, B, t, K, G, E], k_tiles and v_tiles: [N, B, K, s, E]
    cut_q = partial(split_chunks, chunk_size=config.q_size)
    cut_kv = partial(split_chunks, chunk_size=config.kv_size)
    q_tiles = jax.tree.map(cut_q, (tiled_q, _q_labels(labels)))
    k_tiles = _head_major(cut_kv(inputs.k))
    v_tiles = _head_major(cut_kv(inputs.v))
    kv_label_tiles = jax.tree.map(cut_kv, labels.kv_labels)

    # Ring attention adds outputs of several shards, so it rounds to `v.dtype` only after the last.
    dtype = jnp.float32 if config.is_partial else inputs.v.dtype

    def run_q_tile(_: None, q_tile: tuple[Array, Labels]) -> tuple[None, tuple[Array, Array]]:
        # [B, t, K, G, E] -> [B, K, G, t, E]
        queries = _head_major(q_tile[0], 1)
        q_labels = q_tile[1]
        state = _initial_softmax(queries, inputs)

        def run_kv_tile(index: Array, state: _SoftmaxState) -> _SoftmaxState:
            kv_labels = _take_tile(kv_label_tiles, index)

            def update(state: _SoftmaxState) -> _SoftmaxState:
                # A tile without a visible key is not copied.
                keys, values = _take_tile((k_tiles, v_tiles), index)
                mask = _tile_mask(config, labels, q_labels, kv_labels)
                scores, _ = _masked_scores(config, queries, keys, inputs.bias_table, mask)
                drop = partial(_drop, q_labels, kv_labels)
                # Online softmax (arXiv:2205.14135, algorithm 1): with a new maximum m', earlier terms
                # exp(score - m) become exp(score - m') by a factor exp(m - m'). No exponent is above 0.
                # Example: the scores 1 and then 3, each in a tile. After the first m = 1 and the normalizer is
                # exp(0) = 1. After the second m' = 3 and the normalizer is 1 * exp(-2) + exp(0) = 1.135.
                maximum = jnp.maximum(state.maximum, scores.max(-1))
                weights = jnp.exp(scores - maximum[..., None])
                rescale = jnp.exp(state.maximum - maximum)
                kept = drop(weights).astype(values.dtype)
                return _SoftmaxState(
                    state.weighted_sum * rescale[..., None]
                    + _einsum("bkgts,bkse->bkgte", kept, values),
                    maximum,
                    # Without dropout: it acts on the probabilities, which the normalizer defines.
                    state.normalizer * rescale + weights.sum(-1),
                )

            return lax.cond(
                has_visible(config, q_labels, kv_labels), update, lambda same: same, state
            )

        state = lax.fori_loop(0, len(k_tiles), run_kv_tile, state)
        # A query without visible keys has a sum of 0 and a normalizer of 0: its output is 0 / 1.
        normalizer = jnp.where(state.normalizer == 0, 1.0, state.normalizer)
        output = (state.weighted_sum / normalizer[..., None]).astype(dtype)
        # L = log sum_s exp(score_s) = m + log sum_s exp(score_s - m), for the maximum m
        log_normalizer = state.maximum + jnp.log(normalizer)
        # [B, K, G, t, E] -> [B, t, K, G, E]
        return None, (jnp.moveaxis(output, 3, 1), jnp.moveaxis(log_normalizer, 3, 1))

    _, tiles = lax.scan(run_q_tile, None, q_tiles)
    output, log_normalizer = (
        name_activation(join_chunks(array), "attention_output") for array in tiles
    )
    return output, Residuals(inputs, constants, output, log_normalizer)


def _initial_softmax(queries: Array, inputs: AttentionInputs) -> _SoftmaxState:
    """Return the softmax of the queries [B, K, G, t, E] of a tile before the first key."""
    shape = queries.shape[:-1]
    weighted_sum = jnp.zeros((*shape, inputs.v.shape[-1]), jnp.float32)
    if inputs.sinks is None:
        return _SoftmaxState(
            weighted_sum, jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)
        )
    # The sink [K, G] is the largest score so far: exp(sink - sink) = 1.
    maximum = jnp.broadcast_to(inputs.sinks.astype(jnp.float32)[..., None], shape)
    return _SoftmaxState(weighted_sum, maximum, jnp.ones(shape, jnp.float32))


class _TileGradients(NamedTuple):
    """Float32 gradients: q [B, K, G, t, E] of one tile, k and v [N, B, K, E, s] of all tiles, and the bias table."""

    q: Array
    k_tiles: Array
    v_tiles: Array
    bias_table: Array | None


def backward(
    config: TileConfig, saved: Residuals, output_gradient: Array
) -> tuple[AttentionInputs, None]:
    """Compute the gradients of the inputs, and None for the constants."""
    output_gradient, labels = lax.optimization_barrier((output_gradient, saved.constants))
    inputs = saved.inputs
    table = inputs.bias_table
    row_dots = gradient_dots(saved, output_gradient)
    cut_q = partial(split_chunks, chunk_size=config.q_size)
    cut_kv = partial(split_chunks, chunk_size=config.kv_size)
    q_tiles = jax.tree.map(
        cut_q, (inputs.q, _q_labels(labels), output_gradient, row_dots, saved.log_normalizer)
    )
    kv_tiles = _head_major(cut_kv(inputs.k)), _head_major(cut_kv(inputs.v))
    kv_label_tiles = jax.tree.map(cut_kv, labels.kv_labels)
    dtype = jnp.float32 if config.is_partial else inputs.q.dtype

    def run_q_tile(
        sums: tuple[Array, Array, Array | None], q_tile: tuple[Any, ...]
    ) -> tuple[Any, Array]:
        queries, q_labels, d_output, row_dot, log_normalizer = q_tile
        queries = _head_major(queries, 1)
        d_output = _head_major(d_output, 1)
        row_dot = _head_major(row_dot[..., None], 1)
        log_normalizer = _head_major(log_normalizer[..., None], 1)
        # [B, K, G, t, E] -> [B, K, E, G, t], once for all keys: on CPUs XLA copies the left operand of a product whose
        # last axis is not the summed one.
        q_columns = jnp.moveaxis(queries, -1, 2)
        d_output_columns = jnp.moveaxis(d_output, -1, 2)

        def run_kv_tile(index: Array, gradients: _TileGradients) -> _TileGradients:
            kv_labels = _take_tile(kv_label_tiles, index)

            def update(gradients: _TileGradients) -> _TileGradients:
                keys, values = _take_tile(kv_tiles, index)
                mask = _tile_mask(config, labels, q_labels, kv_labels)
                scores, d_scores_d_dots = _masked_scores(config, queries, keys, table, mask)
                # arXiv:2307.08691, algorithm 2, with the dropout of the module's docstring:
                # P = exp(scores - L), dP = (dO V^T) * M, dS = P * (dP - r)   [B, K, G, t, s]
                probabilities = jnp.exp(scores - log_normalizer)
                drop = partial(_drop, q_labels, kv_labels)
                d_probabilities = drop(_einsum("bkgte,bkse->bkgts", d_output, values))
                d_scores = probabilities * (d_probabilities - row_dot)
                # scores = f(q k^T) with the scale and the softcap in f: d_dots = dS * f'(q k^T),
                # dQ = d_dots K, dK = d_dots^T Q, dV = (P * M)^T dO
                d_dots = (d_scores * d_scores_d_dots).astype(queries.dtype)
                d_keys = _einsum("bkegt,bkgts->bkes", q_columns, d_dots)
                kept = drop(probabilities).astype(d_output.dtype)
                d_values = _einsum("bkegt,bkgts->bkes", d_output_columns, kept)
                return _TileGradients(
                    gradients.q + _einsum("bkgts,bkse->bkgte", d_dots, keys),
                    gradients.k_tiles.at[index].add(d_keys),
                    gradients.v_tiles.at[index].add(d_values),
                    _add_bias_gradient(gradients.bias_table, config, table, d_scores, mask),
                )

            return lax.cond(
                has_visible(config, q_labels, kv_labels), update, lambda same: same, gradients
            )

        # The gradient of a tile of queries is complete after its keys. The gradients of keys, values
        # and the table are sums over all tiles of queries, so they are the carry of the outer scan.
        initial = _TileGradients(jnp.zeros(queries.shape, jnp.float32), *sums)
        gradients = lax.fori_loop(0, len(kv_tiles[0]), run_kv_tile, initial)
        return gradients[1:], jnp.moveaxis(gradients.q, 3, 1).astype(dtype)

    d_table = None if table is None else jnp.zeros(table.shape, jnp.float32)
    zeros = *map(_zero_columns, kv_tiles), d_table
    (dk_tiles, dv_tiles, d_table), dq_tiles = lax.scan(run_q_tile, zeros, q_tiles)
    if table is not None and not config.is_partial:
        d_table = d_table.astype(table.dtype)
    dk = _join_columns(dk_tiles).astype(dtype)
    dv = _join_columns(dv_tiles).astype(dtype)
    d_sinks = sink_gradient(saved, row_dots)
    return AttentionInputs(join_chunks(dq_tiles), dk, dv, d_table, d_sinks), None


def gradient_dots(saved: Residuals, output_gradient: Array) -> Array:
    """Compute r = dO . O of each query, [B, T, K, G]: the sum over all keys of P * dP, without another pass."""
    products = saved.output.astype(jnp.float32) * output_gradient.astype(jnp.float32)
    # Sum over [B, T, H, V]: XLA on CPUs is 15 times slower next to an axis of one group.
    shape = products.shape
    return products.reshape(*shape[:2], -1, shape[-1]).sum(-1).reshape(shape[:-1])


def sink_gradient(saved: Residuals, row_dots: Array) -> Array | None:
    """Compute the gradient of the sinks [K, G] from dO . O of each query [B, T, K, G]. None without sinks.

    dS = P * (dP - r) with dP = 0, because a sink has no value, and P = exp(sink - L).
    """
    sinks = saved.inputs.sinks
    if sinks is None:
        return None
    probabilities = jnp.exp(sinks.astype(jnp.float32) - saved.log_normalizer)
    return -(probabilities * row_dots).sum((0, 1)).astype(sinks.dtype)


_attend.defvjp(forward, backward)


def _head_major(x: Array, token_axis: int = 2) -> Array:
    """Move the token axis before the last one: [N, B, s, K, E] to [N, B, K, s, E], or [B, t, K, G, E] with axis 1."""
    return jnp.moveaxis(x, token_axis, -2)


def _take_tile(tiles: Any, index: Array) -> Any:
    """Return one tile of a tree of arrays [N, ...]."""
    return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, index, keepdims=False), tiles)


def _zero_columns(tiles: Array) -> Array:
    """Return zeros [N, B, K, E, s] for tiles [N, B, K, s, E]."""
    *axes, kv_size, width = tiles.shape
    return jnp.zeros((*axes, width, kv_size), jnp.float32)


def _join_columns(tiles: Array) -> Array:
    """Join tiles [N, B, K, E, s] to [B, S, K, E]."""
    return join_chunks(jnp.moveaxis(tiles, -1, 2))


def _masked_scores(
    config: TileConfig, queries: Array, keys: Array, bias_table: Array | None, mask: AttentionMask
) -> tuple[Array, Array]:
    """Compute the scores of a tile, float32 [B, K, G, t, s], and their derivative by the dot products of q and k."""
    # Scores of keys that are not visible are -inf.
    assert mask.layer_score_scale is not None
    scale = config.scale * mask.layer_score_scale
    scores = _einsum("bkgte,bkse->bkgts", queries, keys) * scale
    derivative = scale
    if config.softcap != NO_SOFTCAP:
        # d/dx softcap * tanh(x / softcap) = 1 - tanh(x / softcap)^2
        ratio = jnp.tanh(scores / config.softcap)
        scores = config.softcap * ratio
        derivative = scale * (1.0 - jnp.square(ratio))
    if bias_table is not None:
        scores = scores + _tile_bias(config, bias_table, mask).reshape(-1, *scores.shape[1:])
    if (visible := mask.materialize()) is not None:
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    return scores, derivative


def _tile_mask(
    config: TileConfig, constants: Constants, q_labels: Labels, kv_labels: Labels
) -> AttentionMask:
    """Return the mask of a tile, which has the same rule of visible keys as whole sequences."""
    return AttentionMask(
        q_positions=q_labels.positions,
        kv_positions=kv_labels.positions,
        kv_valid=kv_labels.valid,
        q_segment_ids=q_labels.segment_ids,
        kv_segment_ids=kv_labels.segment_ids,
        layer_score_scale=constants.score_scale,
        window=config.window,
        is_causal=config.is_causal,
    )


def _q_labels(constants: Constants) -> Labels:
    """Return the labels of the queries with their dropout."""
    labels = constants.q_labels
    dropout = constants.dropout
    if dropout is None:
        return labels
    assert labels.positions is not None
    # A key costs about 110 operations, so keys are derived once here and not in each tile.
    return labels._replace(dropout=dropout.for_queries(labels.positions))


def _drop(q_labels: Labels, kv_labels: Labels, x: Array) -> Array:
    """Drop elements of the probabilities of a tile [B, K, G, t, s], and scale the rest."""
    if q_labels.dropout is None:
        return x
    assert kv_labels.positions is not None
    return q_labels.dropout.apply(x, kv_labels.positions)


def _tile_bias(config: TileConfig, bias_table: Array, mask: AttentionMask) -> Array:
    """Compute the score bias of a tile [B or 1, H, t, s]."""
    assert config.bias_config is not None
    assert mask.q_positions is not None
    assert mask.kv_positions is not None
    bias = ScoreBias(bias_table, config.bias_config, config.sharding)
    return bias.materialize(mask.q_positions, mask.kv_positions)


def _add_bias_gradient(
    gradient: Array | None,
    config: TileConfig,
    bias_table: Array | None,
    d_scores: Array,
    mask: AttentionMask,
) -> Array | None:
    """Add the gradient of a tile's scores [B, K, G, t, s] to the one of the bias table."""
    if bias_table is None or gradient is None:
        return None
    # ALiBi's slopes are no parameters.
    if isinstance(config.bias_config, Alibi):
        return gradient

    def compute_bias(table: Array) -> Array:
        return _tile_bias(config, table, mask)

    bias, pullback = jax.vjp(compute_bias, bias_table.astype(jnp.float32))
    # [B, K, G, t, s] -> [B, H, t, s], summed over rows if all rows share one bias [1, H, t, s]
    d_bias = d_scores.reshape(d_scores.shape[0], -1, *d_scores.shape[3:])
    if bias.shape[0] == 1:
        d_bias = d_bias.sum(0, keepdims=True)
    return gradient + pullback(d_bias)[0]


def _einsum(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
