"""Tests of random masks: their coordinates, their statistics, forgetful causal masking, and the sites of a layer."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.models.dropout_config import DropoutConfig
from trainer.nn.dropout import (
    Dropout,
    DropoutSite,
    LayerDropout,
    RandomKey,
    Stack,
    drop,
    step_dropout,
    uint32,
)

SIGMAS = 5.0
ROWS, LENGTH, WIDTH = 4, 64, 32
RATE = 0.25
CONFIG = DropoutConfig(RATE, RATE, RATE)


def make_dropout(
    seed: int = 3, step: int = 5, rows: Any = range(ROWS), config: DropoutConfig = CONFIG
) -> Dropout:
    return step_dropout(
        config, seed=seed, step=jnp.int32(step), row_ids=jnp.asarray(rows, jnp.uint32)
    )


def layer_dropout(dropout: Dropout, layer: int = 0, positions: Array | None = None) -> LayerDropout:
    """Return the random masks of one of 4 layers."""
    keys = dropout.layer_keys(4)
    assert keys is not None
    positions = jnp.arange(LENGTH) if positions is None else positions
    layer_masks = dropout.for_layer(RandomKey(*(words[layer] for words in keys)), positions)
    assert layer_masks is not None
    return layer_masks


def residual_mask(
    site: DropoutSite = DropoutSite.MLP_RESIDUAL,
    layer: int = 0,
    stack: Stack = Stack.DECODER,
    **options: Any,
) -> Any:
    """Return which elements of [B, T, D] a residual site keeps."""

    @jax.jit
    def drop_ones() -> Array:
        masks = layer_dropout(make_dropout(**options).for_stack(stack), layer)
        return masks.drop_residual(jnp.ones((ROWS, LENGTH, WIDTH)), site)

    return np.asarray(drop_ones()) > 0


def attention_mask(site: DropoutSite = DropoutSite.ATTENTION, **options: Any) -> Any:
    """Return which probabilities [B, H, T, S] are kept."""

    @jax.jit
    def drop_ones() -> Array:
        dropout = layer_dropout(make_dropout(**options).for_stack(Stack.DECODER)).attention(site, 4)
        assert dropout is not None
        ones, positions = jnp.ones((ROWS, 4, 1, LENGTH, LENGTH)), jnp.arange(LENGTH)
        return dropout.for_queries(positions).apply(ones, positions)

    return np.asarray(drop_ones())[:, :, 0] > 0


def embedding_mask(**options: Any) -> Any:
    """Return which elements of [B, T, D] the embedding keeps."""

    @jax.jit
    def drop_ones() -> Array:
        masks = make_dropout(**options).for_stack(Stack.DECODER)
        return masks.drop_embedding(jnp.ones((ROWS, LENGTH, WIDTH)), jnp.arange(LENGTH))

    return np.asarray(drop_ones()) > 0


default_residual_mask = cache(residual_mask)
default_attention_mask = cache(attention_mask)
OTHER_MASKS = {
    "seed": lambda: residual_mask(seed=4),
    "step": lambda: residual_mask(step=6),
    "layer": lambda: residual_mask(layer=1),
    "stack": lambda: residual_mask(stack=Stack.ENCODER),
    "attention residual": lambda: residual_mask(DropoutSite.ATTENTION_RESIDUAL),
    "cross residual": lambda: residual_mask(DropoutSite.CROSS_RESIDUAL),
    "rows": lambda: residual_mask(rows=range(ROWS, 2 * ROWS)),
    "embedding": embedding_mask,
    "next position": lambda: np.roll(default_residual_mask(), 1, axis=1),
    "next feature": lambda: np.roll(default_residual_mask(), 1, axis=2),
    "next row": lambda: np.roll(default_residual_mask(), 1, axis=0),
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_masks_of_other_coordinates_are_not_correlated(name: str):
    mask = default_residual_mask().astype(float)
    other = OTHER_MASKS[name]().astype(float)
    correlation = ((mask - 1 + RATE) * (other - 1 + RATE)).mean() / (RATE * (1 - RATE))
    assert abs(correlation) < SIGMAS / np.sqrt(mask.size)


def test_attention_masks_are_not_correlated():
    mask = default_attention_mask().astype(float)
    others = [
        attention_mask(DropoutSite.CROSS_ATTENTION),
        *(np.roll(mask, 1, axis=axis) for axis in range(4)),
    ]
    for axis, other in enumerate(others):
        correlation = ((mask - 1 + RATE) * (other - 1 + RATE)).mean() / (RATE * (1 - RATE))
        assert abs(correlation) < SIGMAS / np.sqrt(mask.size), axis


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_counts_of_kept_probabilities_are_binomial(axis: int):
    """Chi-square of the counts along each axis: neither more nor less even than independent draws."""
    mask = default_attention_mask()
    counts, draws = mask.sum(axis), mask.shape[axis]
    deviations = (counts - draws * (1 - RATE)) ** 2 / (draws * RATE * (1 - RATE))
    kurtosis = 3 + (1 - 6 * RATE * (1 - RATE)) / (draws * RATE * (1 - RATE))
    assert abs(deviations.mean() - 1) < SIGMAS * np.sqrt((kurtosis - 1) / deviations.size)


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 0.9, 1 - 2**-33])
def test_elements_are_dropped_at_the_rate_and_the_mean_is_kept(rate: float):
    size = 1 << 20

    @jax.jit
    def drop_ones() -> Array:
        return drop(jnp.ones(size), RandomKey(uint32(1), uint32(2)), jnp.arange(size), rate)

    dropped = np.asarray(drop_ones())
    deviation = np.sqrt(rate * (1 - rate) / size)
    assert abs((dropped == 0).mean() - rate) <= SIGMAS * deviation
    np.testing.assert_allclose(dropped[dropped != 0], 1 / (1 - rate), rtol=1e-6)
    assert abs(dropped.mean() - 1) <= SIGMAS * deviation / (1 - rate) + 1e-6 or rate > 0.99


def test_drop_scales_bfloat16_in_float32():
    x = jnp.full(1000, 1.0, jnp.bfloat16)
    dropped = jnp.asarray(drop(x, RandomKey(uint32(1), uint32(2)), jnp.arange(1000), 0.3))
    assert dropped.dtype == jnp.bfloat16
    assert {*np.asarray(dropped, np.float32).tolist()} == {0.0, float(jnp.bfloat16(1 / 0.7))}


def test_gradient_has_the_mask_of_the_output():
    keys, index = RandomKey(uint32(1), uint32(2)), jnp.arange(1000)

    def dropped(x: Array) -> Array:
        return jnp.asarray(drop(x, keys, index, 0.3)) * (index + 1)

    gradient = jax.grad(lambda x: dropped(x).sum())(jnp.ones(1000))
    np.testing.assert_allclose(gradient, dropped(jnp.ones(1000)))


def test_backward_pass_saves_no_mask():
    """The residuals of a layer are the keys, not one element per activation."""
    masks, x = layer_dropout(make_dropout()), jnp.ones((ROWS, LENGTH, WIDTH))
    pullback = jax.vjp(lambda x: masks.drop_residual(x, DropoutSite.MLP_RESIDUAL), x)[1]
    assert sum(leaf.size for leaf in jax.tree.leaves(pullback)) < x.size / 4


def test_rows_keep_their_masks_in_any_batch():
    whole = default_residual_mask()
    part = make_dropout(rows=[3, 1]).for_stack(Stack.DECODER)
    mask = (
        layer_dropout(part).drop_residual(jnp.ones((2, LENGTH, WIDTH)), DropoutSite.MLP_RESIDUAL)
        > 0
    )
    np.testing.assert_array_equal(mask, whole[[3, 1]])


def test_positions_keep_their_masks_in_any_order():
    order = jnp.asarray(np.random.default_rng(0).permutation(LENGTH))
    masks = layer_dropout(make_dropout().for_stack(Stack.DECODER), positions=order)
    mask = masks.drop_residual(jnp.ones((ROWS, LENGTH, WIDTH)), DropoutSite.MLP_RESIDUAL) > 0
    np.testing.assert_array_equal(mask, default_residual_mask()[:, order])


def test_sites_with_rate_0_return_their_input():
    dropout = make_dropout(config=DropoutConfig(attention=0.1))
    x = jnp.ones((ROWS, LENGTH, WIDTH))
    assert layer_dropout(dropout).drop_residual(x, DropoutSite.MLP_RESIDUAL) is x
    assert dropout.drop_embedding(x, jnp.arange(LENGTH)) is x
    assert dropout.remembered_keys(jnp.arange(LENGTH)) is None
    only_residual = make_dropout(config=DropoutConfig(residual=0.1))
    assert layer_dropout(only_residual).attention(DropoutSite.ATTENTION, 4) is None
    assert (
        make_dropout(config=DropoutConfig(embedding=0.1, fcm_ratio=(0.0, 0.1))).layer_keys(4)
        is None
    )


def remembered(ratio: tuple[float, float], rows: int = 512, length: int = 2048) -> np.ndarray:
    """Return the keys that forgetful causal masking leaves visible, bool [rows, length]."""

    @jax.jit
    def compute_keys() -> Array:
        config = DropoutConfig(fcm_ratio=ratio)
        dropout = make_dropout(rows=range(rows), config=config).for_stack(Stack.DECODER)
        keys = dropout.remembered_keys(jnp.arange(length))
        assert keys is not None
        return keys

    return np.asarray(compute_keys())


def test_forgetful_masking_never_hides_the_first_key():
    assert remembered((0.9, 0.99))[:, 0].all()


def test_forgetful_masking_draws_a_ratio_per_row():
    """The fractions of hidden keys are uniform between the two ratios, up to the binomial error of each row."""
    low, high = 0.1, 0.4
    mask = remembered((low, high))
    fractions = 1 - mask[:, 1:].mean(1)
    error = SIGMAS * np.sqrt(high * (1 - high) / (mask.shape[1] - 1))
    assert low - error < fractions.min() < low + 0.02
    assert high - 0.02 < fractions.max() < high + error
    assert abs(fractions.mean() - (low + high) / 2) < SIGMAS * (high - low) / np.sqrt(
        12 * len(fractions)
    )
    quantiles = (np.sort(fractions) - low) / (high - low) - (np.arange(len(fractions)) + 0.5) / len(
        fractions
    )
    # The bound of the Kolmogorov-Smirnov test at a significance of 1e-4.
    assert np.abs(quantiles).max() < 2.2 / np.sqrt(len(fractions)) + error / 4


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.999999])
def test_forgetful_masking_hides_keys_at_a_fixed_ratio(ratio: float):
    if not ratio:
        assert (
            make_dropout(config=DropoutConfig(fcm_ratio=(0.0, 0.0))).remembered_keys(jnp.arange(4))
            is None
        )
        return
    mask = remembered((ratio, ratio))[:, 1:]
    assert (
        abs(1 - mask.mean() - ratio) < SIGMAS * np.sqrt(ratio * (1 - ratio) / mask.size) + 2.0**-16
    )


def test_forgetful_masking_follows_positions():
    whole = remembered((0.2, 0.6), rows=ROWS)
    dropout = make_dropout(config=DropoutConfig(fcm_ratio=(0.2, 0.6))).for_stack(Stack.DECODER)
    order = np.random.default_rng(1).permutation(100)
    np.testing.assert_array_equal(dropout.remembered_keys(jnp.asarray(order)), whole[:, order])
    positions = jnp.asarray(np.stack([order] * ROWS))
    np.testing.assert_array_equal(dropout.remembered_keys(positions), whole[:, order])
