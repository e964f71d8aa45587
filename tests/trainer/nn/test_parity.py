"""Logits, losses and gradients are those of transformers, by golden files; and no mistake in them would pass."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import numpy as np
import pytest

from tests.golden import make_decoders
from tests.golden.make_decoders import LENGTHS, Golden, load
from tests.helpers import decoders
from tests.helpers.decoder_configs import GOLDEN, OWN
from tests.helpers.decoders import decoder, filled, logits_of, loss_and_gradients, with_padding
from trainer.models.registry import FAMILIES
from trainer.nn.transformer import Compute

LOGITS = 2e-5
GRADIENTS = 1e-5
WITHOUT_ROPES = [name for name in GOLDEN if not name.startswith("llama-") or name == "llama-biases"]
PADDED = [*((name, 3) for name in WITHOUT_ROPES), ("gpt_neo", 0), ("llama-yarn", 0)]
FORMS = [  # layers stacked, on axis, scanned, what is kept of them
    ("gpt2", True, 1, True, "none"),
    ("gpt2", False, 0, False, "none"),
    ("gpt_neo", True, 0, True, "none"),
    ("gpt_neo", True, 1, True, "nothing_saveable"),
    ("gpt_neo", True, 1, False, "none"),
    ("gpt_neo", False, 0, False, "nothing_saveable"),
    ("llama-biases", True, 1, True, "dots_with_no_batch_dims_saveable"),
    ("llama-biases", False, 0, False, "none"),
    ("t5", True, 1, True, "nothing_saveable"),
    ("t5-gated", False, 0, False, "none"),
]


golden_of = cache(load)


def counted_error(golden: Golden, found: np.ndarray) -> float:
    """The largest error of `short` logits at positions that count."""
    return max(abs(found[i, :n] - golden.short_logits[i, :n]).max() for i, n in enumerate(LENGTHS))


def worst_gradient(golden: Golden, found: dict[str, np.ndarray]) -> float:
    return max(decoders.apart(found[name], wanted) for name, wanted in golden.gradients.items())


def test_there_is_a_small_golden_file_for_each_config():
    paths = {path.stem: path for path in make_decoders.FOLDER.glob("*.npz")}
    assert {name: load(name).config for name in paths} == json.loads(json.dumps(GOLDEN))
    assert all(path.stat().st_size < 200_000 for path in paths.values())


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_tensors_are_all_filled(name: str):
    golden = golden_of(name)
    assert {*golden.tensors} == {*filled(golden.config)} == {*golden.gradients}
    for tensor in golden.tensors.values():
        assert tensor.std() > 0.03


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_transformers(name: str):
    golden = golden_of(name)
    made = decoder(golden.config)
    params = made.params(golden.tensors)
    assert counted_error(golden, logits_of(made.model, params, golden.short)) <= LOGITS
    assert abs(logits_of(made.model, params, golden.long) - golden.long_logits).max() <= LOGITS


@pytest.mark.parametrize(("name", "rows_more"), PADDED)
def test_loss_and_gradients_are_those_of_torch(name: str, rows_more: int):
    """More rows of the vocabulary change nothing, whatever is in them, and have gradients of exactly 0."""
    golden = golden_of(name)
    vocab = golden.config["vocab_size"]
    config, tensors = with_padding(golden.config, golden.tensors, rows_more, 50.0)
    made = decoder(config)
    how = Compute(scan=True, remat="nothing_saveable") if name in OWN else Compute(scan=False)
    how = dataclasses.replace(how, head_chunk=128)
    loss, gradients = loss_and_gradients(made.model, made.params(tensors), golden.long, how)
    found = made.tensors(gradients)
    assert loss == pytest.approx(golden.loss, rel=1e-6)
    for tensor, wanted in golden.gradients.items():
        beyond = found[tensor][wanted.shape[0] :]
        found[tensor] = found[tensor][: wanted.shape[0]]
        assert abs(found[tensor] - wanted).max() <= GRADIENTS * max(1, abs(wanted).max())
        assert beyond.size == (wanted.size // vocab * rows_more if wanted.shape[0] == vocab else 0)
        assert not beyond.any()
    assert worst_gradient(golden, found) <= GRADIENTS


@pytest.mark.parametrize(("name", "stacked", "axis", "scan", "remat"), FORMS)
def test_no_form_of_the_layers_changes_anything(name: str, stacked: bool, axis: int, scan: bool, remat: str):
    golden = golden_of(name)
    made = decoder(golden.config, stacked, axis)
    params = made.params(golden.tensors)
    loss, gradients = loss_and_gradients(made.model, params, golden.long, Compute(scan=scan, remat=remat))
    assert loss == pytest.approx(golden.loss, rel=1e-6)
    assert worst_gradient(golden, made.tensors(gradients)) <= GRADIENTS


SHIFTED = ("self_attn.k_proj.bias",)  # adds the same to all scores of a query where nothing rotates


def test_each_family_is_here():
    assert {str(config["model_type"]) for config in GOLDEN.values()} == {*FAMILIES}


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied", "gpt_neo", "llama-biases", *OWN])
def test_every_tensor_counts(name: str):
    """Were one of them not read, or read as another, logits would be other ones."""
    for tensor, gradient in golden_of(name).gradients.items():
        assert np.linalg.norm(gradient) > 1e-3 or (name.startswith("opt") and tensor.endswith(SHIFTED)), tensor


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "llama", "gemma2", "mixtral", "t5"])
def test_bfloat16_is_near(name: str):
    golden = golden_of(name)
    made = decoder(golden.config)
    how = Compute(dtype="bfloat16", scan=False)
    params = made.params(golden.tensors)
    loss, gradients = loss_and_gradients(made.model, params, golden.long, how)
    assert loss == pytest.approx(golden.loss, rel=2e-2)
    found = made.tensors(gradients)
    assert {gradient.dtype for gradient in found.values()} == {np.dtype(np.float32)}
    error = worst_gradient(golden, found)
    assert 1e-4 < error < 0.2
