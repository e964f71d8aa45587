"""Queries and keys of attention in tiles: their sizes, labels and padding.

Axes: B rows, T queries, S keys, H query heads, K key and value heads, G = H / K query heads of a group, E width of
queries and keys, V width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from prepcli.models.architecture import FULL_ATTENTION, ArchConfig
from prepcli.models.layer_config import Alibi, RelativePositionBias
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.dropout import AttentionDropout, QueryDropout
from trainer.nn.token_chunks import pad_tokens, unpad_tokens

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
    """The inputs with a gradient, or their gradients. T and S are multiples of the tile sizes.

    Attributes:
        q: Queries [B, T, K, G, E].
        k: Keys [B, S, K, E].
        v: Values [B, S, K, V].
        bias_table: Parameters of the score bias, or the slopes of ALiBi.
        sinks: [K, G].
    """

    q: Array
    k: Array
    v: Array
    bias_table: Array | None
    sinks: Array | None


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
    """Add a row axis to all labels and append padding.

    A padding key is not valid, so that no query sees it.
    """
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
