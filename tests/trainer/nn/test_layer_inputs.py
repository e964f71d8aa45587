"""Inputs of layers from their tokens, and keys of earlier layers, against NumPy and on meshes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import (
    UNSCANNED,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
)
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import Tree, flatten_tree
from tests.helpers.later_configs import GEMMA4
from trainer.distributed.sharding import make_sharding_context, order_tokens
from trainer.nn import transformer
from trainer.nn.embedding import layer_inputs
from trainer.nn.model_spec import AttentionOptions, ForwardConfig

LAYERS, ROWS, WIDTH, MODEL_WIDTH = 4, 31, 6, 24
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 30}


def test_layer_inputs_equal_numpy():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((LAYERS, ROWS, WIDTH))
    projection = rng.standard_normal((LAYERS, WIDTH, MODEL_WIDTH))
    scale = rng.standard_normal(WIDTH)
    x = rng.standard_normal((1, 3, MODEL_WIDTH))
    params: Tree = {
        "embed": {"layer_tokens": jnp.asarray(table, jnp.float32)},
        "layer_inputs": {
            "projection": {"weight": jnp.asarray(projection, jnp.float32)},
            "norm": {"scale": jnp.asarray(scale, jnp.float32)},
        },
    }
    # The last token has no row in the table.
    tokens = jnp.asarray([[3, 30, 31]])
    model = tiny_transformer(GEMMA4).model
    inputs = layer_inputs(params, tokens, jnp.asarray(x, jnp.float32), model, ForwardConfig())
    projected = np.einsum("btd,lpd->lbtp", x, projection) / np.sqrt(MODEL_WIDTH)
    mean_square = (projected**2).mean(-1, keepdims=True) + model.arch_config.norm_eps
    embedded = table[:, [[3, 30, 0]]] * np.sqrt(WIDTH)
    expected = (projected / np.sqrt(mean_square) * scale + embedded) / np.sqrt(2)
    assert inputs is not None
    np.testing.assert_allclose(np.asarray(inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_loss_and_gradients_do_not_depend_on_the_mesh():
    tiny = tiny_transformer(GEMMA4 | EVEN)
    params = tiny.params_from_tensors(random_tensors(GEMMA4 | EVEN))
    batch = {name: jnp.asarray(column) for name, column in random_batch(30, 2, 16, 1).items()}

    def loss_and_gradients(forward_config: ForwardConfig) -> tuple[jax.Array, Tree]:
        columns = {
            name: order_tokens(column.T, forward_config.sharding).T
            for name, column in batch.items()
        }

        def loss(params: Tree) -> jax.Array:
            return transformer.loss_sums(params, columns, tiny.model, forward_config).loss

        return jax.jit(jax.value_and_grad(loss))(params)

    expected_loss, expected = loss_and_gradients(UNSCANNED)
    sharded = dataclasses.replace(
        UNSCANNED,
        sharding=make_sharding_context(parse_mesh("dp:2,mp:2,sp:2")),
        attention_options=AttentionOptions("blockwise"),
        ffn_chunk_size=4,
        remat_policy="nothing_saveable",
    )
    loss, gradients = loss_and_gradients(sharded)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    expected_leaves = flatten_tree(expected)
    for path, gradient in flatten_tree(gradients).items():
        if expected_leaves[path].any():
            error = relative_error(np.asarray(gradient), np.asarray(expected_leaves[path]))
            assert error < 1e-5, path
