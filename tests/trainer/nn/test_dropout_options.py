"""Tests of dropout in whole models: each site of a layer, and equal masks for all options of a forward pass."""

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
from prepcli.models.dropout_config import DropoutConfig
from prepcli.models.param_tree import Tree
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN
from trainer.nn import transformer
from trainer.nn.attention import attention
from trainer.nn.attention_mask import causal_mask, rotary_cos_sin
from trainer.nn.block import BLOCKS
from trainer.nn.context import LayerContext
from trainer.nn.dropout import Dropout, DropoutSite, LayerDropout, RandomKey, step_dropout
from trainer.nn.layer_stack import layer_weights
from trainer.nn.mlp import mlp_hidden
from trainer.nn.model_spec import AttentionOptions, ForwardConfig
from trainer.nn.projections import BlockWeights, linear, norm

ROWS, LENGTH, WIDTH = 2, 6, 24
CONFIG = DropoutConfig(0.2, 0.3, 0.25, (0.1, 0.4))


def make_dropout(rows: int, config: DropoutConfig = CONFIG) -> Dropout:
    return step_dropout(
        config, seed=1, step=jnp.int32(2), row_ids=jnp.arange(rows, dtype=jnp.uint32)
    )


@cache
def first_layer_keys() -> RandomKey:
    """Return the keys of the rows in the first layer."""
    keys = make_dropout(ROWS).layer_keys(1)
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


@pytest.mark.parametrize("family", ["mistral", "opt-350m", "gemma2", "gpt_neox", "gptj", "exaone4"])
def test_block_drops_outputs_before_residual_additions(family: str):
    tiny, tensors = tiny_transformer(GOLDEN[family]), random_tensors(GOLDEN[family])
    model, arch_config = tiny.model, tiny.model.arch_config
    params = tiny.params_from_tensors(tensors)
    keys = first_layer_keys()
    block = BLOCKS[arch_config.block_type]
    x = np.random.default_rng(0).standard_normal((ROWS, LENGTH, WIDTH), np.float32)

    @jax.jit
    def outputs(x: Array, params: Tree) -> tuple[Array, Array, Array]:
        layers = layer_weights(params, "", arch_config, model, ForwardConfig(scan_layers=False))
        assert isinstance(layers, list)
        layer = cast(BlockWeights, layers[0])
        masks = LayerDropout(CONFIG, keys, jnp.arange(LENGTH))
        cos_sin = rotary_cos_sin(arch_config.rope, jnp.arange(LENGTH)) if arch_config.rope else None
        mask = dataclasses.replace(causal_mask(jnp.arange(LENGTH)), cos_sin=cos_sin)
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
# The layers of the second case are not scanned.
FAST_CASES = [("t5-short", "scanned tiles"), ("t5-short", "saved")]


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
        dropout = step_dropout(CONFIG, seed=1, step=jnp.int32(2), row_ids=dropout_rows)
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
