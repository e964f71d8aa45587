"""Logits and gradients of each family are those of transformers, by golden files; and no mistake in one of its traits
would pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.decoder_configs import OWN
from tests.decoders import apart, decoder, logits_of, loss_and_gradients, with_padding
from tests.golden.make_decoders import LENGTHS, Golden, load
from trainer.families import FAMILIES
from trainer.model import Compute
from trainer.traits import ALL_BEFORE, NO_CAP, Traits

LOGITS = 2e-5
GRADIENTS = 1e-5
golden_of = cache(load)


def short_error(golden: Golden, found: np.ndarray) -> float:
    """The largest error of right-padded logits at positions that count."""
    return max(abs(found[i, :n] - golden.short_logits[i, :n]).max() for i, n in enumerate(LENGTHS))


def test_each_family_is_here():
    assert {*OWN} | {"gpt2", "gpt_neo", "llama"} >= {*FAMILIES}


@pytest.mark.parametrize("name", OWN)
def test_logits_are_those_of_transformers(name: str):
    golden = golden_of(name)
    made = decoder(golden.config)
    params = made.params(golden.tensors)
    assert short_error(golden, logits_of(made.model, params, golden.short)) <= LOGITS
    assert abs(logits_of(made.model, params, golden.long["tokens"]) - golden.long_logits).max() <= LOGITS


@pytest.mark.parametrize("name", OWN)
def test_loss_and_gradients_are_those_of_torch(name: str):
    """Three more rows of the vocabulary change nothing, whatever is in them, and have gradients of exactly 0."""
    golden = golden_of(name)
    vocab = golden.config["vocab_size"]
    config, tensors = with_padding(golden.config, golden.tensors, 3, 50.0)
    made = decoder(config)
    how = Compute(head_chunk=128, remat="nothing_saveable")
    loss, gradients = loss_and_gradients(made.model, made.params(tensors), golden.long, how)
    assert loss == pytest.approx(golden.loss, rel=1e-6)
    for tensor, gradient in made.tensors(gradients).items():
        rows = golden.gradients[tensor].shape[0]
        assert apart(gradient[:rows], golden.gradients[tensor]) <= GRADIENTS, tensor
        assert gradient.shape[0] - rows == (3 if rows == vocab else 0)
        assert not gradient[rows:].any()


def change(**changes: Any) -> Callable[[Traits], Traits]:
    return lambda traits: dataclasses.replace(traits, **changes)


def rope_change(**changes: Any) -> Callable[[Traits], Traits]:
    def changed(traits: Traits) -> Traits:
        assert traits.rope is not None
        return dataclasses.replace(traits, rope=dataclasses.replace(traits.rope, **changes))

    return changed


def with_window(window: int) -> Callable[[Traits], Traits]:
    """Another window where there is one."""
    return lambda traits: dataclasses.replace(traits, windows=tuple(window if w else w for w in traits.windows))


def turned_round(traits: Traits) -> Traits:
    """Global and local rotation swapped."""
    return dataclasses.replace(traits, rope=traits.local_rope, local_rope=traits.rope)


MUTATIONS: dict[str, tuple[str, Callable[[Traits], Traits]]] = {
    "halves turn": ("gptj", change(rotary_pairs="halves")),
    "more of a head turns": ("gptj", rope_change(dim=6)),
    "one part after the other": ("gptj", change(residual="pre")),
    "another theta": ("gptj", rope_change(theta=9_900.0)),
    "positions from row 0": ("opt", change(position_offset=0)),
    "no last norm": ("opt", change(final_norm=False)),
    "a last norm": ("opt-350m", change(final_norm=True)),
    "norms after": ("opt", change(residual="post")),
    "norms before": ("opt-350m", change(residual="pre")),
    "less of a head turns": ("gpt_neox", rope_change(dim=2)),
    "all of a head turns": ("gpt_neox", rope_change(dim=8)),
    "neighbours turn": ("gpt_neox", change(rotary_pairs="neighbours")),
    "serial": ("gpt_neox", change(residual="pre")),
    "one norm": ("gpt_neox", change(residual="parallel_one_norm")),
    "parallel": ("gpt_neox-serial", change(residual="parallel")),
    "a tanh gelu": ("gpt_neox", change(activation="gelu_new")),
    "a window of one more": ("mistral", with_window(6)),
    "a window of one less": ("mistral", with_window(4)),
    "one expert a token": ("mixtral", change(experts_per_token=1)),
    "all experts for each": ("mixtral", change(experts_per_token=3)),
    "shares as they are": ("mixtral", change(experts_sum_to_one=False)),
    "theta of another family": ("mixtral", rope_change(theta=1e6)),
    "three experts a token": ("qwen3_moe", change(experts_per_token=3)),
    "plain shares": ("qwen3_moe", change(experts_sum_to_one=False)),
    "an epsilon 2 % off": ("qwen2", change(norm_eps=1.02e-3)),
    "no scale of queries": ("qwen3", change(score_scale=1.0)),
    "scales from 0": ("gemma", change(norm="rms")),
    "embeddings as they are": ("gemma", change(embed_scale=1.0)),
    "an exact gelu": ("gemma", change(activation="gelu")),
    "no bound of scores": ("gemma2", change(score_cap=NO_CAP)),
    "another bound of scores": ("gemma2", change(score_cap=1.51)),
    "no bound of logits": ("gemma2", change(logit_cap=NO_CAP)),
    "another bound of logits": ("gemma2", change(logit_cap=2.01)),
    "norms before alone": ("gemma2", change(residual="pre")),
    "scores scaled by the head": ("gemma2", change(score_scale=10**-0.5)),
    "the other layer has the window": ("gemma2", change(windows=(ALL_BEFORE, 5, ALL_BEFORE))),
    "a window of 6": ("gemma2", with_window(6)),
    "one rotation": ("gemma3_text", change(local_rope=None)),
    "the other rotation": ("gemma3_text", turned_round),
    "no window": ("gemma3_text", with_window(ALL_BEFORE)),
    "half of the turning part": ("phi3", rope_change(dim=2)),
    "another short factor": ("phi3-longrope", rope_change(short=(1.0, 1.5, 2.6, 4.0))),
    "no factor of attention": ("phi3-longrope", rope_change(attention_factor=1.0)),
    "the long factors": ("phi3-longrope", rope_change(positions=6)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_would_be_seen(mutation: str):
    name, mutate = MUTATIONS[mutation]
    golden = golden_of(name)
    made = decoder(golden.config)
    params = made.params(golden.tensors)
    wrong = dataclasses.replace(made.model, traits=mutate(made.model.traits))
    assert short_error(golden, logits_of(wrong, params, golden.short)) > LOGITS


@pytest.mark.parametrize("changes", [{"positions": 300}, {"long": (2.0, 3.0, 5.0, 9.1)}])
def test_a_mistake_of_long_sequences_would_be_seen(changes: dict[str, Any]):
    golden = golden_of("phi3-longrope")
    made = decoder(golden.config)
    wrong = dataclasses.replace(made.model, traits=rope_change(**changes)(made.model.traits))
    params = made.params(golden.tensors)
    assert abs(logits_of(wrong, params, golden.long["tokens"]) - golden.long_logits).max() > LOGITS


SHIFTED = ("self_attn.k_proj.bias",)  # adds the same to all scores of a query where nothing rotates


@pytest.mark.parametrize("name", OWN)
def test_every_tensor_counts(name: str):
    """Were one of them not read, or read as another, logits would be other ones."""
    for tensor, gradient in golden_of(name).gradients.items():
        assert np.linalg.norm(gradient) > 1e-3 or (name.startswith("opt") and tensor.endswith(SHIFTED)), tensor


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_bfloat16_is_near(name: str):
    golden = golden_of(name)
    made = decoder(golden.config)
    how = Compute(dtype="bfloat16")
    loss, _ = loss_and_gradients(made.model, made.params(golden.tensors), golden.long, how)
    assert loss == pytest.approx(golden.loss, rel=2e-2)
