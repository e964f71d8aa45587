"""The inputs of attention apart from hidden states: mask, score bias and encoder output.

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, G = H / K query heads of a
group, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from prepcli.models.architecture import FULL_ATTENTION, NO_CHUNK, LayerKind
from trainer.nn.dropout import AttentionDropout
from trainer.nn.position_encoding import CosSin, ScoreBias

KV_CACHE_DIMS = ("layers", "batch", "seq", "kv_heads", "head_dim")


class KV(NamedTuple):
    """Keys and values [B, S, K, E] of one layer. Keys are normed and rotated."""

    keys: Array
    values: Array


def take_layer(stack: Array, layer: Array) -> Array:
    """Return one layer of a stack on axis 0."""
    return lax.dynamic_index_in_dim(stack, layer, keepdims=False)


class EncoderOutput(NamedTuple):
    """The input of cross-attention.

    Attributes:
        states: The encoder's hidden states [B, S, D]. For decoding with a cache, the keys and values that all decoder
            layers project from them, [layers, B, S, K, E] each, or the keys and values of one layer, [B, S, K, E].
        source_mask: bool [B, S], false for padding. None if no token is padding.
    """

    states: Array | KV
    source_mask: Array | None = None

    def for_layer(self, layer: Array) -> EncoderOutput:
        """Return the input of cross-attention in one decoder layer: its keys and values, and the same mask."""
        assert isinstance(self.states, KV)
        return self._replace(states=KV(*(take_layer(stack, layer) for stack in self.states)))


class Segments(NamedTuple):
    """The documents of packed rows. No token attends to another document of its row.

    Attributes:
        ids: int32 [B, T], the document of each token. 0 for padding.
        positions: int32 [B, T], the position of each token in its document, for rotary and learned positions.
    """

    ids: Array
    positions: Array


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The keys that each query of a layer attends to, and the adjustments of queries, keys and scores.

    A query attends to valid keys of its own segment. If the mask is causal and has positions, these are keys up to the
    query's position, within `window` positions.

    Attributes:
        q_positions: int32 [T], or [B, T] if rows differ.
        kv_positions: int32 [S], or [B, S] if rows differ.
        kv_valid: bool [B, S], false for padding, which no query attends to.
        q_segment_ids: int32 [B, T], the document of each query. None if a row is one document.
        kv_segment_ids: int32 [B, S], the document of each key. None if a row is one document.
        bias: Added to scores. Requires positions.
        cos_sin: Rotary cosine and sine of queries and of their own keys.
        layer_score_scale: float32 [], a factor of this layer's scores in addition to `ArchConfig.attn_scale`.
        dropout: Dropout of the probabilities. Requires positions. None means no dropout.
        sinks: [H], the score of a key without a value that each query of a head sees. None means no sinks.
        window: Number of positions that a query attends to, itself included. `FULL_ATTENTION` means no limit.
        chunk: Number of positions of a chunk, outside of which a query sees no key. NO_CHUNK means no limit.
        document_positions: int32 [B, T], the positions of packed documents, in which chunks begin at 0.
        is_causal: Whether positions limit the visible keys. False in an encoder.
        window_kv_positions: int32 [B, S] by window, positions of the keys of layers with that window, if a KV cache
            keeps other keys for them. Negative for a key that is not valid. Other layers have `kv_positions`.
    """

    q_positions: Array | None = None
    kv_positions: Array | None = None
    kv_valid: Array | None = None
    q_segment_ids: Array | None = None
    kv_segment_ids: Array | None = None
    bias: ScoreBias | None = None
    cos_sin: CosSin | None = None
    layer_score_scale: Array | None = None
    dropout: AttentionDropout | None = None
    sinks: Array | None = None
    window: int = FULL_ATTENTION
    chunk: int = NO_CHUNK
    document_positions: Array | None = None
    is_causal: bool = True
    window_kv_positions: Mapping[int, Array] | None = None

    def for_layer(
        self, kind: LayerKind, cos_sin: CosSin | None, layer_score_scale: Array | None
    ) -> AttentionMask:
        """Return the mask of a layer with its window, chunks, rotary embedding and score scale."""
        window = kind.window
        mask = replace(
            self,
            window=window,
            chunk=kind.chunk,
            cos_sin=cos_sin,
            layer_score_scale=layer_score_scale,
        )
        if (kv_positions := (self.window_kv_positions or {}).get(window)) is None:
            return mask
        return replace(mask, kv_positions=kv_positions, kv_valid=kv_positions >= 0)

    def with_chunk_segments(self, num_rows: int) -> AttentionMask:
        """Return the mask with a segment per chunk of positions. A chunk with two documents has two segments."""
        if self.chunk == NO_CHUNK or self.q_positions is None or self.kv_positions is None:
            return self
        q_positions = self.q_positions
        kv_positions = self.kv_positions
        if self.document_positions is not None:
            q_positions = kv_positions = self.document_positions
        q_ids = q_positions // self.chunk
        kv_ids = kv_positions // self.chunk
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            # E.g. 10 keys in chunks of 4: a row has at most 3 chunks, and chunk 1 of segment 2 gets the id 7.
            chunks_per_row = -(-kv_positions.shape[-1] // self.chunk)
            q_ids = q_ids + chunks_per_row * self.q_segment_ids
            kv_ids = kv_ids + chunks_per_row * self.kv_segment_ids
        return replace(
            self,
            q_segment_ids=jnp.broadcast_to(q_ids, (num_rows, q_ids.shape[-1])),
            kv_segment_ids=jnp.broadcast_to(kv_ids, (num_rows, kv_ids.shape[-1])),
        )

    def materialize(self) -> Array | None:
        """Compute the mask as bool [T, S] or [B, T, S], true for visible keys. None if all keys are visible."""
        visible = None
        if self.is_causal and self.q_positions is not None and self.kv_positions is not None:
            distance = self.q_positions[..., :, None] - self.kv_positions[..., None, :]
            visible = distance >= 0
            if self.window != FULL_ATTENTION:
                visible = visible & (distance < self.window)
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            visible = _combine_masks(
                visible, self.q_segment_ids[:, :, None] == self.kv_segment_ids[:, None, :]
            )
        if self.kv_valid is not None:
            visible = _combine_masks(visible, self.kv_valid[:, None, :])
        return visible

    def score_bias(self) -> Array | None:
        """Compute the score bias, float32 [H, T, S] or [B, H, T, S]. None if there is none."""
        if self.bias is None:
            return None
        assert self.q_positions is not None
        assert self.kv_positions is not None
        return self.bias.materialize(self.q_positions, self.kv_positions)

    def drop(self, x: Array) -> Array:
        """Drop elements of the probabilities [B, K, G, T, S], and scale the rest."""
        if self.dropout is None:
            return x
        assert self.q_positions is not None
        assert self.kv_positions is not None
        return self.dropout.for_queries(self.q_positions).apply(x, self.kv_positions)


def _combine_masks(visible: Array | None, other: Array) -> Array:
    """Return the keys visible in both masks. None means all keys."""
    if visible is None:
        return other
    return visible & other


def causal_mask(positions: Array, segments: Segments | None = None) -> AttentionMask:
    """Return the causal mask of tokens at positions [T] of a row.

    Each token attends to itself and all earlier tokens, or only to its own segment if there are segments. Positions of
    the row order the tokens of a segment as positions in the segment do, and have the same distances.
    """
    if segments is None:
        return AttentionMask(positions, positions)
    return AttentionMask(
        positions,
        positions,
        q_segment_ids=segments.ids,
        kv_segment_ids=segments.ids,
        document_positions=segments.positions,
    )
