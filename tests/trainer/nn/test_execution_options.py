"""Options of the computation that change rounding only: kernels, chunks, remat, and calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.ad_checkpoint import print_saved_residuals

from prepcli.commands.testing.tiny_model import (
    TinyTransformer,
    loss_and_gradients,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
)
from prepcli.core.errors import PrepError
from prepcli.models.activation_memory import ACTIVATION_NAMES, RematPolicy
from prepcli.models.attention_kernels import AUTO, KERNEL_NAMES
from prepcli.models.param_tree import Tree, unflatten_tree
from tests.helpers.jaxprs import walk_equations
from tests.helpers.later_configs import GEMMA4
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN, LLAMA
from trainer.nn import transformer
from trainer.nn.embedding import layer_inputs
from trainer.nn.kernels import KERNELS
from trainer.nn.model_spec import AttentionOptions, ForwardConfig
from trainer.nn.token_chunks import over_token_chunks
from trainer.recipe.tables import Model as RecipeModel

# Tests that the options of a forward pass change losses and gradients by rounding only.

LENGTH = 40

OPTIONS: dict[str, dict[str, Any]] = {
    "small tiles": {"attention_options": AttentionOptions("blockwise", 8, 16)},
    "uneven tiles": {
        "attention_options": AttentionOptions("blockwise", 7, 64),
        "remat_policy": "nothing_saveable",
    },
    "MLP chunks": {"ffn_chunk_size": 9},
    "all chunked": {
        "attention_options": AttentionOptions("blockwise", 16, 8),
        "ffn_chunk_size": 16,
        "head_chunk_size": 8,
        "remat_policy": "dots_with_no_batch_dims_saveable",
        "scan_layers": False,
    },
    "named activations": {"remat_policy": ACTIVATION_NAMES},
    "offload": {
        "attention_options": AttentionOptions("blockwise", 16, 8),
        "remat_policy": ("q", "k", "v", "attention_output"),
        "offload": "residuals",
    },
}

FAMILY_CASES = [
    *(("llama-biases", name) for name in OPTIONS),
    *((family, "all chunked") for family in ("gpt_neo", "gemma2", "mixtral", "t5")),
    *((family, "named activations") for family in ("gemma2", "t5")),
    ("mixtral", "MLP chunks"),
]

# Tiles, saved activations and moves to the host. Tests of each kernel and of experts have uneven tiles and chunks.
FAST_CASES = [("llama-biases", "offload")]


@cache
def results(name: str, options: str) -> tuple[float, dict[str, Any]]:
    """Return the mean loss of a tiny model, and the gradient of each tensor."""
    config = GOLDEN[name]
    tiny = tiny_transformer(config)
    forward_config = ForwardConfig(**OPTIONS.get(options, {}))
    batch = random_batch(
        int(config["vocab_size"]), 4, LENGTH, 1, tiny.model.arch_config.encoder is not None
    )
    params = tiny.params_from_tensors(random_tensors(config))
    loss, gradients = loss_and_gradients(tiny.model, params, batch, forward_config)
    return float(loss), tiny.tensors_from_params(jax.device_get(gradients))


@pytest.mark.parametrize(("family", "options"), slow_except(FAMILY_CASES, FAST_CASES))
def test_kernels_and_chunks_change_rounding_only(family: str, options: str):
    loss, gradients = results(family, options)
    expected_loss, expected = results(family, "")
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    errors = {
        name: relative_error(gradients[name], gradient) for name, gradient in expected.items()
    }
    assert errors == pytest.approx(dict.fromkeys(expected, 0), abs=1e-5)


def test_kernel_names_match_kernels_and_recipes():
    assert tuple(KERNELS) == KERNEL_NAMES
    assert get_args(RecipeModel.model_fields["attention_kernel"].annotation) == (
        AUTO,
        *KERNEL_NAMES,
    )


def test_unknown_kernel_is_a_usage_error():
    with pytest.raises(
        PrepError, match=r"unknown `model.attention_kernel` .flash..*reference, blockwise"
    ):
        AttentionOptions("flash")


@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable"])
def test_policies_that_save_scores_exclude_blockwise_attention(policy: str):
    with pytest.raises(PrepError, match="the policy saves the scores of all tiles"):
        ForwardConfig(remat_policy=policy, attention_options=AttentionOptions("blockwise"))


# Tests of the arrays that rematerialization policies save; numeric results are in test_execution_options.

TILES = AttentionOptions("blockwise", 4, 4)

ATTENTION = ("q", "k", "v", "attention_output")

SHAPE = (2, 8)


def loss_of(tiny: TinyTransformer, forward_config: ForwardConfig) -> tuple[Any, tuple[Tree, Tree]]:
    """Return the loss as a function of its parameters, with the shapes of its arguments."""
    params = unflatten_tree(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
            for path, leaf in tiny.model.leaves.items()
        }
    )
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch: Tree = {name: jax.ShapeDtypeStruct(SHAPE, dtype) for name, dtype in dtypes.items()}

    def loss(params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        return transformer.loss_sums(params, batch, tiny.model, forward_config).loss

    return loss, (params, batch)


def gradient_equations(**options: Any) -> list[Any]:
    """Return the equations of the traced gradient of a LLaMA's loss."""
    loss, arguments = loss_of(tiny_transformer(LLAMA), ForwardConfig(**options))
    return list(walk_equations(jax.make_jaxpr(jax.grad(loss))(*arguments).jaxpr))


def num_saved_activations(
    policy: RematPolicy, kernel: str, capsys: pytest.CaptureFixture[str]
) -> int:
    """Return the number of activations [B, T, ...] that the gradient of a LLaMA's loss saves."""
    options = AttentionOptions(kernel, 4, 4)
    forward_config = ForwardConfig(
        remat_policy=policy, scan_layers=False, attention_options=options
    )
    loss, arguments = loss_of(tiny_transformer(LLAMA), forward_config)
    print_saved_residuals(loss, *arguments)
    rows, length = SHAPE
    return len(re.findall(rf"^f32\[{rows},{length},", capsys.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize("kernel", slow_except(["reference", "blockwise"], ["blockwise"]))
def test_named_activations_are_saved(kernel: str, capsys: pytest.CaptureFixture[str]):
    """`mlp_output` is not saved: the backward pass of a layer without output norms does not read it."""
    arrays_per_layer = dict.fromkeys(ACTIVATION_NAMES, 1) | {"mlp_hidden": 2, "mlp_output": 0}
    # Blockwise attention saves the normalizers too.
    arrays_per_layer["attention_output"] = 2 if kernel == "blockwise" else 1
    num_without = num_saved_activations("nothing_saveable", kernel, capsys)
    for name, num_arrays in arrays_per_layer.items():
        num_saved = num_saved_activations((name,), kernel, capsys) - num_without
        assert num_saved == num_arrays * LLAMA["num_hidden_layers"], name


def test_saved_attention_is_not_computed_again():
    """Each pass over the tiles has one `lax.cond`, which skips tiles without visible keys."""
    options: dict[str, Any] = {"scan_layers": False, "attention_options": TILES}
    none, nothing, attention = (
        sum(
            equation.primitive.name == "cond"
            for equation in gradient_equations(remat_policy=policy, **options)
        )
        for policy in ("none", "nothing_saveable", ATTENTION)
    )
    assert attention == none
    assert nothing == none + LLAMA["num_hidden_layers"]


@pytest.mark.parametrize("scan_layers", slow_except([True, False], [True]))
def test_offload_moves_the_inputs_of_layers_to_host_memory(scan_layers: bool):
    options: dict[str, Any] = {
        "remat_policy": ATTENTION,
        "scan_layers": scan_layers,
        "attention_options": TILES,
    }
    assert host_moves(**options) == 0
    assert host_moves(offload="residuals", **options) == (
        1 if scan_layers else LLAMA["num_hidden_layers"]
    )


def host_moves(**options: Any) -> int:
    """Return the number of moves to host memory in the gradient of a LLaMA's loss."""
    moves = [
        equation
        for equation in gradient_equations(**options)
        if equation.primitive.name == "device_put"
    ]
    return sum("host" in str(move.params["devices"]).lower() for move in moves)


# Hidden states after each layer: those of the whole model at the end, and those of transformers in between.

TOKENS = np.random.default_rng(0).integers(0, 29, (1, 11))


def states_of(config: dict[str, Any], scan: bool, axis: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the states by layer, and the input of the LM head that the compiled model computes."""
    tiny = tiny_transformer(config, scan, axis)
    params = tiny.params_from_tensors(random_tensors(config))
    options = ForwardConfig(scan_layers=scan)
    tokens = jnp.asarray(TOKENS, jnp.int32)

    # `prep verify --logits` computes the layers without jit. Here it would compile each operation by itself.
    @jax.jit
    def compute_states(params: Tree) -> tuple[list[Array], Array]:
        states = [*transformer.hidden_states_by_layer(params, tokens, tiny.model, options)]
        states[-1] = transformer.lm_head_input(params, states[-1], tiny.model, options)
        return states, transformer.hidden_states(params, tokens, tiny.model, options)

    states, expected = compute_states(params)
    return [np.asarray(state) for state in states], np.asarray(expected)


@pytest.mark.parametrize(
    "family", slow_except(["llama", "gpt_neo", "gemma2", "deepseek_v3"], ["gemma2", "deepseek_v3"])
)
def test_hidden_states_match_transformers(family: str):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from prepcli.commands.testing.tiny_model import torch_model

    config = GOLDEN[family]
    model = torch_model(config, random_tensors(config))
    with torch.no_grad():
        output = model(torch.tensor(TOKENS), use_cache=False, output_hidden_states=True)
    states, _ = states_of(config, scan=True, axis=0)
    for state, expected in zip(states, output.hidden_states, strict=True):
        assert relative_error(state, expected.numpy()) < 2e-5


# Inputs of layers from their tokens, and keys of earlier layers, against NumPy and on meshes.

LAYERS, ROWS, WIDTH, MODEL_WIDTH = 4, 31, 6, 24


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


# Tests of functions of tokens that are applied chunk by chunk.

RNG = np.random.default_rng(0)

X = RNG.standard_normal((2, 13, 6), np.float32)

WEIGHTS = {
    name: RNG.standard_normal(shape, np.float32)
    for name, shape in {"up": (6, 9), "down": (9, 4)}.items()
}


def feed_forward(x: Array, weights: Mapping[str, Array], constants: None = None) -> Array:
    """Compute two layers [B, C, 6] -> [B, C, 4]."""
    return jax.nn.silu(x @ weights["up"]) @ weights["down"]


@pytest.mark.parametrize("chunk_size", slow_except([-1, 1, 4, 13, 100], [-1, 4]))
def test_chunks_change_neither_output_nor_gradients(chunk_size: int):
    def loss(x: Array, weights: Mapping[str, Array]) -> tuple[Array, Array]:
        output = over_token_chunks(feed_forward, x.shape[1], chunk_size)(x, weights, None)
        return jnp.square(output).sum(), output

    def whole_loss(x: Array, weights: Mapping[str, Array]) -> tuple[Array, Array]:
        output = feed_forward(x, weights)
        return jnp.square(output).sum(), output

    @jax.jit
    def differentiate(x: Array, weights: Mapping[str, Array]) -> Any:
        return [jax.grad(f, argnums=(0, 1), has_aux=True)(x, weights) for f in (loss, whole_loss)]

    (gradients, output), (expected, expected_output) = differentiate(X, WEIGHTS)
    np.testing.assert_allclose(output, expected_output, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients, expected
    )


def test_chunks_have_tokens_of_every_shard():
    """With 6 tokens in 2 shards, one chunk has tokens 0, 1, 3, 4, and the other one tokens 2 and 5 with padding."""
    x = jnp.arange(1.0, 7).reshape(1, 6, 1)

    def add_sum_of_chunk(chunk: Array, weights: None, constants: None) -> Array:
        return chunk + 100 * chunk.sum(1, keepdims=True)

    output = over_token_chunks(add_sum_of_chunk, 6, 2, num_shards=2)(x, None, None)
    assert output[0, :, 0].tolist() == [1201, 1202, 903, 1204, 1205, 906]


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    """The gradient is a sum of 4,096 equal terms. In bfloat16 the sum would stop growing at 256 of them."""
    x, weight = jnp.ones((1, 4096, 1), jnp.bfloat16), jnp.ones((1, 1), jnp.bfloat16)

    def loss(weight: Array) -> Array:
        multiply = over_token_chunks(lambda chunk, w, _: chunk @ w, 4096, 1)
        return multiply(x, weight, None).astype(jnp.float32).sum()

    assert float(jax.grad(loss)(weight)[0, 0]) == 4096


def test_one_chunk_saves_only_products_with_weights():
    def pull_back(x: Array, weights: Mapping[str, Array]) -> Any:
        run = over_token_chunks(feed_forward, x.shape[1], -1)
        return jax.vjp(lambda x, weights: run(x, weights, None), x, weights)[1]

    residuals = jax.tree.leaves(jax.eval_shape(pull_back, X, WEIGHTS))
    assert sorted(array.shape for array in residuals if array.ndim == 3) == [X.shape, (2, 13, 9)]
