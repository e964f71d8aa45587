"""Random initial parameters: the scheme of transformers, and zero rows for padded token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prepcli.testing.tiny_transformers import tiny_transformer
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN
from trainer.models.param_tree import flatten_tree
from trainer.nn.initialization import init_params

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


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_recurrent_mixers_start_with_slow_decays_and_unscaled_norms(name: str):
    leaves = flatten_tree(init_params(tiny_transformer(GOLDEN[name]).model, 0))
    by_name = {path.partition("mixer.")[2]: np.asarray(leaf) for path, leaf in leaves.items()}
    assert (by_name["norm.scale"] == 1).all()
    assert (by_name["dt_bias.bias"] == 1).all()
    rates = np.exp(by_name["a_log.weight"])
    assert rates.min() >= 0.01
    assert rates.max() <= 16
    assert np.unique(rates).size == rates.size
    assert (by_name.get("d.weight", np.float32(1)) == 1).all()
