"""No mistake in what a family says of its layers would pass: each of these exceeds what parity allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.golden.make_decoders import load
from tests.helpers.tiny_transformers import model_logits, tiny_transformer
from tests.trainer.nn.test_parity import LOGITS_ATOL, max_logit_error
from trainer.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig, RelativePositionBias
from trainer.models.rope_config import Rope

Mutation = Callable[[ArchConfig], ArchConfig]


def change(**changes: Any) -> Mutation:
    return lambda traits: dataclasses.replace(traits, **changes)


def rope_change(**changes: Any) -> Mutation:
    def changed(traits: ArchConfig) -> ArchConfig:
        assert traits.rope is not None
        return dataclasses.replace(traits, rope=dataclasses.replace(traits.rope, **changes))

    return changed


def with_window(window: int) -> Mutation:
    """Another window where there is one."""
    return lambda traits: dataclasses.replace(
        traits, sliding_windows=tuple(window if w else w for w in traits.sliding_windows)
    )


def encoder_change(**changes: Any) -> Mutation:
    def changed(traits: ArchConfig) -> ArchConfig:
        assert traits.encoder is not None
        return dataclasses.replace(traits, encoder=dataclasses.replace(traits.encoder, **changes))

    return changed


def far(farthest: int, both_ways: bool, buckets: int = 9) -> RelativePositionBias:
    return RelativePositionBias(buckets, farthest, both_ways)


def turned_round(traits: ArchConfig) -> ArchConfig:
    """Global and local rotation swapped."""
    return dataclasses.replace(traits, rope=traits.local_rope, local_rope=traits.rope)


MUTATIONS: dict[tuple[str, str], Mutation] = {  # golden file, mistake
    ("gpt2", "scores that are not scaled"): change(score_scale=1.0),
    ("gpt2", "another epsilon"): change(norm_eps=1.02e-3),
    ("gpt2", "an exact gelu"): change(activation="gelu"),
    ("gpt_neo", "a window of one more"): change(windows=(0, 4, 0)),
    ("gpt_neo", "a window of one less"): change(windows=(0, 2, 0)),
    ("gpt_neo", "a window in another layer"): change(windows=(3, 0, 0)),
    ("gpt_neo", "no window"): change(windows=(0, 0, 0)),
    ("gpt_neo", "the epsilon of another family"): change(norm_eps=1e-5),
    ("llama", "an epsilon 2 % off"): change(norm_eps=1.02e-3),
    ("gpt_neo", "scaled scores"): change(score_scale=8**-0.5),
    ("llama", "a scale 0.1 % off"): change(score_scale=0.25 * 1.001),
    ("gpt_neo", "the exact gelu"): change(activation="gelu"),
    ("gpt_neo", "the quick gelu"): change(activation="quick_gelu"),
    ("llama", "a gelu for the gate"): change(activation="gelu_new"),
    ("llama", "a theta 1 % off"): rope_change(theta=10_100.0),
    ("llama-linear", "no stretched positions"): rope_change(kind="default"),
    ("llama-llama3", "another factor"): rope_change(factor=8.1),
    ("llama-llama3", "another low factor"): rope_change(low=1.1),
    ("llama-llama3", "another high factor"): rope_change(high=4.2),
    ("llama-llama3", "another length of pretraining"): rope_change(positions=33),
    ("llama-yarn", "an attention factor left out"): rope_change(attention_factor=1.0),
    ("llama-yarn", "corrections that are not whole"): rope_change(truncate=False),
    ("llama-yarn", "another slow beta"): rope_change(low=2.0),
    ("llama-yarn", "another fast beta"): rope_change(high=1.5),
    ("gptj", "halves turn"): change(rotary_pairs="half_split"),
    ("gptj", "more of a head turns"): rope_change(dim=6),
    ("gptj", "one part after the other"): change(residual="pre"),
    ("gptj", "another theta"): rope_change(theta=9_900.0),
    ("opt", "positions from row 0"): change(position_offset=0),
    ("opt", "no last norm"): change(final_norm=False),
    ("opt-350m", "a last norm"): change(final_norm=True),
    ("opt", "norms after"): change(residual="post"),
    ("opt-350m", "norms before"): change(residual="pre"),
    ("gpt_neox", "less of a head turns"): rope_change(dim=2),
    ("gpt_neox", "all of a head turns"): rope_change(dim=8),
    ("gpt_neox", "neighbours turn"): change(rotary_pairs="interleaved"),
    ("gpt_neox", "serial"): change(residual="pre"),
    ("gpt_neox", "one norm"): change(residual="parallel_one_norm"),
    ("gpt_neox-serial", "parallel"): change(residual="parallel"),
    ("gpt_neox", "a tanh gelu"): change(activation="gelu_new"),
    ("mistral", "a window of one more"): with_window(6),
    ("mistral", "a window of one less"): with_window(4),
    ("mixtral", "one expert a token"): change(experts_per_token=1),
    ("mixtral", "all experts for each"): change(experts_per_token=3),
    ("mixtral", "shares as they are"): change(experts_sum_to_one=False),
    ("mixtral", "theta of another family"): rope_change(theta=1e6),
    ("qwen3_moe", "three experts a token"): change(experts_per_token=3),
    ("qwen3_moe", "plain shares"): change(experts_sum_to_one=False),
    ("qwen2", "an epsilon 2 % off"): change(norm_eps=1.02e-3),
    ("qwen3", "no scale of queries"): change(score_scale=1.0),
    ("gemma", "scales from 0"): change(norm="rms"),
    ("gemma", "embeddings as they are"): change(embed_scale=1.0),
    ("gemma", "an exact gelu"): change(activation="gelu"),
    ("gemma2", "no bound of scores"): change(score_cap=NO_SOFTCAP),
    ("gemma2", "another bound of scores"): change(score_cap=1.51),
    ("gemma2", "no bound of logits"): change(logit_cap=NO_SOFTCAP),
    ("gemma2", "another bound of logits"): change(logit_cap=2.01),
    ("gemma2", "norms before alone"): change(residual="pre"),
    ("gemma2", "scores scaled by the head"): change(score_scale=10**-0.5),
    ("gemma2", "the other layer has the window"): change(windows=(FULL_ATTENTION, 5, FULL_ATTENTION)),
    ("gemma2", "a window of 6"): with_window(6),
    ("gemma3_text", "one rotation"): change(local_rope=None),
    ("gemma3_text", "the other rotation"): turned_round,
    ("gemma3_text", "no window"): with_window(FULL_ATTENTION),
    ("t5", "scaled scores"): change(score_scale=6**-0.5),
    ("t5", "scaled scores of the encoder"): encoder_change(score_scale=6**-0.5),
    ("t5", "an epsilon 2 % off"): change(norm_eps=0.102),
    ("t5", "another epsilon of the encoder"): encoder_change(norm_eps=1e-6),
    ("t5", "no scale before the head"): change(head_scale=1.0),
    ("t5-gated", "a scale before the head"): change(head_scale=0.25),
    ("t5", "a gelu"): change(activation="gelu_new"),
    ("t5-gated", "an exact gelu"): change(activation="gelu"),
    ("t5-gated", "an exact gelu of the encoder"): encoder_change(activation="gelu"),
    ("t5", "distances both ways"): change(distances=far(40, True)),
    ("t5", "distances one way in the encoder"): encoder_change(distances=far(40, False)),
    ("t5", "nearer distances are one in the encoder"): encoder_change(distances=far(20, True)),
    ("t5-gated", "no distances"): change(distances=None, rope=Rope(6, 1e4, 9)),
    ("phi3", "half of the turning part"): rope_change(dim=2),
    ("phi3-longrope", "another short factor"): rope_change(short=(1.0, 1.5, 2.6, 4.0)),
    ("phi3-longrope", "no factor of attention"): rope_change(attention_factor=1.0),
    ("phi3-longrope", "the long factors"): rope_change(positions=6),
}
BEYOND: dict[tuple[str, str], Mutation] = {  # mistakes that only long sequences show
    ("llama-dynamic", "another factor"): rope_change(factor=4.1),
    ("llama-dynamic", "another length of pretraining"): rope_change(positions=65),
    ("llama-dynamic", "no stretched positions"): rope_change(kind="default"),
    ("t5", "a bucket less"): change(distances=far(40, False, 8)),
    ("t5", "nearer distances are one"): change(distances=far(39, False)),
    ("t5", "further distances are not one"): change(distances=far(41, False)),
    ("t5-gated", "further distances are not one in the encoder"): encoder_change(distances=far(44, True)),
    ("phi3-longrope", "short factors for all"): rope_change(positions=300),
    ("phi3-longrope", "another long factor"): rope_change(long=(2.0, 3.0, 5.0, 9.1)),
}


@pytest.mark.parametrize(("name", "mistake"), MUTATIONS)
def test_a_mistake_would_be_seen(name: str, mistake: str):
    golden = load(name)
    made = tiny_transformer(golden.config)
    wrong = dataclasses.replace(made.model, arch_config=MUTATIONS[name, mistake](made.model.arch_config))
    assert (
        max_logit_error(golden, model_logits(wrong, made.params_from_tensors(golden.tensors), golden.short))
        > LOGITS_ATOL
    )


@pytest.mark.parametrize(("name", "mistake"), BEYOND)
def test_a_mistake_of_long_sequences_would_be_seen(name: str, mistake: str):
    golden = load(name)
    made = tiny_transformer(golden.config)
    wrong = dataclasses.replace(made.model, arch_config=BEYOND[name, mistake](made.model.arch_config))
    found = model_logits(wrong, made.params_from_tensors(golden.tensors), golden.long)
    assert abs(found - golden.long_logits).max() > LOGITS_ATOL
