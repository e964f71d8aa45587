"""Tests of masks, KV cache, cross-attention and score bias against attention over whole sequences."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from prepcli.models.architecture import FULL_ATTENTION
from prepcli.models.layer_config import RelativePositionBias
from tests.trainer.nn.test_attention import D, T, attend, make_arch, random_weights
from trainer.nn.attention import attention, project_kv
from trainer.nn.attention_mask import (
    KV,
    AttentionMask,
    EncoderOutput,
    ScoreBias,
    Segments,
    causal_mask,
)
from trainer.nn.context import LayerContext

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, T, D)).astype(np.float32)
WEIGHTS = random_weights(4, 2, True)


def attend_with_mask(
    x: Array, mask: AttentionMask, encoder_states: Array | KV | None = None
) -> Array:
    """Compute attention without a cache."""
    return attention(x, WEIGHTS, LayerContext(make_arch(), mask), encoder_states=encoder_states)[0]


def test_left_padded_row_matches_shorter_sequence():
    """Row 1 has two padding slots before its first token."""
    start_slots = np.array([[0], [2]])
    positions = jnp.arange(T) - start_slots
    padded = attend_with_mask(
        jnp.asarray(X), AttentionMask(positions, positions, kv_valid=positions >= 0)
    )
    short = attention(
        jnp.asarray(X[1:, 2:]), WEIGHTS, LayerContext(make_arch(), causal_mask(jnp.arange(T - 2)))
    )[0]
    np.testing.assert_allclose(padded[0], attend(X, WEIGHTS, FULL_ATTENTION)[0], atol=1e-5)
    np.testing.assert_allclose(padded[1, 2:], short[0], atol=1e-5)
    assert np.isfinite(padded).all(), "a query without visible keys must be finite"


def test_cross_attention_ignores_source_padding():
    states = jnp.asarray(RNG.standard_normal((2, T + 1, D)), jnp.float32)
    source_mask = jnp.arange(T + 1) < jnp.array([[T + 1], [3]])
    masked = attend_with_mask(jnp.asarray(X), AttentionMask(kv_valid=source_mask), states)
    short = attend_with_mask(jnp.asarray(X), AttentionMask(), states[:, :3])
    np.testing.assert_allclose(masked[1], short[1], atol=1e-5)
    assert abs(masked[0] - short[0]).max() > 1e-2
    kv = project_kv(states, WEIGHTS, LayerContext(make_arch(), AttentionMask()))
    precomputed = attend_with_mask(jnp.asarray(X), AttentionMask(kv_valid=source_mask), kv)
    np.testing.assert_array_equal(precomputed, masked)


def test_encoder_output_for_layer_selects_by_index():
    stack = KV(
        *(jnp.arange(3.0)[:, None, None, None, None] * jnp.ones((3, 1, 2, 1, 1)) for _ in range(2))
    )
    selected = EncoderOutput(stack, jnp.ones((1, 2), bool)).for_layer(jnp.int32(2))
    assert isinstance(selected.states, KV)
    assert selected.states.keys.shape == (1, 2, 1, 1)
    assert float(selected.states.values.min()) == 2


def test_attention_bias_is_added_to_scores():
    """With a large bias each query attends to a single key."""
    visible_key = RNG.integers(0, T, (4, T))
    bias = jnp.where(jnp.arange(T) == visible_key[..., None], 1e4, 0.0)
    positions, score_bias = (
        jnp.arange(T),
        ScoreBias(jnp.zeros((1, 4)), RelativePositionBias(4, 8, True), precomputed=bias),
    )
    mask = AttentionMask(
        q_positions=positions, kv_positions=positions, bias=score_bias, is_causal=False
    )
    output = attend_with_mask(jnp.asarray(X), mask)
    v = np.einsum("bsd,hed->bshe", X, WEIGHTS["v"]["weight"]) + WEIGHTS["v"]["bias"]
    mixed = np.stack([v[:, visible_key[head], head // 2] for head in range(4)], axis=2)
    expected = np.einsum("bthe,dhe->btd", mixed, WEIGHTS["o"]["weight"]) + WEIGHTS["o"]["bias"]
    np.testing.assert_allclose(output, expected, atol=1e-4)


def test_materialize_combines_causality_window_and_padding():
    positions = jnp.arange(3)
    assert AttentionMask().materialize() is None
    causal = AttentionMask(positions, positions).materialize()
    assert causal is not None
    np.testing.assert_array_equal(causal, np.tri(3, dtype=bool))
    windowed = AttentionMask(positions, positions, window=1)
    padded = dataclasses.replace(windowed, kv_valid=jnp.array([[True, False, True]])).materialize()
    assert padded is not None
    np.testing.assert_array_equal(
        padded, [[[True, False, False], [False] * 3, [False, False, True]]]
    )


def test_chunks_hide_keys_of_earlier_chunks():
    mask = dataclasses.replace(causal_mask(jnp.arange(5)), chunk=2).with_chunk_segments(1)
    visible = np.asarray(mask.materialize())[0]
    # Chunks 0 1 | 2 3 | 4.
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(visible, np.array(expected, bool))


def test_chunks_of_packed_documents_begin_with_each_document():
    ids = jnp.array([[1, 1, 1, 2, 2, 2]])
    segments = Segments(ids, jnp.array([[0, 1, 2, 0, 1, 2]]))
    mask = dataclasses.replace(causal_mask(jnp.arange(6), segments), chunk=2)
    visible = np.asarray(mask.with_chunk_segments(1).materialize())[0]
    document = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], bool)
    np.testing.assert_array_equal(visible, np.kron(np.eye(2, dtype=bool), document))
