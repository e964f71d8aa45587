"""Dropout: random bits, masks, and options that change rounding only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.commands.testing.tiny_model import (
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
)
from prepcli.models.layer_config import DropoutConfig
from prepcli.models.param_tree import Tree
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN
from trainer.nn import transformer
from trainer.nn.attention import attention
from trainer.nn.attention_mask import causal_mask, rotary_cos_sin
from trainer.nn.block import BLOCKS
from trainer.nn.context import LayerContext
from trainer.nn.dropout import (
    Dropout,
    DropoutSite,
    LayerDropout,
    RandomKey,
    Stack,
    derive_key,
    drop,
    random_bits,
    step_dropout,
    uint32,
)
from trainer.nn.layer_stack import layer_weights
from trainer.nn.mlp import mlp_hidden
from trainer.nn.model_spec import AttentionOptions, ForwardConfig
from trainer.nn.projections import BlockWeights, linear, norm

# Tests of random masks: their coordinates, their statistics, forgetful causal masking, and the sites of a layer.

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


@pytest.mark.parametrize(
    "name",
    slow_except(OTHER_MASKS, ["seed", "step", "layer", "rows", "embedding", "next position"]),
)
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

    def pull_back(x: Array) -> Any:
        return jax.vjp(lambda x: masks.drop_residual(x, DropoutSite.MLP_RESIDUAL), x)[1]

    saved = jax.tree.leaves(jax.eval_shape(pull_back, x))
    assert sum(leaf.size for leaf in saved) < x.size / 4


def test_rows_keep_their_masks_in_any_batch():
    whole = default_residual_mask()
    part = make_dropout(rows=[3, 1]).for_stack(Stack.DECODER)

    @jax.jit
    def drop_part(x: Array) -> Array:
        return layer_dropout(part).drop_residual(x, DropoutSite.MLP_RESIDUAL)

    mask = np.asarray(drop_part(jnp.ones((2, LENGTH, WIDTH)))) > 0
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
    remembered_keys = jax.jit(lambda positions: dropout.remembered_keys(positions))
    np.testing.assert_array_equal(remembered_keys(order), whole[:, order])
    np.testing.assert_array_equal(remembered_keys(np.stack([order] * ROWS)), whole[:, order])


# Tests of dropout in whole models: each site of a layer, and equal masks for all options of a forward pass.

OPTION_ROWS, OPTION_LENGTH, OPTION_WIDTH = 2, 6, 24

OPTION_CONFIG = DropoutConfig(0.2, 0.3, 0.25, (0.1, 0.4))


def option_make_dropout(rows: int, config: DropoutConfig = OPTION_CONFIG) -> Dropout:
    return step_dropout(
        config, seed=1, step=jnp.int32(2), row_ids=jnp.arange(rows, dtype=jnp.uint32)
    )


@cache
def first_layer_keys() -> RandomKey:
    """Return the keys of the rows in the first layer."""
    keys = option_make_dropout(OPTION_ROWS).layer_keys(1)
    assert keys is not None
    return RandomKey(*(words[0] for words in keys))


def block_by_formula(x: Array, weights: Mapping[str, Any], context: LayerContext) -> Array:
    """Compute a layer with a dropout of each output before its residual addition."""
    arch_config, masks = context.arch_config, context.dropout
    assert masks is not None

    def normed(name: str, x: Array) -> Array:
        return norm(x, weights[name], arch_config)

    def attend(x: Array) -> Array:
        return attention(x, weights["attn"], context)[0]

    def feed_forward(x: Array) -> Array:
        return linear(mlp_hidden(x, weights["mlp"], arch_config), weights["mlp"]["down"])

    def drop(x: Array, site: DropoutSite) -> Array:
        return masks.drop_residual(x, site)

    attended, fed = DropoutSite.ATTENTION_RESIDUAL, DropoutSite.MLP_RESIDUAL
    match arch_config.block_type:
        case "pre":
            x = x + drop(attend(normed("attn_norm", x)), attended)
            return x + drop(feed_forward(normed("mlp_norm", x)), fed)
        case "post":
            x = normed("attn_norm", x + drop(attend(x), attended))
            return normed("mlp_norm", x + drop(feed_forward(x), fed))
        case "output_norm":
            x = x + drop(normed("attn_post_norm", attend(x)), attended)
            return x + drop(normed("mlp_post_norm", feed_forward(x)), fed)
        case "sandwich":
            x = x + drop(normed("attn_post_norm", attend(normed("attn_norm", x))), attended)
            return x + drop(normed("mlp_post_norm", feed_forward(normed("mlp_norm", x))), fed)
        case _:
            mlp_norm = "mlp_norm" if arch_config.block_type == "parallel" else "attn_norm"
            output = drop(feed_forward(normed(mlp_norm, x)), fed)
            return x + drop(attend(normed("attn_norm", x)), attended) + output


@pytest.mark.parametrize(
    "family",
    slow_except(
        ["mistral", "opt-350m", "gemma2", "gpt_neox", "gptj", "exaone4"],
        ["mistral", "gptj"],
    ),
)
def test_block_drops_outputs_before_residual_additions(family: str):
    tiny, tensors = tiny_transformer(GOLDEN[family]), random_tensors(GOLDEN[family])
    model, arch_config = tiny.model, tiny.model.arch_config
    params = tiny.params_from_tensors(tensors)
    keys = first_layer_keys()
    block = BLOCKS[arch_config.block_type]
    x = np.random.default_rng(0).standard_normal(
        (OPTION_ROWS, OPTION_LENGTH, OPTION_WIDTH), np.float32
    )

    @jax.jit
    def outputs(x: Array, params: Tree) -> tuple[Array, Array, Array]:
        layers = layer_weights(params, "", arch_config, model, ForwardConfig(scan_layers=False))
        assert isinstance(layers, list)
        layer = cast(BlockWeights, layers[0])
        masks = LayerDropout(OPTION_CONFIG, keys, jnp.arange(OPTION_LENGTH))
        cos_sin = (
            rotary_cos_sin(arch_config.rope, jnp.arange(OPTION_LENGTH))
            if arch_config.rope
            else None
        )
        mask = dataclasses.replace(causal_mask(jnp.arange(OPTION_LENGTH)), cos_sin=cos_sin)
        context = LayerContext(arch_config, mask, dropout=masks, ffn_chunk_size=4)
        output = block(x, layer, context)[0]
        without = block(x, layer, dataclasses.replace(context, dropout=None))[0]
        return output, block_by_formula(x, layer, context), without

    output, expected, without = outputs(jnp.asarray(x), params)
    np.testing.assert_allclose(output, expected, atol=2e-5)
    assert relative_error(np.asarray(without), np.asarray(output)) > 0.05


OPTIONS: dict[str, dict[str, Any]] = {
    "all chunked": {
        "attention_options": AttentionOptions("blockwise", 16, 7),
        "ffn_chunk_size": 16,
        "head_chunk_size": 8,
        "remat_policy": "nothing_saveable",
        "scan_layers": False,
    },
    "scanned tiles": {
        "attention_options": AttentionOptions("blockwise", 7, 64),
        "ffn_chunk_size": 9,
    },
    "saved dots": {"remat_policy": "dots_with_no_batch_dims_saveable"},
    "saved": {"remat_policy": "everything_saveable", "scan_layers": False},
}

# An encoder and a decoder of one layer each compile in half of the time.
CONFIGS = GOLDEN | {"t5-short": GOLDEN["t5"] | {"num_layers": 1, "num_decoder_layers": 1}}

FAMILIES = ("llama-biases", "t5", "t5-short", "gpt_neo", "gemma2", "mixtral", "opt-350m")

FAST_CASES = [("t5-short", "saved")]


@cache
def results(name: str, options: str) -> tuple[float, dict[str, Any]]:
    """Return the mean loss with dropout and forgetful causal masking, and the gradient of each tensor."""
    config = CONFIGS[name]
    tiny, forward_config = tiny_transformer(config), ForwardConfig(**OPTIONS.get(options, {}))
    arrays = random_batch(
        int(config["vocab_size"]), 3, 40, 1, tiny.model.arch_config.encoder is not None
    )
    batch = {name: jnp.asarray(array) for name, array in arrays.items()}

    def mean_loss(params: Any, dropout_rows: Array) -> Array:
        dropout = step_dropout(OPTION_CONFIG, seed=1, step=jnp.int32(2), row_ids=dropout_rows)
        sums = transformer.loss_sums(params, batch, tiny.model, forward_config, dropout=dropout)
        return sums.loss / sums.weight

    params = tiny.params_from_tensors(random_tensors(config))
    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(
        params, jnp.arange(3, dtype=jnp.uint32)
    )
    return float(loss), tiny.tensors_from_params(jax.device_get(gradients))


@pytest.mark.parametrize(
    ("family", "options"),
    slow_except([(family, name) for family in FAMILIES for name in OPTIONS], FAST_CASES),
)
def test_options_change_dropout_by_rounding_only(family: str, options: str):
    loss, gradients = results(family, options)
    expected_loss, expected = results(family, "")
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    errors = {
        name: relative_error(gradients[name], gradient) for name, gradient in expected.items()
    }
    assert errors == pytest.approx(dict.fromkeys(expected, 0), abs=1e-5)


def make_key(first: int, second: int) -> RandomKey:
    return RandomKey(uint32(first), uint32(second))


# Known answers from kat_vectors of Random123.
@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_derived_keys_are_known_answers_of_threefry(
    key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]
):
    assert tuple(map(int, derive_key(make_key(*key), *counter))) == expected


def test_bits_are_the_documented_hash():
    first, second, index = 0x12345678, 0x9ABCDEF0, 77
    x = index ^ first
    x = ((x ^ x >> 16) * 0x21F0AAAD + second) % 2**32
    x = (x ^ x >> 15) * 0xD35A2D97 % 2**32
    assert int(random_bits(make_key(first, second), uint32(index))) == x ^ x >> 15


def test_negative_integers_count_modulo_two_to_the_32():
    key = make_key(1, 2)
    np.testing.assert_array_equal(derive_key(key, jnp.int32(-1)), derive_key(key, 2**32 - 1))
