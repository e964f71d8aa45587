"""Logits, losses and gradients are those of transformers, by golden files; and no mistake in them would pass."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests import decoders
from tests.decoder_configs import OWN
from tests.decoders import decoder, filled, logits_of, loss_and_gradients, with_padding
from tests.golden import make_decoders
from tests.golden.make_decoders import LENGTHS, Golden, load
from trainer.model import Compute
from trainer.rope import Rope
from trainer.traits import Traits

LOGITS = 2e-5
GRADIENTS = 1e-5
NAMES = [name for name in make_decoders.CONFIGS if name not in OWN]  # the others are in test_parity_families
PADDED = [(name, 3) for name in NAMES if not name.startswith("llama-") or name == "llama-biases"] + [
    ("gpt_neo", 0),
    ("llama-yarn", 0),
]
FORMS = [  # layers stacked, on axis, scanned, what is kept of them
    ("gpt2", True, 1, True, "none"),
    ("gpt2", False, 0, False, "none"),
    ("gpt_neo", True, 0, True, "none"),
    ("gpt_neo", True, 1, True, "nothing_saveable"),
    ("gpt_neo", True, 1, False, "none"),
    ("gpt_neo", False, 0, False, "nothing_saveable"),
    ("llama-biases", True, 1, True, "dots_with_no_batch_dims_saveable"),
    ("llama-biases", False, 0, False, "none"),
]


golden_of = cache(load)


def counted_error(golden: Golden, found: np.ndarray) -> float:
    """The largest error of `short` logits at positions that count."""
    return max(abs(found[i, :n] - golden.short_logits[i, :n]).max() for i, n in enumerate(LENGTHS))


def worst_gradient(golden: Golden, found: dict[str, np.ndarray]) -> float:
    return max(decoders.apart(found[name], wanted) for name, wanted in golden.gradients.items())


def test_there_is_a_small_golden_file_for_each_config():
    paths = {path.stem: path for path in make_decoders.FOLDER.glob("*.npz")}
    assert {name: load(name).config for name in paths} == json.loads(json.dumps(make_decoders.CONFIGS))
    assert all(path.stat().st_size < 200_000 for path in paths.values())


@pytest.mark.parametrize("name", make_decoders.CONFIGS)
def test_golden_tensors_are_all_filled(name: str):
    golden = golden_of(name)
    assert {*golden.tensors} == {*filled(golden.config)} == {*golden.gradients}
    for tensor in golden.tensors.values():
        assert tensor.std() > 0.03


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str):
    golden = golden_of(name)
    made = decoder(golden.config)
    params = made.params(golden.tensors)
    assert counted_error(golden, logits_of(made.model, params, golden.short)) <= LOGITS
    assert abs(logits_of(made.model, params, golden.long["tokens"]) - golden.long_logits).max() <= LOGITS


@pytest.mark.parametrize(("name", "rows_more"), PADDED)
def test_loss_and_gradients_are_those_of_torch(name: str, rows_more: int):
    """More rows of the vocabulary change nothing, whatever is in them, and have gradients of exactly 0."""
    golden = golden_of(name)
    vocab = golden.config["vocab_size"]
    config, tensors = with_padding(golden.config, golden.tensors, rows_more, 50.0)
    made = decoder(config)
    how = Compute(scan=False, head_chunk=128)
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


def rope_change(**changes: Any) -> Callable[[Traits], Traits]:
    def change(traits: Traits) -> Traits:
        assert isinstance(traits.rope, Rope)
        return dataclasses.replace(traits, rope=dataclasses.replace(traits.rope, **changes))

    return change


def change(**changes: Any) -> Callable[[Traits], Traits]:
    return lambda traits: dataclasses.replace(traits, **changes)


MUTATIONS: dict[str, tuple[str, Callable[[Traits], Traits]]] = {
    "scores that are not scaled": ("gpt2", change(score_scale=1.0)),
    "another epsilon": ("gpt2", change(norm_eps=1.02e-3)),
    "an exact gelu": ("gpt2", change(activation="gelu")),
    "a window of one more": ("gpt_neo", change(windows=(0, 4, 0))),
    "a window of one less": ("gpt_neo", change(windows=(0, 2, 0))),
    "a window in another layer": ("gpt_neo", change(windows=(3, 0, 0))),
    "no window": ("gpt_neo", change(windows=(0, 0, 0))),
    "the epsilon of another family": ("gpt_neo", change(norm_eps=1e-5)),
    "an epsilon 2 % off": ("llama", change(norm_eps=1.02e-3)),
    "scaled scores": ("gpt_neo", change(score_scale=8**-0.5)),
    "a scale 0.1 % off": ("llama", change(score_scale=0.25 * 1.001)),
    "the exact gelu": ("gpt_neo", change(activation="gelu")),
    "the quick gelu": ("gpt_neo", change(activation="quick_gelu")),
    "a gelu for the gate": ("llama", change(activation="gelu_new")),
    "a theta 1 % off": ("llama", rope_change(theta=10_100.0)),
    "no stretched positions": ("llama-linear", rope_change(kind="default")),
    "another factor": ("llama-llama3", rope_change(factor=8.1)),
    "another low factor": ("llama-llama3", rope_change(low=1.1)),
    "another high factor": ("llama-llama3", rope_change(high=4.2)),
    "another length of pretraining": ("llama-llama3", rope_change(positions=33)),
    "an attention factor left out": ("llama-yarn", rope_change(attention_factor=1.0)),
    "corrections that are not whole": ("llama-yarn", rope_change(truncate=False)),
    "another slow beta": ("llama-yarn", rope_change(low=2.0)),
    "another fast beta": ("llama-yarn", rope_change(high=1.5)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_would_be_seen(mutation: str):
    name, mutate = MUTATIONS[mutation]
    golden = golden_of(name)
    made = decoder(golden.config)
    params = made.params(golden.tensors)
    wrong = dataclasses.replace(made.model, traits=mutate(made.model.traits))
    assert counted_error(golden, logits_of(wrong, params, golden.short)) > LOGITS


@pytest.mark.parametrize("changes", [{"factor": 4.1}, {"positions": 65}, {"kind": "default"}])
def test_mistakes_beyond_the_positions_would_be_seen(changes: dict[str, Any]):
    golden = golden_of("llama-dynamic")
    made = decoder(golden.config)
    params, tokens = made.params(golden.tensors), golden.long["tokens"]
    wrong = dataclasses.replace(made.model, traits=rope_change(**changes)(made.model.traits))
    assert abs(logits_of(wrong, params, tokens) - golden.long_logits).max() > LOGITS


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied", "gpt_neo", "llama-biases"])
def test_every_tensor_counts(name: str):
    """Were one of them not read, or read as another, logits would be other ones."""
    golden = golden_of(name)
    for tensor, gradient in golden.gradients.items():
        assert np.linalg.norm(gradient) > 1e-3, tensor


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "llama"])
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
