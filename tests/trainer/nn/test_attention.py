"""Attention: masks, caches, scores of keys, and differential attention."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from prepcli.commands.testing.tiny_model import exact_log, model_logits, tiny_transformer
from prepcli.core.errors import PrepError
from prepcli.models.architecture import FULL_ATTENTION, LAMBDA_VECTORS, ArchConfig
from prepcli.models.layer_config import RelativePositionBias, alibi_slopes
from prepcli.models.rope_config import QueryScale, Rope
from tests.helpers.later_configs import LATER_FAMILIES
from tests.helpers.slow_cases import slow_except
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention import (
    attention,
    pair_factors,
    project_kv,
    subtract_pairs,
)
from trainer.nn.attention_mask import (
    KV,
    AttentionMask,
    CosSin,
    Segments,
    alibi_bias,
    causal_mask,
    inverse_frequencies,
    relative_position_bias,
    relative_position_buckets,
    rotary_cos_sin,
    rotary_cos_sin_at,
    sinusoidal_positions,
)
from trainer.nn.cache import KVCache, empty_kv_cache
from trainer.nn.context import LayerContext

# Tests of attention against loops over heads and positions in float64.

T, D, HEAD_DIM = 6, 8, 4


def make_arch(scale: float = 0.5) -> ArchConfig:
    """Return the architecture of one layer with full attention."""
    return ArchConfig(
        norm="rms",
        norm_eps=1e-6,
        activation="silu",
        has_gated_mlp=True,
        attn_scale=scale,
        sliding_windows=(FULL_ATTENTION,),
        rope=None,
        max_positions=T,
        init_std=0.02,
    )


def random_weights(heads: int, kv_heads: int, biases: bool) -> dict[str, Any]:
    """Generate the projections of an attention."""
    rng = np.random.default_rng(heads)
    head_counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    weights: dict[str, Any] = {
        name: {"weight": rng.standard_normal((count, HEAD_DIM, D))}
        for name, count in head_counts.items()
    }
    weights["o"] = {"weight": rng.standard_normal((D, heads, HEAD_DIM))}
    if biases:
        for name, count in head_counts.items():
            weights[name]["bias"] = rng.standard_normal((count, HEAD_DIM))
        weights["o"]["bias"] = rng.standard_normal(D)
    return jax.tree.map(lambda array: np.asarray(array, np.float32), weights)


@partial(jax.jit, static_argnames=("window", "scale"))
def attend(
    x: np.ndarray | jax.Array,
    weights: dict[str, Any],
    window: int,
    cos_sin: CosSin | None = None,
    scale: float = 0.5,
) -> jax.Array:
    """Compute causal self-attention."""
    mask = dataclasses.replace(causal_mask(jnp.arange(T)), window=window, cos_sin=cos_sin)
    return attention(jnp.asarray(x), weights, LayerContext(make_arch(scale), mask))[0]


def test_attention_with_large_scores_is_finite():
    x = 1e4 * jnp.ones((1, T, D), jnp.float32)
    output = attend(x, random_weights(2, 2, False), 2, scale=1.0)
    assert np.isfinite(output).all()


# Tests of masks, KV cache, cross-attention and score bias against attention over whole sequences.

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
    mask = AttentionMask(positions, positions, kv_valid=positions >= 0)
    padded = jax.jit(lambda x: attend_with_mask(x, mask))(X)
    short = jax.jit(lambda x: attend_with_mask(x, causal_mask(jnp.arange(T - 2))))(X[1:, 2:])
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


# Tests of the KV cache: the slots of each layer, and attention with it against attention over whole sequences.

CACHED_X = np.random.default_rng(0).standard_normal((2, T, D)).astype(np.float32)

UNSHARDED = ShardingContext()


def make_cache(*windows: int, num_slots: int = T) -> KVCache:
    """Allocate a cache for two rows."""
    return empty_kv_cache(windows, (2, num_slots, 2, HEAD_DIM), "float32", UNSHARDED)


CASES = [(window, length) for window in (FULL_ATTENTION, 1, 2, 3) for length in (1, 2, T - 1)]

FAST = [(FULL_ATTENTION, 1), (2, T - 1)]


@pytest.mark.parametrize(("window", "prefill_length"), slow_except(CASES, FAST))
def test_attention_with_cache_matches_whole_sequence(window: int, prefill_length: int):
    whole = attend(CACHED_X, WEIGHTS, window)
    cache, outputs = make_cache(window, num_slots=T + 3), []

    @jax.jit
    def attend_to_cache(x: Array, positions: Array, cache: KVCache) -> tuple[Array, KVCache]:
        slots = cache.key_slots(window, len(positions))
        valid = jnp.broadcast_to(slots >= 0, (2, len(slots)))
        mask = AttentionMask(positions, slots, kv_valid=valid, window=window)
        output, appended = attention(x, WEIGHTS, LayerContext(make_arch(), mask, kv_cache=cache))
        assert appended is not None
        return output, appended

    for start, stop in [(0, prefill_length), *((i, i + 1) for i in range(prefill_length, T))]:
        output, cache = attend_to_cache(CACHED_X[:, start:stop], np.arange(start, stop), cache)
        assert (int(cache.length), int(cache.layer)) == (start, 1)
        cache = cache.advance(stop - start)
        outputs.append(output)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, atol=1e-5)
    assert (int(cache.length), int(cache.layer)) == (T, 0)


@partial(jax.jit, static_argnames="window")
def append(cache: KVCache, new: Array, window: int) -> tuple[KVCache, KV, Array]:
    """Append new keys, which are also the values, and return the keys and slots of the layer."""
    slots = cache.key_slots(window, new.shape[1])
    cache, kv = cache.append(KV(new, new), window, UNSHARDED)
    return cache.advance(new.shape[1]), kv, slots


@settings(max_examples=15)
@given(num_slots=st.sampled_from((1, 2, 5, 8)), window=st.integers(0, 9), data=st.data())
def test_key_slots_number_the_appended_tokens(num_slots: int, window: int, data: st.DataObject):
    """The key of a token is the number of its slot."""
    prefill_length = data.draw(st.integers(1, num_slots))
    cache = make_cache(window, num_slots=num_slots)
    for start, stop in [
        (0, prefill_length),
        *((i, i + 1) for i in range(prefill_length, num_slots)),
    ]:
        new = np.broadcast_to(
            np.arange(start, stop, dtype=np.float32)[:, None, None],
            (2, stop - start, 2, HEAD_DIM),
        )
        cache, kv, all_slots = append(cache, new, window)
        slots = np.asarray(all_slots)
        is_filled = (slots >= 0) & (slots < stop)
        assert (kv.keys[:, is_filled] == slots[is_filled][:, None, None]).all()
        assert (kv.keys == kv.values).all()
        first_visible = 0 if window == FULL_ATTENTION else max(0, stop - window)
        assert {*range(first_visible, stop)} <= {*slots.tolist()}, "a visible key is missing"


def test_kv_cache_keeps_layers_apart():
    """Layers with a window and with full attention alternate."""
    windows = (2, FULL_ATTENTION, 2, FULL_ATTENTION, 2)
    cache = make_cache(*windows)
    for layer, window in enumerate(windows):
        assert int(cache.layer) == layer
        new = KV(*(jnp.full((2, 1, 2, HEAD_DIM), layer + offset) for offset in (1.0, 10.0)))
        cache, layer_kv = cache.append(new, window, UNSHARDED)
        np.testing.assert_array_equal(layer_kv.keys[:, :1], new.keys)
        np.testing.assert_array_equal(layer_kv.values[:, :1], new.values)
        assert not layer_kv.keys[:, 1:].any()
    ring, full = cache.stacks[2], cache.stacks[FULL_ATTENTION]
    assert [float(layer.max()) for layer in (*ring.keys, *ring.values)] == [1, 3, 5, 10, 12, 14]
    assert [float(layer.max()) for layer in (*full.keys, *full.values)] == [2, 4, 11, 13]


def test_windowed_layers_allocate_only_their_window():
    cache = make_cache(4, FULL_ATTENTION, 4, 2000, num_slots=1000)
    assert cache.stacks.keys() == {4, FULL_ATTENTION, 2000}
    for window, (layers, slots) in {4: (2, 4), FULL_ATTENTION: (1, 1000), 2000: (1, 1000)}.items():
        stack = cache.stacks[window]
        assert stack.keys.shape == stack.values.shape == (layers, 2, slots, 2, HEAD_DIM)
    nbytes = sum(
        array.nbytes for stack in cache.stacks.values() for array in (stack.keys, stack.values)
    )
    assert nbytes == 2 * 4 * (2 * 2 * HEAD_DIM) * (2 * 4 + 2 * 1000)


# Differential attention, compared with its equations in NumPy.

EPS = 1e-3


def normal(*shape: int) -> np.ndarray:
    """Return random values in float32."""
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_output_factor_is_not_rounded_to_bfloat16():
    ones = {name: {"weight": jnp.ones(6)} for name in LAMBDA_VECTORS}
    factors = pair_factors(ones, jnp.float32(0.2), jnp.dtype("bfloat16"))
    assert factors["lambda"].dtype == jnp.bfloat16
    # In bfloat16 it is 0.80078125: each layer would scale its output by 0.1 % too much.
    assert float(factors["output"]) == np.float32(1) - np.float32(0.2)
    mixed = jnp.asarray(normal(1, 3, 4, 6), jnp.bfloat16)
    assert subtract_pairs(mixed, factors, EPS).dtype == jnp.bfloat16


# Scores of keys from their values, compared with their equation in NumPy.

DOGE = LATER_FAMILIES["doge"]


def test_sequences_longer_than_the_positions_are_refused():
    tiny = tiny_transformer(DOGE | {"max_position_embeddings": 8})
    batch = {"tokens": np.zeros((1, 9), np.int32)}
    with pytest.raises(PrepError) as caught:
        model_logits(tiny.model, {}, batch)
    assert caught.value.why == "the model has 8 positions"


# Tests of rotary embeddings against complex rotations, and of relative position biases against T5's formula.


@pytest.mark.parametrize(("length", "factors"), [(16, (1.0, 3.0)), (17, (2.0, 5.0))])
def test_longrope_switches_factors_beyond_original_length(
    length: int, factors: tuple[float, float]
):
    rope = Rope(4, 100.0, 16, "longrope", short_factors=(1.0, 3.0), long_factors=(2.0, 5.0))
    np.testing.assert_allclose(
        inverse_frequencies(rope, length), [1 / factors[0], 0.1 / factors[1]], rtol=1e-6
    )


ROPES = [
    Rope(4, 100.0, 16),
    Rope(4, 100.0, 16, "linear", 3.0),
    Rope(4, 100.0, 16, "dynamic", 3.0),
    Rope(
        4,
        100.0,
        16,
        "longrope",
        attention_factor=1.2,
        short_factors=(1.0, 3.0),
        long_factors=(2.0, 5.0),
    ),
    Rope(4, 100.0, 16, "yarn", 2.0, 1.0, 32.0, 1.1),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.rope_type)
def test_rotary_cos_sin_at_uses_length_of_each_row(rope: Rope):
    """The rows have lengths below, at and beyond the original positions, and the maximum."""
    lengths = np.array([3, 16, 17, 40])
    positions = np.stack([np.arange(length - 3, length) for length in lengths])

    @jax.jit
    def compute() -> tuple[CosSin, list[CosSin]]:
        at_lengths = rotary_cos_sin_at(rope, jnp.asarray(positions), jnp.asarray(lengths), 40)
        return at_lengths, [rotary_cos_sin(rope, jnp.arange(length)) for length in lengths]

    cos_sin, expected_rows = compute()
    for row, (length, expected) in enumerate(zip(lengths, expected_rows)):
        cosine, sine = expected.cosine[length - 3 :], expected.sine[length - 3 :]
        np.testing.assert_allclose(cos_sin.cosine[row], cosine, atol=1e-5)
        np.testing.assert_allclose(cos_sin.sine[row], sine, atol=1e-5)


def test_query_scale_grows_in_steps_of_positions():
    rope = Rope(4, 100.0, 8, query_scale=QueryScale(beta=0.5, step_length=4))
    scale = rotary_cos_sin(rope, jnp.array([0, 3, 4, 11])).query_scale
    assert scale is not None
    expected = [1, 1, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3)]
    np.testing.assert_allclose(scale[:, 0], expected, rtol=1e-6)
    assert rotary_cos_sin(Rope(4, 100.0, 8), jnp.arange(3)).query_scale is None


def test_query_scale_of_negative_positions_is_finite():
    """Slots before the first token of a row have negative positions when a row is decoded."""
    rope = Rope(4, 100.0, 8, query_scale=QueryScale(beta=0.5, step_length=4))
    positions = jnp.array([[-6, -5, 0]])
    scale = rotary_cos_sin_at(rope, positions, jnp.array([1]), 8).query_scale
    assert scale is not None
    np.testing.assert_array_equal(scale, 1)


BIAS_CONFIGS = [
    RelativePositionBias(num_buckets, max_distance, bidirectional)
    for num_buckets in (4, 9, 32)
    for max_distance in (17, 20, 128, 301)
    for bidirectional in (False, True)
]


def assert_buckets_match_transformers(config: RelativePositionBias) -> None:
    """Compare the buckets of all distances up to beyond the maximum; skip without transformers."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-config.max_distance - 9, config.max_distance + 10)
    with exact_log():
        expected = modeling.T5Attention._relative_position_bucket(
            distances, config.bidirectional, config.num_buckets, config.max_distance
        )
    indices = (
        np.clip(distances.numpy(), -config.max_distance, config.max_distance) + config.max_distance
    )
    np.testing.assert_array_equal(
        relative_position_buckets(config)[indices], expected.numpy(), err_msg=str(config)
    )


# buckets and maximum distance of those of 16,032 tables that NumPy's float32 logarithm gets wrong
ROUNDED = (
    *(
        (36, 50),
        (36, 98),
        (48, 81),
        (51, 49),
        (54, 125),
        (55, 75),
        (55, 147),
        (65, 108),
        (72, 50),
        (72, 100),
    ),
    *((72, 196), (17, 27), (19, 25), (19, 49), (34, 27), (38, 25), (39, 49)),
)


def test_buckets_match_transformers_with_exact_log():
    sizes = [(config.num_buckets, config.max_distance) for config in BIAS_CONFIGS]
    for num_buckets, max_distance in (*sizes, *ROUNDED):
        for bidirectional in (False, True):
            assert_buckets_match_transformers(
                RelativePositionBias(num_buckets, max_distance, bidirectional)
            )


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_position_bias_looks_up_bucket_of_distance(bidirectional: bool):
    config = RelativePositionBias(8, 11, bidirectional)
    table = np.random.default_rng(0).standard_normal((8, 3), np.float32)
    buckets = relative_position_buckets(config)
    q_positions, kv_positions = np.array([0, 5, 30]), np.arange(20)

    @jax.jit
    def compute_bias(q_positions: jax.Array, kv_positions: jax.Array) -> jax.Array:
        return relative_position_bias(jnp.asarray(table), q_positions, kv_positions, config)

    bias = np.asarray(compute_bias(q_positions, kv_positions))
    assert bias.shape == (3, 3, 20)
    for t, query in enumerate(q_positions):
        for s, key in enumerate(kv_positions):
            expected = table[buckets[max(-11, min(11, int(key - query))) + 11]]
            np.testing.assert_array_equal(bias[:, t, s], expected)
    shifted_q, shifted_kv = (np.stack([p, p + 1]) for p in (q_positions, kv_positions))
    per_row = compute_bias(shifted_q, shifted_kv)
    np.testing.assert_array_equal(per_row, np.stack([bias, bias]))


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        # The example of the paper, section 3.
        (8, (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625)),
        (3, (2**-4, 2**-8, 2**-2)),
        (1, (2**-8,)),
    ],
)
def test_alibi_slopes_are_geometric_sequences(num_heads: int, slopes: tuple[float, ...]):
    assert alibi_slopes(num_heads) == pytest.approx(slopes)


def test_alibi_bias_is_linear_in_the_distance():
    slopes, q_positions, kv_positions = jnp.array([0.5, 0.25]), jnp.array([3, 9]), jnp.arange(5)
    bias = np.asarray(alibi_bias(slopes, q_positions, kv_positions))
    assert bias.shape == (2, 2, 5)
    assert bias[1, 0].tolist() == [-0.75, -0.5, -0.25, 0.0, 0.25]
    assert bias[0, 1].tolist() == [-4.5, -4.0, -3.5, -3.0, -2.5]
    per_row = alibi_bias(slopes, q_positions[:, None], jnp.stack([kv_positions, kv_positions + 1]))
    assert per_row.shape == (2, 2, 1, 5)
    np.testing.assert_array_equal(per_row[0, :, 0], bias[:, 0])


def test_sinusoidal_positions_match_formula():
    table = np.asarray(sinusoidal_positions(jnp.array([[0, 7], [2, 300]]), 9))
    assert table.shape == (2, 2, 9)
    angles = 300 * 10_000.0 ** -(np.arange(4) / 3)
    np.testing.assert_allclose(table[1, 1, :4], np.sin(angles), atol=1e-4)
    np.testing.assert_allclose(table[1, 1, 4:8], np.cos(angles), atol=1e-4)
    assert not table[..., 8].any()
