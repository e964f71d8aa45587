"""Layers of a block: norms, linear maps, MLPs, convolutions and scans."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax import Array

from prepcli.models.activation_memory import SCAN_CHUNK_SIZE, SELECTIVE_SCAN_CHUNK_SIZE
from prepcli.models.architecture import ACTIVATIONS
from prepcli.models.layer_config import DropoutConfig
from prepcli.models.lora import LORA_A, LORA_B, expert_projections
from prepcli.models.lora_config import LoraConfig
from prepcli.models.param_tree import Tree, flatten_tree, unflatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import ALL_CONFIGS, GPT2, LLAMA
from tests.helpers.tiny_configs import GOLDEN
from tests.trainer.nn.test_attention import make_arch
from trainer.nn import transformer
from trainer.nn.context import AdapterDropout
from trainer.nn.dropout import LayerDropout, RandomKey, derive_key, step_dropout
from trainer.nn.initialization import init_params
from trainer.nn.mixers import causal_conv
from trainer.nn.mlp import ACTIVATION_FUNCTIONS
from trainer.nn.model_spec import ForwardConfig, ModelSpec, build_model
from trainer.nn.projections import norm, xielu
from trainer.nn.scans import Recurrence, SelectiveInputs, chunked_scan, selective_scan

# Tests of norms against their formulas.

RNG = np.random.default_rng(0)

X, SCALE, BIAS = (
    RNG.standard_normal((2, 3, 8)) * 3 + 1,
    RNG.standard_normal(8),
    RNG.standard_normal(8),
)

WEIGHTS = {"scale": jnp.asarray(SCALE, jnp.float32), "bias": jnp.asarray(BIAS, jnp.float32)}


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm_of_bfloat16_is_computed_in_float32(kind: Literal["layer", "rms"]):
    arch_config = dataclasses.replace(make_arch(), norm=kind)
    identity = {name: jnp.full(4096, float(name == "scale"), jnp.bfloat16) for name in WEIGHTS}
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4096)) + 100, jnp.bfloat16)
    x_float64 = np.asarray(x, np.float64)
    centered = x_float64 - (x_float64.mean() if kind == "layer" else 0)
    expected = centered / np.sqrt((centered**2).mean() + arch_config.norm_eps)
    output = norm(x, identity, arch_config)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(output, np.float64), expected, rtol=5e-3, atol=5e-3)


def test_rms_offset_scales_before_rounding():
    """A scale of 1 + 1/512, which bfloat16 rounds to 1, changes the output."""
    arch_config = dataclasses.replace(make_arch(), norm="rms_offset", norm_eps=1e-6)
    x = jnp.asarray(np.linspace(1, 2, 256)[None], jnp.bfloat16)
    unscaled, scaled = (
        norm(x, {"scale": jnp.full(256, s, jnp.bfloat16)}, arch_config) for s in (0.0, 1 / 512)
    )
    assert np.any(np.asarray(unscaled) != np.asarray(scaled))


# Tests of activations against their formulas, and against transformers if it is installed.

MLP_X = np.linspace(-8, 8, 401)

ERF = np.array([math.erf(x / math.sqrt(2)) for x in MLP_X])

TANH = 0.5 * MLP_X * (1 + np.tanh(math.sqrt(2 / math.pi) * (MLP_X + 0.044715 * MLP_X**3)))

SILU = MLP_X / (1 + np.exp(-MLP_X))

FORMULAS = {
    "gelu": 0.5 * MLP_X * (1 + ERF), "gelu_new": TANH, "gelu_pytorch_tanh": TANH, "gelu_fast": TANH,
    "quick_gelu": MLP_X / (1 + np.exp(-1.702 * MLP_X)), "silu": SILU, "swish": SILU, "relu": np.maximum(MLP_X, 0),
    "relu2": np.maximum(MLP_X, 0) ** 2,
}  # fmt: skip


def test_every_activation_has_a_function_and_a_formula():
    assert {*ACTIVATION_FUNCTIONS} == {*ACTIVATIONS} == {*FORMULAS}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_matches_formula(name: str):
    np.testing.assert_allclose(
        ACTIVATION_FUNCTIONS[name](jnp.asarray(MLP_X, jnp.float32)),
        FORMULAS[name],
        rtol=1e-5,
        atol=2e-6,
    )


# xIELU, compared with its equation in NumPy.

XIELU_X = np.array([-300.0, -2.0, -1e-7, 0.0, 1e-7, 0.5, 300.0], np.float32)

ALPHA_P = 0.4

ALPHA_N = -1.1

BETA = 0.5

EPS = -1e-6


def xielu_weights() -> dict[str, dict[str, jax.Array]]:
    """Return the parameters of xIELU in one layer."""
    return {
        "xielu_alpha_p": {"weight": jnp.array(ALPHA_P)},
        "xielu_alpha_n": {"weight": jnp.array(ALPHA_N)},
        "xielu_beta": {"scale": jnp.array(BETA)},
        "xielu_eps": {"scale": jnp.array(EPS)},
    }


def test_xielu_matches_its_equation():
    x = XIELU_X.astype(np.float64)
    positive = np.log1p(np.exp(ALPHA_P)) * x**2
    negative = (BETA + np.log1p(np.exp(ALPHA_N))) * (np.expm1(np.minimum(x, EPS)) - x)
    expected = np.where(x > 0, positive, negative) + BETA * x
    np.testing.assert_allclose(
        xielu(jnp.asarray(XIELU_X), xielu_weights()), expected, rtol=1e-6, atol=1e-9
    )


def test_gradients_of_xielu_are_finite_and_spare_constants():
    def total(x: jax.Array, weights: dict[str, dict[str, jax.Array]]) -> jax.Array:
        return xielu(x, weights).sum()

    differentiate = jax.jit(jax.grad(total, argnums=(0, 1)))
    x_gradient, gradients = differentiate(jnp.asarray(XIELU_X), xielu_weights())
    assert np.isfinite(x_gradient).all()
    assert gradients["xielu_beta"]["scale"] == gradients["xielu_eps"]["scale"] == 0
    assert gradients["xielu_alpha_p"]["weight"] != 0
    assert gradients["xielu_alpha_n"]["weight"] != 0


# Tests of the causal convolution against its sum, in NumPy.

CONV_X = RNG.standard_normal((2, 7, 3, 2)).astype(np.float32)

TAPS = RNG.standard_normal((3, 2, 4)).astype(np.float32)

CONV_BIAS = RNG.standard_normal((3, 2)).astype(np.float32)

CONV_WEIGHTS = {"weight": jnp.asarray(TAPS), "bias": jnp.asarray(CONV_BIAS)}


def convolve(x: np.ndarray) -> np.ndarray:
    """Compute y_t = sum_d w_d x_(t-d) + b."""
    y = np.zeros_like(x) + CONV_BIAS
    for t in range(x.shape[1]):
        for distance in range(min(4, t + 1)):
            y[:, t] += TAPS[..., 3 - distance] * x[:, t - distance]
    return y


def test_causal_conv_continues_from_earlier_inputs():
    first, state = causal_conv(jnp.asarray(CONV_X[:, :2]), CONV_WEIGHTS, None, None)
    second, state = causal_conv(jnp.asarray(CONV_X[:, 2:]), CONV_WEIGHTS, state, None)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), convolve(CONV_X), atol=1e-6)
    np.testing.assert_array_equal(state, CONV_X[:, 4:])


def test_causal_conv_reads_no_earlier_document():
    positions = jnp.asarray([[0, 1, 2, 0, 0, 1, 2], [-1, -1, 0, 1, 2, 3, 4]])
    output, _ = causal_conv(jnp.asarray(CONV_X), CONV_WEIGHTS, None, positions)
    documents = [convolve(CONV_X[:1, start:stop]) for start, stop in ((0, 3), (3, 4), (4, 7))]
    np.testing.assert_allclose(output[:1], np.concatenate(documents, axis=1), atol=1e-6)
    np.testing.assert_allclose(output[1:, 2:], convolve(CONV_X[1:, 2:]), atol=1e-6)


# Tests of linear recurrences in chunks against the recurrences, token by token in NumPy.

ROWS, GROUPS, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 2, 4, 5

# Compiled, because JAX would compile each operation of a scan by itself.
scan = jax.jit(chunked_scan)


def random_inputs(length: int, *, has_beta: bool, starts: tuple[int, ...] = ()) -> Recurrence:
    """Return random inputs, with documents that start at some tokens of the first row."""
    rng = np.random.default_rng(length)
    keys = rng.standard_normal((ROWS, length, GROUPS, KEY_DIM))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    is_start = np.zeros((ROWS, length), bool)
    is_start[0, list(starts)] = True
    head_shape = (ROWS, length, GROUPS, HEADS)
    beta = None
    if has_beta:
        beta = jnp.asarray(rng.uniform(0, 1, head_shape), jnp.float32)
    return Recurrence(
        q=jnp.asarray(rng.standard_normal((ROWS, length, GROUPS, KEY_DIM)), jnp.float32),
        k=jnp.asarray(keys, jnp.float32),
        v=jnp.asarray(rng.standard_normal((*head_shape, VALUE_DIM)), jnp.float32),
        log_decay=-jnp.asarray(rng.exponential(0.3, head_shape), jnp.float32),
        beta=beta,
        is_start=jnp.asarray(is_start),
    )


def scan_by_token(inputs: Recurrence) -> tuple[np.ndarray, np.ndarray]:
    """Compute S_t = a_t S_(t-1) + k_t u_t^T and y_t = S_t^T q_t in float64."""
    q, k, v, log_decay = (
        np.asarray(x, np.float64) for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay)
    )
    beta = None if inputs.beta is None else np.asarray(inputs.beta, np.float64)
    is_start = np.asarray(inputs.is_start)
    length = q.shape[1]
    state = np.zeros((ROWS, GROUPS, HEADS, KEY_DIM, VALUE_DIM))
    outputs = np.zeros((ROWS, length, GROUPS, HEADS, VALUE_DIM))
    for t in range(length):
        state[is_start[:, t]] = 0
        state *= np.exp(log_decay[:, t])[..., None, None]
        key = k[:, t, :, None]
        update = v[:, t]
        if beta is not None:
            predicted = (state * key[..., None]).sum(-2)
            update = beta[:, t, ..., None] * (update - predicted)
        state += key[..., None] * update[..., None, :]
        outputs[:, t] = (state * q[:, t, :, None, :, None]).sum(-2)
    return outputs, state


@pytest.mark.parametrize("has_beta", [True, False])
@pytest.mark.parametrize(
    "length",
    slow_except([1, 5, SCAN_CHUNK_SIZE, 2 * SCAN_CHUNK_SIZE + 3], [1, 2 * SCAN_CHUNK_SIZE + 3]),
)
def test_chunked_scan_equals_the_recurrence(length: int, has_beta: bool):
    inputs = random_inputs(length, has_beta=has_beta)
    outputs, state = scan(inputs, None)
    expected_outputs, expected_state = scan_by_token(inputs)
    np.testing.assert_allclose(outputs, expected_outputs, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


@pytest.mark.parametrize("has_beta", [True, False])
def test_chunked_scan_starts_documents_with_a_zero_state(has_beta: bool):
    starts = (0, 3, 4, SCAN_CHUNK_SIZE, SCAN_CHUNK_SIZE + 40)
    inputs = random_inputs(2 * SCAN_CHUNK_SIZE + 3, has_beta=has_beta, starts=starts)
    # A state that is not reset must still be visible after a chunk.
    inputs = inputs._replace(log_decay=inputs.log_decay / 10)
    outputs, state = scan(inputs, None)
    expected_outputs, expected_state = scan_by_token(inputs)
    np.testing.assert_allclose(outputs, expected_outputs, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


def test_chunked_scan_continues_from_a_state():
    inputs = random_inputs(70, has_beta=True)
    whole, last_state = scan(inputs, None)
    first, state = scan(jax.tree.map(lambda x: x[:, :69], inputs), None)
    second, state = scan(jax.tree.map(lambda x: x[:, 69:], inputs), state)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=1e-5)
    np.testing.assert_allclose(state, last_state, atol=1e-5)


def test_chunked_scan_has_finite_gradients_under_strong_decay():
    inputs = random_inputs(SCAN_CHUNK_SIZE, has_beta=True)
    inputs = inputs._replace(log_decay=inputs.log_decay * 1e3)

    def loss(q: jax.Array, log_decay: jax.Array) -> jax.Array:
        outputs, _ = chunked_scan(inputs._replace(q=q, log_decay=log_decay), None)
        return outputs.sum()

    compute_gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for gradient in compute_gradients(inputs.q, inputs.log_decay):
        assert np.isfinite(gradient).all()


# Tests of the selective scan in chunks against the recurrence, token by token in NumPy.

SELECTIVE_ROWS, CHANNELS, STATE = 2, 4, 3

LENGTH = 2 * SELECTIVE_SCAN_CHUNK_SIZE + 5


def selective_random_inputs(
    length: int, starts: tuple[int, ...] = ()
) -> tuple[SelectiveInputs, Array]:
    """Return random inputs and rates, with documents that start at some tokens of the first row."""
    rng = np.random.default_rng(length)
    is_start = np.zeros((SELECTIVE_ROWS, length), bool)
    is_start[0, list(starts)] = True
    inputs = SelectiveInputs(
        q=jnp.asarray(rng.standard_normal((SELECTIVE_ROWS, length, STATE)), jnp.float32),
        k=jnp.asarray(rng.standard_normal((SELECTIVE_ROWS, length, STATE)), jnp.float32),
        v=jnp.asarray(rng.standard_normal((SELECTIVE_ROWS, length, CHANNELS)), jnp.float32),
        dt=jnp.asarray(rng.exponential(0.3, (SELECTIVE_ROWS, length, CHANNELS)), jnp.float32),
        is_start=jnp.asarray(is_start),
    )
    return inputs, -jnp.asarray(rng.exponential(1.0, (CHANNELS, STATE)), jnp.float32)


def selective_scan_by_token(inputs: SelectiveInputs, rates: Array) -> tuple[np.ndarray, np.ndarray]:
    """Compute h_t = exp(dt_t A) h_(t-1) + dt_t v_t k_t and y_t = h_t . q_t in float64."""
    q, k, v, dt = (np.asarray(x, np.float64) for x in inputs[:4])
    is_start = np.asarray(inputs.is_start)
    state = np.zeros((SELECTIVE_ROWS, CHANNELS, STATE))
    outputs = np.zeros(v.shape)
    for t in range(v.shape[1]):
        state[is_start[:, t]] = 0
        state *= np.exp(dt[:, t, :, None] * np.asarray(rates, np.float64))
        state += (dt[:, t] * v[:, t])[..., None] * k[:, t, None]
        outputs[:, t] = (state * q[:, t, None]).sum(-1)
    return outputs, state


@pytest.mark.parametrize("starts", [(), (0, 3, SELECTIVE_SCAN_CHUNK_SIZE, LENGTH - 1)])
def test_scan_equals_the_recurrence(starts: tuple[int, ...]):
    inputs, rates = selective_random_inputs(LENGTH, starts)
    outputs, state = jax.jit(selective_scan)(inputs, rates, None)
    expected, expected_state = selective_scan_by_token(inputs, rates)
    np.testing.assert_allclose(outputs, expected, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


def test_scan_continues_from_a_state():
    inputs, rates = selective_random_inputs(LENGTH, (3,))
    compute = jax.jit(selective_scan)
    outputs, state = compute(inputs, rates, None)
    first, second = (
        jax.tree.map(lambda x, part=part: x[:, part], inputs)
        for part in (slice(0, 40), slice(40, None))
    )
    first_outputs, middle = compute(first, rates, None)
    second_outputs, end = compute(second, rates, middle)
    joined = np.concatenate([first_outputs, second_outputs], axis=1)
    np.testing.assert_allclose(joined, outputs, atol=2e-5)
    np.testing.assert_allclose(end, state, atol=2e-5)


def test_gradient_equals_finite_differences():
    inputs, rates = selective_random_inputs(7, (3,))

    @jax.jit
    def loss(dt: Array, rates: Array) -> Array:
        return jnp.square(selective_scan(inputs._replace(dt=dt), rates, None)[0]).sum()

    jax.test_util.check_grads(loss, (inputs.dt, rates), order=1, modes=["rev"], rtol=0.02)


# Adapters in the forward pass: their product with the weights merged, and the random masks of their inputs.

CONFIGS = {config["model_type"]: config for config in (*GOLDEN.values(), *ALL_CONFIGS)}
TOKENS = jnp.asarray(np.arange(24, dtype=np.int32).reshape(2, 12) * 5 % 31)
ADAPTER_ROWS = jnp.arange(2, dtype=jnp.uint32)


def make_model(config: dict[str, Any], lora: LoraConfig) -> tuple[ModelSpec, dict[str, Any]]:
    """Return a model with adapters, and random parameters by path."""
    family = FAMILIES[config["model_type"]]
    base = build_model(family, config, family.is_tied(config))
    model = build_model(family, config, base.is_tied, lora=lora)
    assert model.adapters is not None
    leaves = flatten_tree(init_params(base, 0))
    random = np.random.default_rng(0)
    for path, leaf in leaves.items():
        # Other leaves would have no gradient behind a factor of zero, e.g. the rates of scores of Doge.
        if not np.asarray(leaf).any():
            leaves[path] = jnp.asarray(random.normal(0, 0.1, leaf.shape), leaf.dtype)
    for path, leaf in model.adapters.matrices.items():
        leaves[path] = jnp.asarray(random.normal(0, 0.2, leaf.shape), jnp.float32)
    return model, leaves


def merge(model: ModelSpec, leaves: dict[str, Any]) -> Tree:
    """Return the parameters with the products of adapters added to the weights."""
    adapters = model.adapters
    assert adapters is not None
    merged = {path: leaf for path, leaf in leaves.items() if path not in adapters.matrices}
    for path in adapters.matrices:
        name = path.removesuffix(LORA_B)
        if path == name:
            continue
        a_path = adapters.shared.get(f"{name}{LORA_A}", f"{name}{LORA_A}")
        weight = np.asarray(merged[f"{name}weight"])
        leaf = adapters.leaves[a_path]
        stacks = 2 if ("experts",) in leaf.dims else 1
        a = np.asarray(leaves[a_path])
        rank = a.shape[stacks]
        a = a.reshape(*a.shape[: stacks + 1], -1)
        b = np.asarray(leaves[path])
        b = b.reshape(*b.shape[:stacks], -1, rank)
        product = adapters.scalings[a_path] * (b @ a)
        merged[f"{name}weight"] = jnp.asarray(weight + product.reshape(weight.shape))
    return unflatten_tree(merged)


def run(params: Tree, model: ModelSpec) -> jax.Array:
    """Compute the logits of two rows."""
    tokens = TOKENS % model.true_vocab_size
    source = None
    if model.arch_config.encoder is not None:
        source = transformer.encode(params, tokens, model, ForwardConfig())
    return transformer.compute_logits(params, tokens, model, ForwardConfig(), source)


def outputs(params: Tree, model: ModelSpec) -> np.ndarray:
    """Return the logits of two rows."""
    return np.asarray(jax.jit(lambda params: run(params, model))(params))


@pytest.mark.parametrize("name", slow_except(list(CONFIGS), ["mixtral"]))
def test_adapters_equal_merged_weights_in_every_family(name: str):
    config = CONFIGS[name]
    family = FAMILIES[name]
    has_experts = any(expert_projections(family, config))
    lora = LoraConfig(
        2,
        3.0,
        ("all-linear",),
        target_parameters=("*",) if has_experts else (),
    )
    if name == "gpt2":
        lora = replace(lora, rank_pattern={"attn.q": 3})
    model, leaves = make_model(config, lora)
    adapted = outputs(unflatten_tree(leaves), model)
    base = build_model(family, config, model.is_tied)
    np.testing.assert_allclose(adapted, outputs(merge(model, leaves), base), atol=2e-4, rtol=1e-4)
    gradients = flatten_tree(
        jax.jit(jax.grad(lambda p: jnp.sin(run(p, model)).sum()))(unflatten_tree(leaves))
    )
    unused = [path for path in model.saved_leaves if not np.abs(gradients[path]).max() > 0]
    assert not unused


DROPOUT = DropoutConfig(adapters=0.25)


def test_adapter_dropout_keeps_the_mean_of_its_input():
    keys = step_dropout(DROPOUT, seed=0, step=jnp.int32(3), row_ids=ADAPTER_ROWS).key
    dropout = AdapterDropout(derive_key(keys, jnp.arange(2 * 512).reshape(2, 512)), 0.25)
    x = dropout.apply(jnp.ones((2, 512, 8, 16)))
    assert set(np.unique(x)) == {0.0, np.float32(1 / 0.75)}
    # 131,072 elements: the standard deviation of the fraction is 0.0012.
    assert abs(float((x == 0).mean()) - 0.25) < 0.006


def test_modules_have_masks_of_their_own():
    lora = LoraConfig(2, 4.0, ("all-linear",))
    adapters = build_model(FAMILIES["llama"], LLAMA, is_tied=False, lora=lora).adapters
    fused = build_model(FAMILIES["gpt2"], GPT2, is_tied=True, lora=lora).adapters
    assert adapters is not None
    assert fused is not None
    assert len({*adapters.dropout_sites.values()}) == len(adapters.dropout_sites) == 7
    sites = fused.dropout_sites
    assert sites["attn.q"] == sites["attn.k"] == sites["attn.v"] != sites["attn.o"]
    layer_keys = step_dropout(DROPOUT, seed=0, step=jnp.int32(3), row_ids=ADAPTER_ROWS).layer_keys(
        1
    )
    assert layer_keys is not None
    positions = jnp.arange(4)
    masks = LayerDropout(DROPOUT, RandomKey(*(words[0] for words in layer_keys)), positions)
    first, other = (np.asarray(masks.adapter_keys(number, positions)) for number in (0, 1))
    assert not np.any(first == other)
