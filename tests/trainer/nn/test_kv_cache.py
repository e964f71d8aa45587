"""Tests of the KV cache: the slots of each layer, and attention with it against attention over whole sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from prepcli.models.architecture import FULL_ATTENTION
from tests.helpers.slow_cases import slow_except
from tests.trainer.nn.test_attention import HEAD_DIM, D, T, attend, make_arch, random_weights
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention import attention
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.cache import KVCache, empty_kv_cache
from trainer.nn.context import LayerContext

X = np.random.default_rng(0).standard_normal((2, T, D)).astype(np.float32)
WEIGHTS = random_weights(4, 2, True)
UNSHARDED = ShardingContext()


def make_cache(*windows: int, num_slots: int = T) -> KVCache:
    """Allocate a cache for two rows."""
    return empty_kv_cache(windows, (2, num_slots, 2, HEAD_DIM), "float32", UNSHARDED)


CASES = [(window, length) for window in (FULL_ATTENTION, 1, 2, 3) for length in (1, 2, T - 1)]
FAST = [(FULL_ATTENTION, 1), (1, 2), (2, T - 1), (3, 2)]


@pytest.mark.parametrize(("window", "prefill_length"), slow_except(CASES, FAST))
def test_attention_with_cache_matches_whole_sequence(window: int, prefill_length: int):
    whole = attend(X, WEIGHTS, window)
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
        output, cache = attend_to_cache(X[:, start:stop], np.arange(start, stop), cache)
        assert (int(cache.length), int(cache.layer)) == (start, 1)
        cache = cache.advance(stop - start)
        outputs.append(output)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, atol=1e-5)
    assert (int(cache.length), int(cache.layer)) == (T, 0)


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
        slots = np.asarray(cache.key_slots(window, stop - start))
        cache, kv = cache.append(KV(jnp.asarray(new), jnp.asarray(new)), window, UNSHARDED)
        cache = cache.advance(stop - start)
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


def test_heads_of_windowed_layers_may_have_another_shape():
    cache = empty_kv_cache(
        (4, FULL_ATTENTION), (2, 3, 2, 8), "float32", UNSHARDED, head_shapes={4: (1, 6)}
    )
    assert cache.stacks[4].keys.shape == (1, 2, 3, 1, 6)
    assert cache.stacks[FULL_ATTENTION].keys.shape == (1, 2, 3, 2, 8)


def test_cache_without_slots_passes_keys_to_later_layers_only():
    cache = KVCache({}, jnp.int32(0), num_slots=0)
    new = KV(*(jnp.full((2, 5, 2, HEAD_DIM), value) for value in (1.0, 2.0)))
    cache, kv = cache.append(new, 4, UNSHARDED)
    assert kv is new
    cache = cache.share(4, kv)
    assert cache.shared[4] is new
    assert cache.advance(5).shared == {}
