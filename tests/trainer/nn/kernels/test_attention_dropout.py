"""Tests of dropout of attention probabilities: one mask for all kernels and tiles, and exact gradients."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.models.layer_config import RelativePositionBias
from tests.helpers.slow_cases import slow_except
from tests.trainer.nn.test_attention import make_arch
from trainer.nn.attention_mask import KV, AttentionMask, ScoreBias
from trainer.nn.dropout import AttentionDropout, RandomKey, derive_key, uint32
from trainer.nn.kernels import KERNELS
from trainer.nn.model_spec import AttentionOptions

NUM_ROWS, LENGTH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 3, 19, 4, 2, 8
RATE, SCALE = 0.3, 0.5
REFERENCE = AttentionOptions()
TILES = [(5, 3), (8, 64), (-1, 7), (19, 1), (1, -1)]
MASKS = ("causal", "window and hidden keys", "bidirectional with bias")
VISIBLE_SHAPES: dict[str, tuple[int, ...]] = dict(
    zip(MASKS, ((1, 1, LENGTH, LENGTH), (NUM_ROWS, 1, LENGTH, LENGTH), (1, 1, 1, 1)))
)
BIAS = RelativePositionBias(8, 16, bidirectional=True)


def make_dropout(seed: int = 0) -> AttentionDropout:
    """Return dropout of rows with ids 0, 7 and 14."""
    row_keys = derive_key(RandomKey(uint32(seed), uint32(0)), jnp.arange(NUM_ROWS) * 7)
    return AttentionDropout(row_keys, jnp.arange(NUM_HEADS, dtype=jnp.uint32), RATE)


def make_inputs() -> dict[str, np.ndarray]:
    """Return q, k, v, the gradient of the output, and the table of a score bias."""
    rng = np.random.default_rng(0)
    shapes = {"q": NUM_HEADS, "k": NUM_KV_HEADS, "v": NUM_KV_HEADS, "output_gradient": NUM_HEADS}
    arrays = {
        name: rng.standard_normal((NUM_ROWS, LENGTH, heads, HEAD_DIM))
        for name, heads in shapes.items()
    }
    return {**arrays, "table": rng.standard_normal((BIAS.num_buckets, NUM_HEADS))}


def make_mask(name: str, table: Array | None, dropout: AttentionDropout | None) -> AttentionMask:
    """Return one of `MASKS`; with "window and hidden keys" some queries have no visible key."""
    positions = jnp.arange(LENGTH)
    fields: dict[str, Any] = {
        "q_positions": positions,
        "kv_positions": positions,
        "dropout": dropout,
    }
    if name == "causal":
        return AttentionMask(**fields)
    if name == "bidirectional with bias":
        return AttentionMask(
            **fields, is_causal=False, bias=None if table is None else ScoreBias(table, BIAS)
        )
    valid = jnp.asarray(np.random.default_rng(1).random((NUM_ROWS, LENGTH)) < 0.5)
    return AttentionMask(**fields, kv_valid=valid, window=2)


@cache
def run_kernel(name: str, options: AttentionOptions) -> tuple[Array, dict[str, Array]]:
    """Return the output of a kernel, and the gradients of its inputs."""
    inputs = {key: x.astype(np.float32) for key, x in make_inputs().items()}
    output_gradient = inputs.pop("output_gradient")

    def attend(inputs: dict[str, Array]) -> Array:
        mask = make_mask(name, inputs["table"], make_dropout())
        return KERNELS[options.kernel](
            inputs["q"], KV(inputs["k"], inputs["v"]), make_arch(SCALE), mask, options
        )

    @jax.jit
    def run(
        inputs: dict[str, np.ndarray], output_gradient: np.ndarray
    ) -> tuple[Array, dict[str, Array]]:
        output, pullback = jax.vjp(attend, inputs)
        return output, pullback(output_gradient)[0]

    return run(inputs, output_gradient)


@cache
def exact_results(name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Compute output and gradients in float64 with dense attention; only the mask comes from the code under test."""
    positions = np.arange(LENGTH)

    @jax.jit
    def compute_masks() -> tuple[Array | None, Array, Array]:
        visible = make_mask(name, None, None).materialize()
        is_kept = kept(make_dropout(), positions, positions)
        one_hot = ScoreBias(jnp.eye(BIAS.num_buckets), BIAS)
        return visible, is_kept, one_hot.materialize(jnp.arange(LENGTH), jnp.arange(LENGTH))

    bools, is_kept, in_bucket = jax.device_get(compute_masks())
    visible = np.reshape(True if bools is None else bools, VISIBLE_SHAPES[name])
    with jax.enable_x64(True):
        inputs = {key: jnp.asarray(x) for key, x in make_inputs().items()}
        output_gradient = inputs.pop("output_gradient")

        def attend(inputs: dict[str, Array]) -> Array:
            group = NUM_HEADS // NUM_KV_HEADS
            k, v = (jnp.repeat(inputs[key], group, axis=2) for key in ("k", "v"))
            scores = jnp.einsum("bthe,bshe->bhts", inputs["q"], k) * SCALE
            if "bias" in name:
                scores += jnp.einsum("nh,nts->hts", inputs["table"], in_bucket)
            probabilities = jax.nn.softmax(jnp.where(visible, scores, -1e300), axis=-1) * visible
            return jnp.einsum("bhts,bshe->bthe", probabilities * is_kept / (1 - RATE), v)

        @jax.jit
        def run(inputs: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            output, pullback = jax.vjp(attend, inputs)
            return output, pullback(output_gradient)[0]

        output, gradients = run(inputs)
        return np.asarray(output), {
            key: np.asarray(gradient) for key, gradient in gradients.items()
        }


def kept(dropout: AttentionDropout, q_positions: np.ndarray, kv_positions: np.ndarray) -> Array:
    """Return the mask of kept probabilities [B, H, T, S]."""
    ones = jnp.ones((NUM_ROWS, NUM_HEADS, 1, q_positions.shape[-1], kv_positions.shape[-1]))
    return (
        dropout.for_queries(jnp.asarray(q_positions)).apply(ones, jnp.asarray(kv_positions))[
            :, :, 0
        ]
        > 0
    )


OPTIONS = [REFERENCE, *(AttentionOptions("blockwise", *sizes) for sizes in TILES[:2])]
CASES = [(name, options) for name in MASKS for options in OPTIONS]
# Cases with each mask and each kernel.
FAST = [*zip(MASKS[::-1], OPTIONS)]


@pytest.mark.parametrize(("name", "options"), slow_except(CASES, FAST))
def test_kernels_match_exact_dropout(name: str, options: AttentionOptions):
    output, gradients = run_kernel(name, options)
    expected, expected_gradients = exact_results(name)
    np.testing.assert_allclose(output, expected, atol=2e-6)
    for key, gradient in expected_gradients.items():
        np.testing.assert_allclose(gradients[key], gradient, atol=1e-5, err_msg=key)
    assert "bias" not in name or np.abs(expected_gradients["table"]).max() > 0.1


@pytest.mark.parametrize(
    "sizes", slow_except([(sizes,) for sizes in TILES], [((8, 64),), ((-1, 7),)])
)
def test_mask_of_a_tile_is_part_of_the_whole_mask(sizes: tuple[int, int]):
    positions, kept_at = np.arange(LENGTH), jax.jit(partial(kept, make_dropout()))
    whole = np.asarray(kept_at(positions, positions))
    q_size, kv_size = (size if size > 0 else LENGTH for size in sizes)
    for start in range(0, LENGTH, q_size):
        for first in range(0, LENGTH, kv_size):
            queries, keys = positions[start : start + q_size], positions[first : first + kv_size]
            np.testing.assert_array_equal(kept_at(queries, keys), whole[:, :, queries][..., keys])


def test_mask_follows_positions_rows_and_heads_in_any_order():
    dropout, positions = make_dropout(), np.arange(LENGTH)
    whole = np.asarray(kept(dropout, positions, positions))
    order = np.random.default_rng(2).permutation(LENGTH)
    np.testing.assert_array_equal(kept(dropout, order, order), whole[:, :, order][..., order])
    by_row = kept(dropout, np.stack([order] * NUM_ROWS), positions)
    np.testing.assert_array_equal(by_row, whole[:, :, order])
    rows, heads = np.array([2, 0, 1]), np.array([3, 1, 0, 2])
    row_keys = RandomKey(*(words[rows] for words in dropout.row_keys))
    moved = AttentionDropout(row_keys, dropout.head_ids[heads], RATE)
    np.testing.assert_array_equal(kept(moved, positions, positions), whole[rows][:, heads])


def test_query_without_visible_keys_gets_zeros():
    """The window of a query has two keys, and both are hidden, as forgetful causal masking may do."""
    valid = make_mask("window and hidden keys", None, None).kv_valid
    assert valid is not None
    is_empty = ~np.asarray(valid)
    is_empty[:, 1:] &= is_empty[:, :-1]
    assert is_empty.any()
    for options in (REFERENCE, AttentionOptions("blockwise", 5, 3)):
        output, gradients = run_kernel("window and hidden keys", options)
        assert not np.asarray(output)[is_empty].any()
        assert not np.asarray(gradients["q"])[is_empty].any()
