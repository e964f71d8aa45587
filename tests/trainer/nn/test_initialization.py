"""Random initial parameters: the scheme of transformers, and zero rows for padded token ids."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import tiny_transformer
from prepcli.core.errors import PrepError
from prepcli.models.param_tree import flatten_tree
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN
from trainer.nn.initialization import init_leaves, init_params

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


@pytest.mark.parametrize("family", slow_except(SIZES, ("gpt2", "llama", "t5")))
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


def test_mamba_starts_with_a_numbered_rate_per_state():
    """As `MambaMixer` of transformers: each channel has the rates 1, 2, ..., N."""
    rates = np.exp(mixer_leaves(GOLDEN["mamba"])["a_log.weight"])
    numbers = np.arange(1, GOLDEN["mamba"]["state_size"] + 1)
    np.testing.assert_allclose(rates, np.broadcast_to(numbers, rates.shape), rtol=1e-6)


@pytest.mark.parametrize("name", ["bamba", "granitemoehybrid"])
def test_step_biases_of_hybrid_models_start_at_one(name: str):
    assert (mixer_leaves(GOLDEN[name])["dt_bias.bias"] == 1).all()


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
