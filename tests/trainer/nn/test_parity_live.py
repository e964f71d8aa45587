"""Parity with transformers itself, for all that configs of each family may ask for; needs the `parity` extra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.golden import make_decoders
from tests.helpers.tiny_configs import GOLDEN, LIVE, T5
from tests.helpers.tiny_transformers import (
    has_encoder,
    loss_and_gradients,
    model_logits,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
    with_padded_vocab,
)
from tests.helpers.torch_transformers import torch_gradients, torch_logits, torch_model
from trainer.nn.transformer import ForwardConfig

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ONE_BY_ONE = ("gpt2", "gpt_neo", "llama")  # their layers are not scanned here, those of others are
SHORT, LONG = (7, 4), (300,)  # lengths of right-padded rows; shapes as in golden files, which are compiled already


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [name for name in LIVE if name not in GOLDEN])  # of those the files say it
def test_logits_of_right_padded_batches(name: str):
    config = LIVE[name]
    tensors, made = random_tensors(config, seed=3), tiny_transformer(config)
    params, theirs = made.params_from_tensors(tensors), torch_model(config, tensors)
    for lengths in (SHORT, LONG):
        batch = random_batch(config["vocab_size"], len(lengths), lengths[0], 4, has_encoder(config))
        found, wanted = model_logits(made.model, params, batch), torch_logits(theirs, batch, lengths)
        assert max(abs(found[i, :n] - wanted[i, :n]).max() for i, n in enumerate(lengths)) <= 2e-5


OWN_HEADS = {"null": {"tie_word_embeddings": None}, "true, unscaled": {"scale_decoder_outputs": False}}


@pytest.mark.parametrize("changes", OWN_HEADS.values(), ids=OWN_HEADS)
def test_t5_logits_of_head_that_file_stores(changes: dict[str, Any]):
    config = T5 | changes
    tensors, made = random_tensors(config, has_stored_head=True), tiny_transformer(config, has_stored_head=True)
    assert "lm_head.weight" in tensors
    batch = random_batch(config["vocab_size"], 2, 7, 4, has_source=True)
    found = model_logits(made.model, made.params_from_tensors(tensors), batch)
    wanted = torch_logits(torch_model(config, tensors), batch, (7, 7))
    assert abs(found - wanted).max() <= 2e-5


WITH_GRADIENTS = [  # of each kind of layers one that golden files do not have
    *("gpt2-names", "gpt_neo-odd", "gpt_neo-wide", "llama-groups", "llama-biases", "gptj-tied", "opt-bare"),
    *("qwen3_moe-plain", "gemma3_text-version-5", "phi3-version-5", "t5-untied", "gpt2-by-depth"),
]


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_of_padded_models(name: str):
    config = LIVE[name]
    tensors, batch = random_tensors(config, seed=5), random_batch(config["vocab_size"], 2, 40, 6, has_encoder(config))
    wanted_loss, wanted = torch_gradients(torch_model(config, tensors), batch)
    wider, padded = with_padded_vocab(config, tensors, 5, -50.0)
    made = tiny_transformer(wider)
    how = ForwardConfig(scan_layers=config["model_type"] not in ONE_BY_ONE, head_chunk_size=16)
    loss, gradients = loss_and_gradients(made.model, made.params_from_tensors(padded), batch, how)
    found = made.tensors_from_params(gradients)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    for tensor, gradient in wanted.items():
        rows = gradient.shape[0]
        assert relative_error(found[tensor][:rows], gradient) <= 1e-5, tensor
        assert not np.any(found[tensor][rows:])


@pytest.mark.parametrize("name", GOLDEN)
def test_transformers_still_computes_what_the_golden_files_say(name: str):
    golden, fresh = make_decoders.load(name), make_decoders.compute(GOLDEN[name])
    assert abs(golden.short_logits - fresh.short_logits).max() <= 2e-5
    assert abs(golden.long_logits - fresh.long_logits).max() <= 2e-5
    assert all(relative_error(fresh.gradients[tensor], wanted) <= 1e-5 for tensor, wanted in golden.gradients.items())
