"""Tests of initialization, checks, scan and rematerialization; numeric results are in test_parity."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import (
    UNSCANNED,
    model_logits,
    random_batch,
    random_tensors,
    tiny_transformer,
)
from prepcli.core.errors import USAGE, PrepError
from prepcli.models.activation_memory import REMAT_POLICIES
from prepcli.models.param_tree import flatten_tree, unflatten_tree
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GPT2, GPT_NEO, LLAMA
from trainer.nn import transformer
from trainer.nn.initialization import init_params
from trainer.nn.model_spec import ForwardConfig

# arguments of `tiny_transformer` after the config, and whether layers are scanned
STORED_AND_SCANNED: list[tuple[tuple[bool, ...], bool]] = [
    ((), True),
    ((), False),
    ((False,), False),
]


@pytest.mark.parametrize(("scan", "scan_axis"), slow_except(((False, 0), (True, 1)), ((False, 0),)))
def test_init_does_not_depend_on_how_layers_are_stored(scan: bool, scan_axis: int):
    variants = tiny_transformer(GPT_NEO), tiny_transformer(GPT_NEO, scan, scan_axis)
    tensors, others = (tiny.tensors_from_params(init_params(tiny.model, 7)) for tiny in variants)
    for name, values in tensors.items():
        np.testing.assert_array_equal(values, others[name])


def test_init_does_not_depend_on_other_parameters():
    small = tiny_transformer(LLAMA)
    large = tiny_transformer(LLAMA | {"attention_bias": True, "num_hidden_layers": 3})
    small_tensors, large_tensors = (
        tiny.tensors_from_params(init_params(tiny.model, 7)) for tiny in (small, large)
    )
    for name, values in small_tensors.items():
        np.testing.assert_array_equal(values, large_tensors[name])


def test_init_depends_on_role_and_seed():
    tiny = tiny_transformer(
        LLAMA | {"attention_bias": True, "initializer_range": 0.5, "hidden_size": 32}
    )
    params = flatten_tree(init_params(tiny.model, 1))
    params_of_other_seed = flatten_tree(init_params(tiny.model, 2))
    samples = []
    for path, leaf in tiny.model.leaves.items():
        values = np.asarray(params[path])
        assert (values.dtype, values.shape) == (np.float32, leaf.shape)
        if leaf.role in ("scale", "bias"):
            np.testing.assert_array_equal(values, leaf.role == "scale")
        else:
            assert values.std() == pytest.approx(0.5, rel=0.1)
            assert not np.array_equal(values, params_of_other_seed[path])
            samples.append(values.flatten()[:20])
    assert len({sample.tobytes() for sample in samples}) == len(samples)
    q = np.asarray(params["layers.attn.q.weight"])
    assert not np.array_equal(q[0], q[1])


def test_layer_score_scale_applies_to_stacked_and_listed_layers():
    config = GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3}
    unscaled, tensors = tiny_transformer(GPT2 | {"n_layer": 3}), random_tensors(config)
    batch = random_batch(config["vocab_size"], 2, 7)
    logits = []
    for stored, is_scanned in STORED_AND_SCANNED:
        tiny = tiny_transformer(config, *stored)
        forward_config = ForwardConfig(scan_layers=is_scanned)
        logits.append(
            model_logits(tiny.model, tiny.params_from_tensors(tensors), batch, forward_config)
        )
    for array in logits[1:]:
        np.testing.assert_allclose(array, logits[0], atol=2e-5)
    unscaled_logits = model_logits(unscaled.model, unscaled.params_from_tensors(tensors), batch)
    assert abs(logits[0] - unscaled_logits).max() > 1e-2


@pytest.mark.parametrize("true_size", [0, 30, -1, "29", 2.5])
def test_build_model_rejects_invalid_true_vocab_size(true_size: Any):
    with pytest.raises(
        PrepError, match=r"true_vocab_size is .*, not an integer from 1 to vocab_size 29"
    ):
        tiny_transformer(LLAMA | {"true_vocab_size": true_size})


def test_sequence_longer_than_learned_positions_is_rejected():
    config = GPT_NEO | {"max_position_embeddings": 5}
    tiny = tiny_transformer(config)
    params = tiny.params_from_tensors(random_tensors(config))
    assert model_logits(tiny.model, params, {"tokens": np.zeros((1, 5), np.int32)}).shape == (
        1,
        5,
        29,
    )
    with pytest.raises(
        PrepError, match="6 tokens per sequence - the model has 5 positions"
    ) as caught:
        transformer.compute_logits(params, jnp.zeros((1, 6), jnp.int32), tiny.model, UNSCANNED)
    assert caught.value.code == USAGE


def test_scan_of_one_leaf_per_layer_is_rejected():
    tiny = tiny_transformer(LLAMA, scan=False)
    params = tiny.params_from_tensors(random_tensors(LLAMA))
    with pytest.raises(PrepError, match="layers cannot be scanned") as caught:
        transformer.compute_logits(
            params, jnp.zeros((1, 2), jnp.int32), tiny.model, ForwardConfig(scan_layers=True)
        )
    assert caught.value.code == USAGE


def test_logits_depend_on_earlier_tokens_only():
    tiny = tiny_transformer(GPT_NEO)
    params, tokens = (
        tiny.params_from_tensors(random_tensors(GPT_NEO)),
        random_batch(29, 1, 7)["tokens"],
    )
    changed = tokens.copy()
    changed[0, 4] = (changed[0, 4] + 1) % 29
    before, after = (model_logits(tiny.model, params, {"tokens": ids}) for ids in (tokens, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (abs(before - after).max(-1)[0, 4:] > 0).all()


@pytest.mark.parametrize(
    ("layer_types", "num_steps"),
    [
        (["global"] * 6, [6]),
        (["global", "local"] * 3, [3]),
        (["local", *["global"] * 5], [5]),
        (["local", "global", "global", "local", "local", "global"], []),
    ],
)
def test_scan_runs_one_period_of_windows_per_step(layer_types: list[str], num_steps: list[int]):
    """A pattern of windows that never repeats is not scanned."""
    tiny = tiny_transformer(GPT_NEO | {"num_layers": 6, "attention_layers": layer_types})
    params = jax.eval_shape(lambda: init_params(tiny.model, 0))
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    traced = jax.make_jaxpr(
        lambda p, t: transformer.hidden_states(p, t, tiny.model, ForwardConfig())
    )(params, tokens)
    loops = [
        equation.params["length"]
        for equation in traced.jaxpr.eqns
        if equation.primitive.name == "scan"
    ]
    assert loops == num_steps


def temporary_nbytes(remat_policy: str) -> int:
    """Return the bytes of temporaries that XLA plans for a loss and its gradients."""
    tiny = tiny_transformer(
        LLAMA | {"num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 256}
    )
    shape = jax.ShapeDtypeStruct
    params = unflatten_tree(
        {path: shape(leaf.shape, jnp.float32) for path, leaf in tiny.model.leaves.items()}
    )
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {key: shape((2, 128), dtype) for key, dtype in dtypes.items()}
    forward_config = ForwardConfig(remat_policy=remat_policy)
    run = jax.jit(
        jax.value_and_grad(
            lambda p, b: transformer.loss_sums(p, b, tiny.model, forward_config).loss
        )
    )
    memory: Any = run.lower(params, batch).compile().memory_analysis()
    return memory.temp_size_in_bytes


def test_remat_halves_memory_of_activations():
    assert temporary_nbytes("nothing_saveable") < temporary_nbytes("none") / 2


def test_bfloat16_computation_returns_float32_logits():
    tiny = tiny_transformer(LLAMA)
    params = tiny.params_from_tensors(random_tensors(LLAMA))
    tokens = jnp.zeros((1, 3), jnp.int32)
    forward_config = dataclasses.replace(UNSCANNED, dtype="bfloat16")
    for function, dtype in (
        (transformer.hidden_states, jnp.bfloat16),
        (transformer.compute_logits, jnp.float32),
    ):
        call = partial(function, model=tiny.model, forward_config=forward_config)
        assert jax.eval_shape(call, params, tokens).dtype == dtype


def test_unknown_remat_policy_is_rejected():
    message = r"unknown `model.remat_policy` 'dots' - supported: none, nothing_saveable, "
    with pytest.raises(PrepError, match=message) as caught:
        ForwardConfig(remat_policy="dots")
    assert caught.value.code == USAGE
    assert all(hasattr(jax.checkpoint_policies, name) for name in REMAT_POLICIES)
