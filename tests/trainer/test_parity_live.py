"""Parity with transformers itself, for more configs than golden files have; needs the `parity` extra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.decoder_configs import OWN
from tests.decoders import (
    GPT2,
    GPT_NEO,
    LLAMA,
    ROPES,
    apart,
    batch_of,
    decoder,
    filled,
    logits_of,
    loss_and_gradients,
    with_padding,
)
from tests.golden import make_decoders
from tests.torch_decoders import torch_gradients, torch_logits, torch_model
from trainer.model import Compute

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SHORT, LONG = (7, 4), (300,)  # lengths of right-padded rows; shapes as in golden files, which are compiled already
OTHER_GPT2: dict[str, dict[str, Any]] = {
    "names": {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 8, "max_position_embeddings": 301},
    "plain-scores": {"scale_attn_weights": False},
    "upcast": {"reorder_and_upcast_attn": True, "activation_function": "relu"},
}
OTHER_NEO: dict[str, dict[str, Any]] = {
    "odd": {"num_layers": 5, "attention_types": [[["global", "local"], 2], [["global"], 1]]},
    "attention-layers": {"attention_layers": ["local", "global", "local"]},
    "window-1": {"window_size": 1},
    "window-7": {"window_size": 7},
    "window-300": {"window_size": 300},
    "wide": {"intermediate_size": 37, "activation_function": "gelu", "tie_word_embeddings": False},
    "tanh": {"activation_function": "gelu_pytorch_tanh"},
}
OTHER_LLAMA: dict[str, dict[str, Any]] = {
    "odd": {"num_hidden_layers": 3, "num_key_value_heads": None},
    "groups": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    "theta": {"rope_theta": 5e5},
    "version-5": {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}},
    "both-spellings": {"rope_scaling": ROPES["linear"], "rope_parameters": {"rope_type": "default"}},
    "llama3-outside": {"rope_scaling": ROPES["llama3"], "original_max_position_embeddings": 16},
    "llama3-no-length": {
        "rope_scaling": {k: v for k, v in ROPES["llama3"].items() if k != "original_max_position_embeddings"}
    },
    "yarn-attention": {"rope_scaling": ROPES["yarn"] | {"attention_factor": 0.9, "truncate": False}},
    "yarn-mscale": {"rope_scaling": ROPES["yarn"] | {"mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 3}},
    "yarn-half": {"rope_scaling": ROPES["yarn"] | {"factor": 0.5, "mscale": 0.7, "beta_slow": 0.5}},
    "gelu": {"hidden_act": "gelu_new"},
    "relu": {"hidden_act": "relu", "attention_bias": True},
}
GOLDEN = [name for name in make_decoders.CONFIGS if name not in OWN]  # the others are in test_parity_live_families
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: make_decoders.CONFIGS[name] for name in GOLDEN},
    **{f"gpt2-{name}": GPT2 | more for name, more in OTHER_GPT2.items()},
    **{f"gpt_neo-{name}": GPT_NEO | more for name, more in OTHER_NEO.items()},
    **{f"llama-{name}": LLAMA | more for name, more in OTHER_LLAMA.items()},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_right_padded_batches(name: str):
    config = CONFIGS[name]
    tensors, made = filled(config, seed=3), decoder(config)
    params, theirs = made.params(tensors), torch_model(config, tensors)
    for lengths in (SHORT, LONG):
        tokens = batch_of(config["vocab_size"], len(lengths), lengths[0], seed=4)["tokens"]
        found, wanted = logits_of(made.model, params, tokens), torch_logits(theirs, tokens, lengths)
        assert max(abs(found[i, :n] - wanted[i, :n]).max() for i, n in enumerate(lengths)) <= 2e-5


@pytest.mark.parametrize("name", ["gpt2-names", "gpt_neo-odd", "gpt_neo-wide", "llama-groups", "llama-biases"])
def test_gradients_of_padded_models(name: str):
    config = CONFIGS[name]
    tensors = filled(config, seed=5)
    vocab = config["vocab_size"]
    batch = batch_of(vocab, 2, 40, seed=6)
    wanted_loss, wanted = torch_gradients(torch_model(config, tensors), batch)
    wider, padded = with_padding(config, tensors, 5, -50.0)
    made = decoder(wider)
    loss, gradients = loss_and_gradients(made.model, made.params(padded), batch, Compute(scan=False, head_chunk=16))
    found = made.tensors(gradients)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    for tensor, gradient in wanted.items():
        rows = gradient.shape[0]
        assert apart(found[tensor][:rows], gradient) <= 1e-5
        assert not np.any(found[tensor][rows:])


@pytest.mark.parametrize("name", GOLDEN)
def test_transformers_still_computes_what_the_golden_files_say(name: str):
    golden, fresh = make_decoders.load(name), make_decoders.compute(make_decoders.CONFIGS[name])
    assert abs(golden.short_logits - fresh.short_logits).max() <= 2e-5
    assert abs(golden.long_logits - fresh.long_logits).max() <= 2e-5
    assert all(apart(fresh.gradients[tensor], wanted) <= 1e-5 for tensor, wanted in golden.gradients.items())
