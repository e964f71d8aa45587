"""What queries see: by position, of padding, of a cache, of a memory; against attention to whole sequences."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from tests.trainer.nn.test_attention import HEAD_DIM, D, T, attend, make_arch, random_weights
from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import FULL_ATTENTION
from trainer.nn.attention import attention, project_kv
from trainer.nn.attention_mask import KV, AttentionMask, EncoderOutput, causal_mask, empty_kv_cache

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, T, D)).astype(np.float32)
WEIGHTS = random_weights(4, 2, True)


def seen_from(x: Array, seen: AttentionMask, memory: Array | KV | None = None) -> Array:
    return attention(x, WEIGHTS, make_arch(), seen, ShardingContext(), encoder_states=memory)[0]


@pytest.mark.parametrize("window", [FULL_ATTENTION, 2])
@pytest.mark.parametrize("first", [1, 4])
def test_tokens_after_a_cache_are_those_of_the_whole(window: int, first: int):
    whole = attend(X, WEIGHTS, window)
    cache, found = empty_kv_cache((1, 2, T + 3, 2, HEAD_DIM), "float32", ShardingContext()), []
    for low, high in [(0, first), *((i, i + 1) for i in range(first, T))]:
        seen = AttentionMask(jnp.arange(low, high), jnp.arange(T + 3), window=window)
        out, cache = attention(jnp.asarray(X[:, low:high]), WEIGHTS, make_arch(), seen, ShardingContext(), cache)
        assert cache is not None
        assert (int(cache.length), int(cache.layer)) == (low, 1)
        cache = cache.advance(high - low)
        found.append(out)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, atol=1e-5)
    assert (int(cache.length), int(cache.layer)) == (T, 0)


def test_layers_of_a_cache_are_apart():
    cache = empty_kv_cache((3, 2, T, 2, HEAD_DIM), "float32", ShardingContext())
    for number in range(3):
        own = KV(*(jnp.full((2, 2, 2, HEAD_DIM), number + part) for part in (1.0, 10.0)))
        cache, met = cache.append(own, ShardingContext())
        np.testing.assert_array_equal(met.keys[:, :2], own.keys)
        np.testing.assert_array_equal(met.values[:, :2], own.values)
        assert not met.keys[:, 2:].any()
    assert [float(layer.max()) for layer in (*cache.keys, *cache.values)] == [1, 2, 3, 10, 11, 12]


def test_rows_that_begin_later_are_those_of_shorter_sequences():
    """Row 1 has two slots of padding before it."""
    starts = np.array([[0], [2]])
    positions = jnp.arange(T) - starts
    found = seen_from(jnp.asarray(X), AttentionMask(positions, positions, kv_valid=positions >= 0))
    short = attention(jnp.asarray(X[1:, 2:]), WEIGHTS, make_arch(), causal_mask(T - 2), ShardingContext())[0]
    np.testing.assert_allclose(found[0], attend(X, WEIGHTS, FULL_ATTENTION)[0], atol=1e-5)
    np.testing.assert_allclose(found[1, 2:], short[0], atol=1e-5)
    assert np.isfinite(found).all(), "also what sees nothing"


def test_a_memory_is_seen_as_a_whole_but_for_its_padding():
    memory = jnp.asarray(RNG.standard_normal((2, T + 1, D)), jnp.float32)
    present = jnp.arange(T + 1) < jnp.array([[T + 1], [3]])
    found = seen_from(jnp.asarray(X), AttentionMask(kv_valid=present), memory)
    short = seen_from(jnp.asarray(X), AttentionMask(), memory[:, :3])
    np.testing.assert_allclose(found[1], short[1], atol=1e-5)
    assert abs(found[0] - short[0]).max() > 1e-2
    met = project_kv(memory, WEIGHTS, make_arch(), AttentionMask(), ShardingContext())
    np.testing.assert_array_equal(seen_from(jnp.asarray(X), AttentionMask(kv_valid=present), met), found)


def test_a_memory_of_several_layers_is_taken_by_number():
    stack = KV(*(jnp.arange(3.0)[:, None, None, None, None] * jnp.ones((3, 1, 2, 1, 1)) for _ in range(2)))
    own = EncoderOutput(stack, jnp.ones((1, 2), bool)).for_layer(jnp.int32(2))
    assert isinstance(own.states, KV)
    assert own.states.keys.shape == (1, 2, 1, 1)
    assert float(own.states.values.min()) == 2


def test_a_bias_moves_scores():
    """So large a bias that each query sees one key alone."""
    wanted = RNG.integers(0, T, (4, T))
    bias = jnp.where(jnp.arange(T) == wanted[..., None], 1e4, 0.0)
    found = seen_from(jnp.asarray(X), AttentionMask(bias=bias))
    v = np.einsum("bsd,hed->bshe", X, WEIGHTS["v"]["weight"]) + WEIGHTS["v"]["bias"]
    mixed = np.stack([v[:, wanted[head], head // 2] for head in range(4)], axis=2)
    out = np.einsum("bthe,dhe->btd", mixed, WEIGHTS["o"]["weight"]) + WEIGHTS["o"]["bias"]
    np.testing.assert_allclose(found, out, atol=1e-4)


def test_what_is_visible():
    at = jnp.arange(3)
    assert AttentionMask().materialize() is None
    plain = AttentionMask(at, at).materialize()
    assert plain is not None
    np.testing.assert_array_equal(plain, np.tri(3, dtype=bool))
    rows = dataclasses.replace(AttentionMask(at, at, window=1), kv_valid=jnp.array([[True, False, True]])).materialize()
    assert rows is not None
    np.testing.assert_array_equal(rows, [[[True, False, False], [False] * 3, [False, False, True]]])
