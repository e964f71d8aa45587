"""Traits that configs ask for, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decoders import GPT_NEO, LLAMA
from trainer.errors import PrepError
from trainer.families import FAMILIES
from trainer.traits import ACTIVATIONS, ALL_BEFORE, Traits, period


def traits_of(config: dict[str, Any]) -> Traits:
    return FAMILIES[config["model_type"]].traits(config)


@given(st.lists(st.sampled_from([0, 3]), min_size=1, max_size=9))
def test_a_period_is_the_shortest_that_repeats(windows: list[int]):
    every = period(windows)
    repeats = [n for n in range(1, len(windows) + 1) if [windows[i % n] for i in range(len(windows))] == windows]
    assert every == min(repeats)


def test_defaults_are_those_of_transformers():
    neo, llama = traits_of({"model_type": "gpt_neo"}), traits_of({"model_type": "llama"})
    assert (neo.norm, neo.norm_eps, neo.activation, neo.gated, neo.score_scale) == ("layer", 1e-5, "gelu_new", False, 1)
    assert neo.windows == (ALL_BEFORE, 256) * 12
    assert (neo.positions, neo.rope, neo.init_std) == (2048, None, 0.02)
    assert (llama.norm, llama.norm_eps, llama.activation, llama.gated) == ("rms", 1e-6, "silu", True)
    assert (llama.score_scale, llama.windows) == (128**-0.5, (ALL_BEFORE,) * 32)
    assert llama.rope
    assert (llama.rope.dim, llama.rope.theta, llama.rope.kind) == (128, 10_000, "default")


def test_scores_are_scaled_by_the_head_that_is_given():
    assert traits_of(LLAMA | {"head_dim": 4}).score_scale == 0.5


def test_attention_layers_win():
    found = traits_of(GPT_NEO | {"attention_layers": ["local", "global", "local"]})
    assert found.windows == (3, ALL_BEFORE, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_types": [[["global", "local"], 2]]},
        {"attention_types": [[["global", "sliding"], 1], [["global"], 1]]},
        {"attention_types": [[[["global"]], 3]]},
        {"attention_types": [["global", 3]]},
        {"attention_types": [[["global"], "3"]]},
        {"attention_types": 3},
        {"attention_types": [3]},
        {"attention_layers": [["global"], ["local"], 3]},
        {"window_size": 0},
        {"layer_norm_epsilon": 0},
        {"layer_norm_epsilon": "1e-5"},
        {"initializer_range": float("inf")},
        {"activation_function": "mish"},
        {"activation_function": ["gelu"]},
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any]):
    with pytest.raises(PrepError):
        traits_of(GPT_NEO | changes)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_known_activations_are_taken(name: str):
    assert traits_of(LLAMA | {"hidden_act": name}).activation == name


def test_an_unknown_activation_is_named():
    with pytest.raises(PrepError, match="activation `mish` is not known"):
        traits_of(LLAMA | {"hidden_act": "mish"})
