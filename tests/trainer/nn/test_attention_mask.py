"""What queries see: by position, of padding, of a cache, of a memory; against attention to whole sequences."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from tests.trainer.nn.test_attention import HEAD_DIM, D, T, attend, traits_of, weights_of
from trainer.distributed.sharding import Shards
from trainer.models.architecture import ALL_BEFORE
from trainer.nn.attention import attention, keys_values
from trainer.nn.attention_mask import KeysValues, Memory, Seen, causal, empty

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, T, D)).astype(np.float32)
WEIGHTS = weights_of(4, 2, True)


def seen_from(x: Array, seen: Seen, memory: Array | KeysValues | None = None) -> Array:
    return attention(x, WEIGHTS, traits_of(), seen, Shards(), memory=memory)[0]


@pytest.mark.parametrize("window", [ALL_BEFORE, 2])
@pytest.mark.parametrize("first", [1, 4])
def test_tokens_after_a_cache_are_those_of_the_whole(window: int, first: int):
    whole = attend(X, WEIGHTS, window)
    cache, found = empty((1, 2, T + 3, 2, HEAD_DIM), "float32", Shards()), []
    for low, high in [(0, first), *((i, i + 1) for i in range(first, T))]:
        seen = Seen(jnp.arange(low, high), jnp.arange(T + 3), window=window)
        out, cache = attention(jnp.asarray(X[:, low:high]), WEIGHTS, traits_of(), seen, Shards(), cache)
        assert cache is not None
        assert (int(cache.filled), int(cache.layer)) == (low, 1)
        cache = cache.after(high - low)
        found.append(out)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, atol=1e-5)
    assert (int(cache.filled), int(cache.layer)) == (T, 0)


def test_layers_of_a_cache_are_apart():
    cache = empty((3, 2, T, 2, HEAD_DIM), "float32", Shards())
    for number in range(3):
        own = KeysValues(*(jnp.full((2, 2, 2, HEAD_DIM), number + part) for part in (1.0, 10.0)))
        cache, met = cache.extended(own, Shards())
        np.testing.assert_array_equal(met.keys[:, :2], own.keys)
        np.testing.assert_array_equal(met.values[:, :2], own.values)
        assert not met.keys[:, 2:].any()
    assert [float(layer.max()) for layer in (*cache.keys, *cache.values)] == [1, 2, 3, 10, 11, 12]


def test_rows_that_begin_later_are_those_of_shorter_sequences():
    """Row 1 has two slots of padding before it."""
    starts = np.array([[0], [2]])
    positions = jnp.arange(T) - starts
    found = seen_from(jnp.asarray(X), Seen(positions, positions, present=positions >= 0))
    short = attention(jnp.asarray(X[1:, 2:]), WEIGHTS, traits_of(), causal(T - 2), Shards())[0]
    np.testing.assert_allclose(found[0], attend(X, WEIGHTS, ALL_BEFORE)[0], atol=1e-5)
    np.testing.assert_allclose(found[1, 2:], short[0], atol=1e-5)
    assert np.isfinite(found).all(), "also what sees nothing"


def test_a_memory_is_seen_as_a_whole_but_for_its_padding():
    memory = jnp.asarray(RNG.standard_normal((2, T + 1, D)), jnp.float32)
    present = jnp.arange(T + 1) < jnp.array([[T + 1], [3]])
    found = seen_from(jnp.asarray(X), Seen(present=present), memory)
    short = seen_from(jnp.asarray(X), Seen(), memory[:, :3])
    np.testing.assert_allclose(found[1], short[1], atol=1e-5)
    assert abs(found[0] - short[0]).max() > 1e-2
    met = keys_values(memory, WEIGHTS, traits_of(), Seen(), Shards())
    np.testing.assert_array_equal(seen_from(jnp.asarray(X), Seen(present=present), met), found)


def test_a_memory_of_several_layers_is_taken_by_number():
    stack = KeysValues(*(jnp.arange(3.0)[:, None, None, None, None] * jnp.ones((3, 1, 2, 1, 1)) for _ in range(2)))
    own = Memory(stack, jnp.ones((1, 2), bool)).of(jnp.int32(2))
    assert isinstance(own.states, KeysValues)
    assert own.states.keys.shape == (1, 2, 1, 1)
    assert float(own.states.values.min()) == 2


def test_a_bias_moves_scores():
    """So large a bias that each query sees one key alone."""
    wanted = RNG.integers(0, T, (4, T))
    bias = jnp.where(jnp.arange(T) == wanted[..., None], 1e4, 0.0)
    found = seen_from(jnp.asarray(X), Seen(bias=bias))
    v = np.einsum("bsd,hed->bshe", X, WEIGHTS["v"]["weight"]) + WEIGHTS["v"]["bias"]
    mixed = np.stack([v[:, wanted[head], head // 2] for head in range(4)], axis=2)
    out = np.einsum("bthe,dhe->btd", mixed, WEIGHTS["o"]["weight"]) + WEIGHTS["o"]["bias"]
    np.testing.assert_allclose(found, out, atol=1e-4)


def test_what_is_visible():
    at = jnp.arange(3)
    assert Seen().visible() is None
    plain = Seen(at, at).visible()
    assert plain is not None
    np.testing.assert_array_equal(plain, np.tri(3, dtype=bool))
    rows = dataclasses.replace(Seen(at, at, window=1), present=jnp.array([[True, False, True]])).visible()
    assert rows is not None
    np.testing.assert_array_equal(rows, [[[True, False, False], [False] * 3, [False, False, True]]])
