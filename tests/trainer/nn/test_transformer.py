"""The transformer: stacked layers, encoders, initial leaves and the inputs of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import (
    UNSCANNED,
    TinyTransformer,
    model_logits,
    random_batch,
    random_tensors,
    tiny_transformer,
)
from prepcli.core.errors import USAGE, PrepError
from prepcli.models.activation_memory import REMAT_POLICIES
from prepcli.models.param_tree import Tree, flatten_tree
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN, GPT_NEO, LLAMA, T5
from trainer.nn import transformer
from trainer.nn.initialization import init_leaves, init_params
from trainer.nn.model_spec import ForwardConfig

# Tests of initialization, checks, scan and rematerialization; numeric results are in test_parity.


@pytest.mark.parametrize(("scan", "scan_axis"), slow_except(((False, 0), (True, 1)), ((False, 0),)))
def test_init_does_not_depend_on_how_layers_are_stored(scan: bool, scan_axis: int):
    variants = tiny_transformer(GPT_NEO), tiny_transformer(GPT_NEO, scan, scan_axis)
    tensors, others = (tiny.tensors_from_params(init_params(tiny.model, 7)) for tiny in variants)
    for name, values in tensors.items():
        np.testing.assert_array_equal(values, others[name])


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


# Tests of encoder-decoder models: source masks, two stacks of different depth, and their parameter trees.


def compile_logits(tiny: TinyTransformer) -> Callable[[Tree, Mapping[str, np.ndarray]], np.ndarray]:
    """Return a function that computes the logits of a batch, compiled once for each shape of a batch."""

    @jax.jit
    def compute(params: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        encoder_output = transformer.encode(
            params, batch["source"], tiny.model, UNSCANNED, batch["present"]
        )
        return transformer.compute_logits(
            params, batch["tokens"], tiny.model, UNSCANNED, encoder_output
        )

    return lambda params, batch: np.asarray(
        compute(params, {name: batch[name] for name in ("tokens", "source", "present")})
    )


def test_source_padding_does_not_change_logits():
    tiny = tiny_transformer(T5)
    params, batch = (
        tiny.params_from_tensors(random_tensors(T5)),
        random_batch(29, 2, 7, has_source=True),
    )
    compute_logits = compile_logits(tiny)
    logits = compute_logits(params, batch)
    changed_padding = np.where(batch["present"], batch["source"], 28 - batch["source"]).astype(
        np.int32
    )
    np.testing.assert_array_equal(
        logits, compute_logits(params, batch | {"source": changed_padding})
    )
    length = int(batch["present"][1].sum())
    assert length < 12
    short = {
        "tokens": batch["tokens"][1:],
        **{name: batch[name][1:, :length] for name in ("source", "present")},
    }
    np.testing.assert_allclose(compute_logits(params, short)[0], logits[1], atol=5e-6)


def test_encode_without_mask_equals_full_mask():
    tiny = tiny_transformer(T5)
    params, batch = (
        tiny.params_from_tensors(random_tensors(T5)),
        random_batch(29, 2, 7, has_source=True),
    )
    source = jnp.asarray(batch["source"])

    @jax.jit
    def encode(source_mask: jax.Array | None) -> Any:
        return transformer.encode(params, source, tiny.model, UNSCANNED, source_mask).states

    np.testing.assert_array_equal(encode(None), encode(jnp.ones(source.shape, bool)))


def test_encoder_output_is_required_only_with_encoder():
    tiny, decoder_only = tiny_transformer(T5), tiny_transformer(LLAMA)
    params, tokens = tiny.params_from_tensors(random_tensors(T5)), jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="t5 has an encoder, but encoder_output is missing"):
        transformer.compute_logits(params, tokens, tiny.model, UNSCANNED)
    encoder_output = jax.eval_shape(
        lambda: transformer.encode(params, tokens, tiny.model, UNSCANNED)
    )
    llama_params = decoder_only.params_from_tensors(random_tensors(LLAMA))
    with pytest.raises(ValueError, match="llama has no encoder, but encoder_output is passed"):
        transformer.compute_logits(
            llama_params, tokens, decoder_only.model, UNSCANNED, encoder_output
        )
    with pytest.raises(PrepError, match="llama has no encoder"):
        transformer.encode(params, tokens, decoder_only.model, UNSCANNED)


def test_lm_head_input_scale_is_applied_in_float32():
    """The scale 1 / sqrt(24), rounded to bfloat16, would change all logits."""
    config = T5 | {"d_model": 24, "num_layers": 1, "num_decoder_layers": 1}
    tiny = tiny_transformer(config)
    forward_config = dataclasses.replace(UNSCANNED, dtype="bfloat16")
    batch = {
        name: jnp.asarray(ids) for name, ids in random_batch(29, 2, 7, has_source=True).items()
    }
    params = tiny.params_from_tensors(random_tensors(config))

    def scaled_states(scale: float) -> np.ndarray:
        arch_config = dataclasses.replace(tiny.model.arch_config, lm_head_input_scale=scale)
        model = dataclasses.replace(tiny.model, arch_config=arch_config)

        # results of operations in bfloat16 are rounded, also within a fusion
        @partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
        def compute() -> jax.Array:
            encoder_output = transformer.encode(params, batch["source"], model, forward_config)
            return transformer.hidden_states(
                params, batch["tokens"], model, forward_config, encoder_output
            )

        return np.asarray(compute())

    expected = scaled_states(1.0).astype(np.float32) * np.float32(24**-0.5)
    assert tiny.model.arch_config.lm_head_input_scale == 24**-0.5
    assert (scaled_states(24**-0.5) == expected.astype(jnp.bfloat16)).all()


# Random initial parameters: the scheme of transformers, and zero rows for padded token ids.

SIZES = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 64},
    "gpt_neo": {
        "hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 512, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]],
    },
    "opt": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 256, "vocab_size": 512,
            "max_position_embeddings": 64, "word_embed_proj_dim": 64},
    "llama": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 160,
              "vocab_size": 512},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 512,
           "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
}  # fmt: skip


def init_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    tiny = tiny_transformer(config)
    return tiny.tensors_from_params(init_params(tiny.model, 0))


@pytest.mark.parametrize("family", slow_except(SIZES, ("llama", "t5")))
def test_initial_tensors_have_the_deviations_of_transformers(family: str):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = {"model_type": family, **SIZES[family]}
    cls = (
        transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    )
    model = cls.from_config(transformers.AutoConfig.for_model(**config))
    expected = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for name, values in init_tensors(config).items():
        assert values.shape == expected[name].shape
        # the deviation of n samples varies by about 1 / sqrt(2 n); both sides are samples
        tolerance = 6 / values.size**0.5
        assert abs(values.std() - expected[name].std()) <= tolerance * expected[name].std(), name
        assert abs(values.mean() - expected[name].mean()) <= tolerance * max(
            expected[name].std(), 1e-9
        ), name


def test_padded_rows_start_at_zero():
    config = {"model_type": "llama", **SIZES["llama"]}
    padded = {**config, "vocab_size": 520, "true_vocab_size": 512}
    plain, filled = (
        flatten_tree(init_params(tiny_transformer(values).model, 0)) for values in (config, padded)
    )
    for path in ("embed.tokens", "head.weight"):
        assert not np.asarray(filled[path])[512:].any()
        np.testing.assert_array_equal(filled[path][:512], plain[path])


def mixer_leaves(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the initial leaves of the mixers of a model by their names, e.g. `d.weight`."""
    model = tiny_transformer(config).model
    mixers = {path: leaf for path, leaf in model.leaves.items() if "mixer." in path}
    leaves = flatten_tree(init_leaves(mixers, jax.random.key(0), model))
    return {path.partition("mixer.")[2]: np.asarray(leaf) for path, leaf in leaves.items()}


def test_gated_delta_nets_start_with_random_decays():
    leaves = mixer_leaves(GOLDEN["qwen3_5_text"])
    assert (leaves["norm.scale"] == 1).all()
    assert (leaves["dt_bias.bias"] == 1).all()
    rates = np.exp(leaves["a_log.weight"])
    assert rates.min() >= 0.01
    assert rates.max() <= 16
    assert np.unique(rates).size == rates.size


@pytest.mark.parametrize("name", slow_except(["mamba2", "bamba", "granitemoehybrid"], ["mamba2"]))
def test_mamba2_starts_with_the_rates_of_transformers(name: str):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    auto_config = transformers.AutoConfig.for_model(**GOLDEN[name])
    model = transformers.AutoModelForCausalLM.from_config(auto_config)
    expected = next(v.numpy() for k, v in model.state_dict().items() if k.endswith("A_log"))
    leaves = mixer_leaves(GOLDEN[name])
    layers = leaves["a_log.weight"].reshape(-1, expected.size)
    np.testing.assert_allclose(layers, np.broadcast_to(expected, layers.shape), rtol=1e-6)
    assert (leaves["d.weight"] == 1).all()
    assert (leaves["norm.scale"] == 1).all()


@pytest.mark.slow
def test_mamba_starts_with_a_numbered_rate_per_state():
    """As `MambaMixer` of transformers: each channel has the rates 1, 2, ..., N."""
    rates = np.exp(mixer_leaves(GOLDEN["mamba"])["a_log.weight"])
    numbers = np.arange(1, GOLDEN["mamba"]["state_size"] + 1)
    np.testing.assert_allclose(rates, np.broadcast_to(numbers, rates.shape), rtol=1e-6)


@pytest.mark.slow
def test_mamba2_starts_with_log_uniform_steps():
    sizes = {"hidden_size": 8, "expand": 256, "num_heads": 1024, "head_dim": 2, "n_groups": 2}
    steps = {"time_step_min": 0.002, "time_step_max": 0.5, "time_step_floor": 0.01}
    biases = mixer_leaves(GOLDEN["mamba2"] | sizes | steps)["dt_bias.bias"]
    initial = np.logaddexp(0.0, biases.astype(np.float64))
    assert initial.min() == pytest.approx(0.01, rel=1e-4)
    assert 0.4 < initial.max() <= 0.5 * (1 + 1e-4)
    # Of a log-uniform step, log(0.01 / 0.002) / log(0.5 / 0.002) = 29 % are below the floor.
    is_floor = initial < 0.01 * (1 + 1e-4)
    assert is_floor.mean() == pytest.approx(0.29, abs=0.05)
    # Above the floor, the median is the geometric mean of the floor and the maximum.
    assert np.median(initial[~is_floor]) == pytest.approx((0.01 * 0.5) ** 0.5, rel=0.2)


def test_mamba2_steps_start_finite_without_a_floor():
    steps = {"time_step_min": 1e-45, "time_step_max": 1e-44, "time_step_floor": 0.0}
    biases = mixer_leaves(GOLDEN["mamba2"] | steps)["dt_bias.bias"]
    assert np.isfinite(biases).all()


def test_largest_initial_step_is_not_below_the_smallest():
    steps = {"time_step_min": 0.5, "time_step_max": 0.1}
    with pytest.raises(PrepError, match=r"time_step_min is 0\.5, it must be at most time_step_max"):
        mixer_leaves(GOLDEN["mamba2"] | steps)
