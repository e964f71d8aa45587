"""Logits, losses and gradients are those of transformers, by golden files; and no mistake in them would pass."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import numpy as np
import pytest

from tests.golden import make_decoders
from tests.golden.make_decoders import LENGTHS, Golden, load
from tests.helpers import tiny_transformers
from tests.helpers.tiny_configs import GOLDEN, NEWER_FAMILIES
from tests.helpers.tiny_transformers import (
    loss_and_gradients,
    model_logits,
    random_tensors,
    tiny_transformer,
    with_padded_vocab,
)
from trainer.models.registry import FAMILIES
from trainer.nn.transformer import ForwardConfig

LOGITS_ATOL = 2e-5
GRADIENTS_RTOL = 1e-5
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


def max_logit_error(golden: Golden, found: np.ndarray) -> float:
    """The largest error of `short` logits at positions that count."""
    return max(abs(found[i, :n] - golden.short_logits[i, :n]).max() for i, n in enumerate(LENGTHS))


def worst_gradient(golden: Golden, found: dict[str, np.ndarray]) -> float:
    return max(tiny_transformers.relative_error(found[name], wanted) for name, wanted in golden.gradients.items())


def test_there_is_a_small_golden_file_for_each_config():
    paths = {path.stem: path for path in make_decoders.FOLDER.glob("*.npz")}
    assert {name: load(name).config for name in paths} == json.loads(json.dumps(GOLDEN))
    assert all(path.stat().st_size < 200_000 for path in paths.values())


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_tensors_are_all_filled(name: str):
    golden = golden_of(name)
    assert {*golden.tensors} == {*random_tensors(golden.config)} == {*golden.gradients}
    for tensor in golden.tensors.values():
        assert tensor.std() > 0.03


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_transformers(name: str):
    golden = golden_of(name)
    made = tiny_transformer(golden.config)
    params = made.params_from_tensors(golden.tensors)
    assert max_logit_error(golden, model_logits(made.model, params, golden.short)) <= LOGITS_ATOL
    assert abs(model_logits(made.model, params, golden.long) - golden.long_logits).max() <= LOGITS_ATOL


@pytest.mark.parametrize(("name", "rows_more"), PADDED)
def test_loss_and_gradients_are_those_of_torch(name: str, rows_more: int):
    """More rows of the vocabulary change nothing, whatever is in them, and have gradients of exactly 0."""
    golden = golden_of(name)
    vocab = golden.config["vocab_size"]
    config, tensors = with_padded_vocab(golden.config, golden.tensors, rows_more, 50.0)
    made = tiny_transformer(config)
    how = (
        ForwardConfig(scan_layers=True, remat_policy="nothing_saveable")
        if name in NEWER_FAMILIES
        else ForwardConfig(scan_layers=False)
    )
    how = dataclasses.replace(how, head_chunk_size=128)
    loss, gradients = loss_and_gradients(made.model, made.params_from_tensors(tensors), golden.long, how)
    found = made.tensors_from_params(gradients)
    assert loss == pytest.approx(golden.loss, rel=1e-6)
    for tensor, wanted in golden.gradients.items():
        beyond = found[tensor][wanted.shape[0] :]
        found[tensor] = found[tensor][: wanted.shape[0]]
        assert abs(found[tensor] - wanted).max() <= GRADIENTS_RTOL * max(1, abs(wanted).max())
        assert beyond.size == (wanted.size // vocab * rows_more if wanted.shape[0] == vocab else 0)
        assert not beyond.any()
    assert worst_gradient(golden, found) <= GRADIENTS_RTOL


@pytest.mark.parametrize(("name", "stacked", "axis", "scan", "remat"), FORMS)
def test_no_form_of_the_layers_changes_anything(name: str, stacked: bool, axis: int, scan: bool, remat: str):
    golden = golden_of(name)
    made = tiny_transformer(golden.config, stacked, axis)
    params = made.params_from_tensors(golden.tensors)
    loss, gradients = loss_and_gradients(
        made.model, params, golden.long, ForwardConfig(scan_layers=scan, remat_policy=remat)
    )
    assert loss == pytest.approx(golden.loss, rel=1e-6)
    assert worst_gradient(golden, made.tensors_from_params(gradients)) <= GRADIENTS_RTOL


SHIFTED = ("self_attn.k_proj.bias",)  # adds the same to all scores of a query where nothing rotates


def test_each_family_is_here():
    assert {str(config["model_type"]) for config in GOLDEN.values()} == {*FAMILIES}


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied", "gpt_neo", "llama-biases", *NEWER_FAMILIES])
def test_every_tensor_counts(name: str):
    """Were one of them not read, or read as another, logits would be other ones."""
    for tensor, gradient in golden_of(name).gradients.items():
        assert np.linalg.norm(gradient) > 1e-3 or (name.startswith("opt") and tensor.endswith(SHIFTED)), tensor


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "llama", "gemma2", "mixtral", "t5"])
def test_bfloat16_is_near(name: str):
    golden = golden_of(name)
    made = tiny_transformer(golden.config)
    how = ForwardConfig(dtype="bfloat16", scan_layers=False)
    params = made.params_from_tensors(golden.tensors)
    loss, gradients = loss_and_gradients(made.model, params, golden.long, how)
    assert loss == pytest.approx(golden.loss, rel=2e-2)
    found = made.tensors_from_params(gradients)
    assert {gradient.dtype for gradient in found.values()} == {np.dtype(np.float32)}
    error = worst_gradient(golden, found)
    assert 1e-4 < error < 0.2
