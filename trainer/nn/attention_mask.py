"""The inputs of attention apart from hidden states: rotary embeddings, score bias, mask and encoder output.

Frequencies are computed in float32 in the order of operations of transformers (`modeling_rope_utils.py`).

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, G = H / K query heads of a group,
E head width, R rotated elements of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from prepcli.models.architecture import FULL_ATTENTION, NO_CHUNK, LayerKind
from prepcli.models.layer_config import Alibi, RelativePositionBias
from prepcli.models.rope_config import Rope
from trainer.distributed.sharding import ShardingContext
from trainer.nn.dropout import AttentionDropout


class CosSin(NamedTuple):
    """The rotation of queries and keys by position."""

    cosine: Array  # Rotary cosine, float32 [T, R / 2], or [B, T, R / 2] if rows differ
    sine: Array  # Like `cosine`
    # Factor of queries, float32 [T, 1] or [B, T, 1]. None means 1.
    query_scale: Array | None = None


def inverse_frequencies(rope: Rope, length: int) -> np.ndarray:
    """Compute the rotation of each pair of elements, in radians per position.

    Args:
        rope: The rotary embedding.
        length: Length of the sequence, which changes the frequencies of `dynamic` and `longrope`.

    Returns:
        float32 [R / 2].
    """
    default = _default_inverse_frequencies(rope.theta, rope.rotary_dim)
    match rope.rope_type:
        case "linear":
            return default / np.float32(rope.factor)
        case "dynamic":
            return _dynamic_frequencies(rope, length)
        case "llama3":
            return _llama3_frequencies(rope, default)
        case "yarn":
            return _yarn_frequencies(rope, default)
        case "longrope":
            factors = (
                rope.short_factors if length <= rope.original_max_positions else rope.long_factors
            )
            scaled = np.array(factors, np.float32) * _theta_powers(rope.theta, rope.rotary_dim)
            return (np.float32(1.0) / scaled).astype(np.float32)
        case "proportional":
            turns = np.arange(len(default)) < rope.num_turning_pairs
            return default * turns.astype(np.float32) / np.float32(rope.factor)
    return default


def rotary_cos_sin(rope: Rope, positions: Array) -> CosSin:
    """Compute the rotary cosine and sine of whole rows.

    Args:
        rope: The rotary embedding. Scaling by length uses the length of the row.
        positions: int32 [T], the positions 0 to T - 1 in any order, or [B, T] if rows differ, e.g. for packed
            documents.
    """
    frequencies = inverse_frequencies(rope, positions.shape[-1])
    positions = positions.astype(jnp.float32)[..., None]
    return _scaled_cos_sin(rope, positions, frequencies)


def rotary_cos_sin_at(rope: Rope, positions: Array, lengths: Array, max_length: int) -> CosSin:
    """Compute the rotary cosine and sine of given positions, in rows of different lengths.

    Args:
        rope: The rotary embedding.
        positions: int32 [B, T].
        lengths: int32 [B], the number of tokens of each row so far.
        max_length: Upper bound of `lengths`.
    """
    shortest = rope.original_max_positions
    # frequencies are constant from this length on
    longest = {"longrope": shortest + 1, "dynamic": max_length}.get(rope.rope_type, 0)
    # Lengths up to `shortest` share one row of the table, e.g. shortest = 4 and longest = 6: rows of
    # the lengths 4, 5 and 6, and a row of 5 tokens takes row 5 - 4 = 1. [lengths, R / 2]
    by_length = np.stack(
        [
            inverse_frequencies(rope, length)
            for length in range(shortest, max(longest, shortest) + 1)
        ]
    )
    row_frequencies = jnp.asarray(by_length)[jnp.clip(lengths - shortest, 0, len(by_length) - 1)]
    positions = positions.astype(jnp.float32)[..., None]
    return _scaled_cos_sin(rope, positions, row_frequencies[:, None])


def _scaled_cos_sin(rope: Rope, positions: Array, frequencies: Array | np.ndarray) -> CosSin:
    """Compute cosine and sine scaled by the attention factor, and the factor of queries, of positions [..., 1]."""
    angles = positions * frequencies
    cosine = jnp.cos(angles) * rope.attention_factor
    sine = jnp.sin(angles) * rope.attention_factor
    if rope.is_reversed:
        sine = -sine
    scale = rope.query_scale
    if scale is None:
        return CosSin(cosine, sine)
    # Slots before a row's first token have negative positions, whose logarithm would not be finite.
    shifted = jnp.maximum(positions, 0) + scale.offset
    steps = jnp.floor(shifted / scale.step_length)
    return CosSin(cosine, sine, 1 + scale.beta * jnp.log1p(steps))


def apply_rotary(x: Array, cosine: Array, sine: Array, is_interleaved: bool = False) -> Array:
    """Rotate the first R elements of each head (RoPE, arXiv:2104.09864). The rest is unchanged.

    Args:
        x: Queries or keys [B, T, H, E].
        cosine: [T, R / 2] or [B, T, R / 2].
        sine: Like `cosine`.
        is_interleaved: Whether elements 2i and 2i + 1 form a pair. Otherwise elements i and i + R / 2 do.

    Returns:
        [B, T, H, E] in the dtype of `x`.
    """
    # A pair of elements rotates as a point of the plane, by the angle of its frequency and position:
    # (a, b) -> (a cos - b sin, b cos + a sin)
    cos = cosine.astype(x.dtype)[..., None, :]
    sin = sine.astype(x.dtype)[..., None, :]
    rotated, rest = jnp.split(x, [2 * cosine.shape[-1]], axis=-1)
    if is_interleaved:
        first = rotated[..., 0::2]
        second = rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    if is_interleaved:
        joined = jnp.stack(pair, axis=-1).reshape(rotated.shape)
    else:
        joined = jnp.concatenate(pair, axis=-1)
    if rest.shape[-1] == 0:
        return joined
    return jnp.concatenate([joined, rest], axis=-1)


def sinusoidal_positions(positions: Array, width: int) -> Array:
    """Compute the embedding of positions by sines and cosines (arXiv:1706.03762, section 3.5), float32 [..., D].

    The first half has sin(p * 10000^(-i / (D / 2 - 1))) for i = 0 to D / 2 - 1, the second half the
    cosines, as in tensor2tensor and fairseq.

    Args:
        positions: int32 [...].
        width: D. If it is odd, the last element is 0.
    """
    half = width // 2
    exponents = np.arange(half, dtype=np.float32) * np.float32(-math.log(10_000) / (half - 1))
    angles = positions.astype(jnp.float32)[..., None] * np.exp(exponents)
    padding = jnp.zeros((*positions.shape, width % 2), jnp.float32)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles), padding], axis=-1)


def relative_position_bias(
    table: Array, q_positions: Array, kv_positions: Array, bias_config: RelativePositionBias
) -> Array:
    """Look up the score bias of each query and key by their distance (T5, arXiv:1910.10683).

    Args:
        table: Bias by bucket [buckets, H].
        q_positions: [T], or [B, T] if rows differ.
        kv_positions: [S], or [B, S] if rows differ.
        bias_config: Buckets of distances.

    Returns:
        float32 [H, T, S], or [B, H, T, S].
    """
    by_distance = table.astype(jnp.float32)[relative_position_buckets(bias_config)]
    maximum = bias_config.max_distance
    distance = jnp.clip(kv_positions[..., None, :] - q_positions[..., :, None], -maximum, maximum)
    return jnp.moveaxis(by_distance[distance + maximum], -1, -3)


def alibi_bias(slopes: Array, q_positions: Array, kv_positions: Array) -> Array:
    """Compute slope * (key position - query position) for each head (ALiBi, arXiv:2108.12409).

    The softmax cancels the terms that depend on the query only, so that slope * key position is the
    same bias. The difference is smaller and rounds less.

    Args:
        slopes: float32 [H].
        q_positions: [T], or [B, T] if rows differ.
        kv_positions: [S], or [B, S] if rows differ.

    Returns:
        float32 [H, T, S], or [B, H, T, S].
    """
    distance = kv_positions[..., None, None, :] - q_positions[..., None, :, None]
    return slopes[:, None, None] * distance.astype(jnp.float32)


def relative_position_buckets(bias_config: RelativePositionBias) -> np.ndarray:
    """Compute the bucket of each distance, key position minus query position.

    In each direction the first half of the buckets hold one distance each. The width of the second half grows with
    the logarithm of the distance. The logarithm is the exact one rounded to float32, the same on every machine. The
    float32 logarithms of NumPy and torch differ from it by one unit in the last place for some values. transformers
    uses torch's logarithm, which depends on the CPU: a few distances may have the neighbouring bucket there.

    Returns:
        int32 [2 * max_distance + 1], for distances from -max_distance to max_distance. Larger distances share the
        bucket of the largest.
    """
    # bucket(d) = d below E, else E + floor(log(d / E) / log(max / E) * (N - E)), at most N - 1, for
    # N buckets of a direction with E = N / 2 exact ones. T5 has N = 16 and E = 8 in each direction
    # of its encoder, and max = 128: distance 20 is in bucket 8 + floor(0.33 * 8) = 10.
    count = bias_config.num_buckets
    if bias_config.bidirectional:
        count = count // 2
    num_exact = count // 2
    distances = np.arange(bias_config.max_distance + 1)
    ratio = (np.maximum(distances, 1).astype(np.float32) / np.float32(num_exact)).astype(np.float64)
    log_ratio = np.log(ratio).astype(np.float32) / np.float32(
        math.log(bias_config.max_distance / num_exact)
    )
    logarithmic = np.minimum(
        num_exact + (log_ratio * (count - num_exact)).astype(np.int32), count - 1
    )
    backward = np.where(distances < num_exact, distances, logarithmic).astype(np.int32)
    forward = backward[1:] + count if bias_config.bidirectional else np.zeros_like(backward[1:])
    return np.concatenate([backward[::-1], forward])


def _default_inverse_frequencies(theta: float, dim: int) -> np.ndarray:
    """Compute theta ** (-2i / R), float32 [R / 2]."""
    return (np.float32(1.0) / _theta_powers(theta, dim)).astype(np.float32)


def _theta_powers(theta: float, dim: int) -> np.ndarray:
    """Compute theta ** (2i / R), float32 [R / 2]."""
    return np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def _dynamic_frequencies(rope: Rope, length: int) -> np.ndarray:
    """Scale theta with the length beyond the positions of pretraining (dynamic NTK)."""
    # theta' = theta * (s * length / original - (s - 1))^(R / (R - 2)), as in transformers. The exponent
    # stretches the slowest pair by the parenthesis and leaves the fastest unchanged.
    longest = max(length, rope.original_max_positions)
    stretch = np.float64(rope.factor * longest / rope.original_max_positions - (rope.factor - 1))
    theta = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return _default_inverse_frequencies(theta, rope.rotary_dim)


def _llama3_frequencies(rope: Rope, default_frequencies: np.ndarray) -> np.ndarray:
    """Keep high frequencies, divide low ones by the factor, and interpolate between the two (Llama 3.1)."""
    positions = rope.original_max_positions
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    # Wavelength w of a pair, in positions. smooth = (original / w - low) / (high - low) is 0 at
    # w = original / low and 1 at w = original / high: f' = (1 - smooth) * f / s + smooth * f.
    wavelength = 2 * math.pi / default_frequencies
    smooth = (positions / wavelength - low) / (high - low)
    interpolated = (1 - smooth) * default_frequencies / rope.factor + smooth * default_frequencies
    scaled = np.where(wavelength > positions / low, default_frequencies / rope.factor, interpolated)
    return np.where(wavelength < positions / high, default_frequencies, scaled).astype(np.float32)


def _yarn_frequencies(rope: Rope, default_frequencies: np.ndarray) -> np.ndarray:
    """Interpolate on a ramp from kept to divided frequencies (YaRN, arXiv:2309.00071)."""
    # Pair i turns original * theta^(-2i / R) / (2 pi) times. Solved for i, a number of turns is at
    # i = R * log(original / (turns * 2 pi)) / (2 * log(theta)) (section 3.2).
    low, high = (
        rope.rotary_dim
        * math.log(rope.original_max_positions / (turns * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for turns in (rope.high_freq_factor, rope.low_freq_factor)
    )
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.rotary_dim - 1)
    # transformers' guard against a division by zero
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2, dtype=np.float32) - low) / width, 0, 1)
    return (default_frequencies / rope.factor * ramp + default_frequencies * (1 - ramp)).astype(
        np.float32
    )


@dataclass(frozen=True, slots=True)
class ScoreBias:
    """A bias that depends on the positions of a query and a key."""

    table: Array  # Bias by bucket [buckets, H], a parameter, or ALiBi's slopes [1, H], constants
    config: RelativePositionBias | Alibi  # The kind of the bias
    # The device mesh and its rules
    sharding: ShardingContext = field(default_factory=ShardingContext)
    # Bias of all queries and keys, computed once for all layers. None computes it from positions.
    precomputed: Array | None = None

    def materialize(self, q_positions: Array, kv_positions: Array) -> Array:
        """Compute the bias for query positions [T] or [B, T] and key positions [S] or [B, S].

        Returns:
            float32 [H, T, S], or [B, H, T, S] if rows differ.
        """
        if self.precomputed is not None:
            return self.precomputed
        if isinstance(self.config, Alibi):
            bias = alibi_bias(self.table[0], q_positions, kv_positions)
        else:
            bias = relative_position_bias(self.table, q_positions, kv_positions, self.config)
        return self.sharding.constrain(bias, *("batch",) * (bias.ndim - 3), "heads", "seq", "seq")


KV_CACHE_DIMS = ("layers", "batch", "seq", "kv_heads", "head_dim")


class KV(NamedTuple):
    """Keys and values [B, S, K, E] of one layer. Keys are normed and rotated."""

    keys: Array
    values: Array


def take_layer(stack: Array, layer: Array) -> Array:
    """Return one layer of a stack on axis 0."""
    return lax.dynamic_index_in_dim(stack, layer, keepdims=False)


class EncoderOutput(NamedTuple):
    """The input of cross-attention."""

    # The encoder's hidden states [B, S, D]. For decoding with a cache, the keys and values that all decoder
    # layers project from them, [layers, B, S, K, E] each, or the keys and values of one layer, [B, S, K, E].
    states: Array | KV
    source_mask: Array | None = None  # bool [B, S], false for padding. None if no token is padding.

    def for_layer(self, layer: Array) -> EncoderOutput:
        """Return the input of cross-attention in one decoder layer: its keys and values, and the same mask."""
        assert isinstance(self.states, KV)
        return self._replace(states=KV(*(take_layer(stack, layer) for stack in self.states)))


class Segments(NamedTuple):
    """The documents of packed rows. No token attends to another document of its row."""

    ids: Array  # int32 [B, T], the document of each token. 0 for padding.
    # int32 [B, T], the position of each token in its document, for rotary and learned positions
    positions: Array


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The keys that each query of a layer attends to, and the adjustments of queries, keys and scores.

    A query attends to valid keys of its own segment. If the mask is causal and has positions, these are keys up to the
    query's position, within `window` positions.
    """

    q_positions: Array | None = None  # int32 [T], or [B, T] if rows differ
    kv_positions: Array | None = None  # int32 [S], or [B, S] if rows differ
    kv_valid: Array | None = None  # bool [B, S], false for padding, which no query attends to
    # int32 [B, T], the document of each query. None if a row is one document.
    q_segment_ids: Array | None = None
    # int32 [B, S], the document of each key. None if a row is one document.
    kv_segment_ids: Array | None = None
    bias: ScoreBias | None = None  # Added to scores. Requires positions.
    cos_sin: CosSin | None = None  # Rotary cosine and sine of queries and of their own keys
    # float32 [], a factor of this layer's scores in addition to `ArchConfig.attn_scale`
    layer_score_scale: Array | None = None
    # Dropout of the probabilities. Requires positions. None means no dropout.
    dropout: AttentionDropout | None = None
    # [H], the score of a key without a value that each query of a head sees. None means no sinks.
    sinks: Array | None = None
    # Number of positions that a query attends to, itself included. `FULL_ATTENTION` means no limit.
    window: int = FULL_ATTENTION
    # Number of positions of a chunk, outside of which a query sees no key. NO_CHUNK means no limit.
    chunk: int = NO_CHUNK
    # int32 [B, T], the positions of packed documents, in which chunks begin at 0
    document_positions: Array | None = None
    is_causal: bool = True  # Whether positions limit the visible keys. False in an encoder.
    # int32 [B, S] by window, positions of the keys of layers with that window, if a KV cache keeps other keys for
    # them. Negative for a key that is not valid. Other layers have `kv_positions`.
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
