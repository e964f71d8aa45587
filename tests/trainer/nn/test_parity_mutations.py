"""Mutation tests of the parity tests: a mistake in an architecture changes logits by more than parity tolerates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from prepcli.commands.testing.tiny_model import model_logits, tiny_transformer
from prepcli.models.architecture import NO_CLIP, NO_SOFTCAP, ArchConfig
from prepcli.models.layer_config import RelativePositionBias
from prepcli.models.rope_config import Rope
from tests.golden.make_decoders import load
from tests.helpers.slow_cases import slow_except
from tests.trainer.nn.test_parity import LOGITS_ATOL, max_short_logit_error

Mutation = Callable[[ArchConfig], ArchConfig]


def change(**changes: Any) -> Mutation:
    """Return a mutation that replaces fields of the architecture."""
    return lambda arch_config: dataclasses.replace(arch_config, **changes)


def change_rope(**changes: Any) -> Mutation:
    """Return a mutation that replaces fields of the rotary embedding."""

    def mutate(arch_config: ArchConfig) -> ArchConfig:
        assert arch_config.rope is not None
        return dataclasses.replace(
            arch_config, rope=dataclasses.replace(arch_config.rope, **changes)
        )

    return mutate


def change_router(**changes: Any) -> Mutation:
    """Return a mutation that replaces fields of the router."""

    def mutate(arch_config: ArchConfig) -> ArchConfig:
        return dataclasses.replace(
            arch_config, router=dataclasses.replace(arch_config.router, **changes)
        )

    return mutate


def change_mixer(**changes: Any) -> Mutation:
    """Return a mutation that replaces fields of the recurrent mixer."""

    def mutate(arch_config: ArchConfig) -> ArchConfig:
        assert arch_config.mixer is not None
        mixer = dataclasses.replace(arch_config.mixer, **changes)
        return dataclasses.replace(arch_config, mixer=mixer)

    return mutate


def change_window(window: int) -> Mutation:
    """Return a mutation that replaces the window of all layers that have one."""

    def mutate(arch_config: ArchConfig) -> ArchConfig:
        windows = tuple(
            window if old_window else old_window for old_window in arch_config.sliding_windows
        )
        return dataclasses.replace(arch_config, sliding_windows=windows)

    return mutate


def change_encoder(**changes: Any) -> Mutation:
    """Return a mutation that replaces fields of the encoder's architecture."""

    def mutate(arch_config: ArchConfig) -> ArchConfig:
        assert arch_config.encoder is not None
        return dataclasses.replace(
            arch_config, encoder=dataclasses.replace(arch_config.encoder, **changes)
        )

    return mutate


def bias_config(
    max_distance: int, bidirectional: bool, num_buckets: int = 9
) -> RelativePositionBias:
    """Return the configuration of a relative position bias."""
    return RelativePositionBias(num_buckets, max_distance, bidirectional)


def swap_ropes(arch_config: ArchConfig) -> ArchConfig:
    """Swap the rotary embeddings of global and local layers."""
    return dataclasses.replace(
        arch_config, rope=arch_config.local_rope, local_rope=arch_config.rope
    )


# (golden file, mistake) -> the change of the architecture.
MUTATIONS: dict[tuple[str, str], Mutation] = {
    ("gpt2", "unscaled scores"): change(attn_scale=1.0),
    ("apertus", "queries without rotation"): change_rope(num_turning_pairs=0),
    ("bitnet", "plain rectifier"): change(activation="relu"),
    ("diffllama", "plain attention"): change(has_differential_attention=False),
    ("doge", "no scores of keys"): change(has_key_scores=False),
    ("gpt_neox_japanese", "parallel block"): change(block_type="parallel"),
    ("gemma4_text", "values without a norm"): change(has_plain_value_norm=False),
    ("gemma4_text", "layers without inputs"): change(block_type="sandwich"),
    ("gpt2", "epsilon 2 % off"): change(norm_eps=1.02e-3),
    ("gpt2", "exact gelu"): change(activation="gelu"),
    ("gpt_neo", "window 1 larger"): change(sliding_windows=(0, 4, 0)),
    ("gpt_neo", "quick gelu"): change(activation="quick_gelu"),
    ("llama", "gelu for the gate"): change(activation="gelu_new"),
    ("llama", "theta 1 % off"): change_rope(theta=10_100.0),
    ("llama-linear", "unscaled positions"): change_rope(rope_type="default"),
    ("llama-llama3", "another factor"): change_rope(factor=8.1),
    ("llama-llama3", "another low factor"): change_rope(low_freq_factor=1.1),
    ("llama-llama3", "another high factor"): change_rope(high_freq_factor=4.2),
    ("llama-llama3", "another pretraining length"): change_rope(original_max_positions=33),
    ("llama-yarn", "no attention factor"): change_rope(attention_factor=1.0),
    ("llama-yarn", "untruncated correction range"): change_rope(truncate=False),
    ("llama-yarn", "another slow beta"): change_rope(low_freq_factor=2.0),
    ("llama-yarn", "another fast beta"): change_rope(high_freq_factor=1.5),
    ("gptj", "half-split rotary pairs"): change(rotary_pairs="half_split"),
    ("gptj", "larger rotary dim"): change_rope(rotary_dim=6),
    ("gptj", "sequential block"): change(block_type="pre"),
    ("opt", "positions from row 0"): change(position_offset=0),
    ("opt", "no final norm"): change(has_final_norm=False),
    ("opt", "norms after"): change(block_type="post"),
    ("gpt_neox", "one norm"): change(block_type="parallel_one_norm"),
    ("mistral", "window 1 larger"): change_window(6),
    ("mixtral", "one expert per token"): change(experts_per_token=1),
    ("mixtral", "unnormalized expert weights"): change_router(is_normalized=False),
    ("qwen2_moe", "layers with experts swapped"): change(dense_layers=(1,)),
    ("gpt_oss", "plain SwiGLU"): change(clamped_swiglu=None),
    ("deepseek_v2", "greedy choice"): change_router(num_groups=1, groups_per_token=1),
    ("deepseek_v2", "unscaled weights"): change_router(scale=1.0),
    ("deepseek_v3", "softmax scores"): change_router(scores="softmax"),
    ("deepseek_v3", "epsilon of other norms for latents"): change(latent_norm_eps=1e-3),
    ("granitemoe", "unscaled residuals"): change(residual_scale=1.0),
    ("gemma", "norm scale without offset"): change(norm="rms"),
    ("gemma", "unscaled embeddings"): change(embed_scale=1.0),
    ("gemma2", "another score softcap"): change(attn_logit_softcap=1.51),
    ("gemma2", "no logit softcap"): change(final_logit_softcap=NO_SOFTCAP),
    ("gemma3_text", "one rope for all layers"): change(local_rope=None),
    ("gemma3_text", "swapped ropes"): swap_ropes,
    ("t5", "scaled scores of the encoder"): change_encoder(attn_scale=6**-0.5),
    ("t5", "another epsilon of the encoder"): change_encoder(norm_eps=1e-6),
    ("t5", "unscaled LM head input"): change(lm_head_input_scale=1.0),
    ("t5-gated", "exact gelu of the encoder"): change_encoder(activation="gelu"),
    ("t5", "bidirectional buckets"): change(score_bias=bias_config(40, True)),
    ("t5", "unidirectional buckets of the encoder"): change_encoder(
        score_bias=bias_config(40, False)
    ),
    ("t5-gated", "rope for bias"): change(score_bias=None, rope=Rope(6, 1e4, 9)),
    ("olmo2", "norms of each head"): change(qk_norm_axes="head"),
    ("smollm3", "rotation in all layers"): change(layers_without_rope=()),
    ("nanochat", "rotation forwards"): change_rope(is_reversed=False),
    ("nanochat", "embeddings without a norm"): change(has_plain_embed_norm=False),
    ("phimoe", "softmax of all logits"): change_router(mixing_range=1e9),
    ("llama4_text", "no chunks"): change(chunked_layers=()),
    ("llama4_text", "chunks 1 larger"): change(attention_chunk=7),
    ("llama4_text", "no norms of queries and keys"): change(has_plain_qk_norm=False),
    ("llama4_text", "scores on the output of experts"): change_router(scales_input=False),
    ("falcon_h1", "unscaled input of attention"): change(attn_input_scale=1.0),
    ("falcon_h1", "unscaled output of attention"): change(attn_output_scale=1.0),
    ("falcon_h1", "unscaled gate"): change(gate_scale=1.0),
    ("falcon_h1", "unscaled output of the MLP"): change(mlp_output_scale=1.0),
    ("falcon_h1", "norm before the gate"): change_mixer(norm_place="before_gate"),
    ("falcon_h1", "unscaled input of the mixer"): change_mixer(input_scale=1.0),
    ("falcon_h1", "unscaled projections of the mixer"): change_mixer(projection_scales=()),
    ("falcon_h1", "unscaled output of the mixer"): change_mixer(output_scale=1.0),
    ("nemotron_h", "squared ReLU in the mixer"): change_mixer(activation=None),
    ("falcon_mamba", "no norms in the mixer"): change_mixer(plain_norm_eps=None),
    ("olmo", "no bounds of projections"): change(qkv_clip=NO_CLIP),
    ("hunyuan_v1_dense", "QK norms before rotation"): change(rotates_before_qk_norm=False),
    ("nemotron", "scales without offset"): change(norm="layer"),
    ("phi3-longrope", "another short factor"): change_rope(short_factors=(1.0, 1.5, 2.6, 4.0)),
    ("phi3-longrope", "no attention factor"): change_rope(attention_factor=1.0),
    ("phi3-longrope", "long factors"): change_rope(original_max_positions=6),
}
# Mistakes that change long sequences only.
LONG_MUTATIONS: dict[tuple[str, str], Mutation] = {
    ("llama-dynamic", "another factor"): change_rope(factor=4.1),
    ("llama-dynamic", "another pretraining length"): change_rope(original_max_positions=65),
    ("llama-dynamic", "unscaled positions"): change_rope(rope_type="default"),
    ("deepseek_v3", "groups by maximum"): change_router(group_score="maximum"),
    ("t5", "one bucket less"): change(score_bias=bias_config(40, False, 8)),
    ("t5-gated", "larger maximum of the encoder"): change_encoder(score_bias=bias_config(44, True)),
    ("llama4_text", "no growth of queries"): change(query_scale=None),
    ("ministral3", "no growth of queries"): change_rope(query_scale=None),
    ("phi3-longrope", "short factors for all"): change_rope(original_max_positions=300),
    ("phi3-longrope", "another long factor"): change_rope(long_factors=(2.0, 3.0, 5.0, 9.1)),
}

# One mistake for each kind of part: norms, masks, rotary embeddings, positions, blocks, biases,
# experts, heads.
FAST = (
    ("gpt_neo", "window 1 larger"),
    ("gptj", "half-split rotary pairs"),
    ("opt", "positions from row 0"),
    ("gemma2", "another score softcap"),
    ("mixtral", "one expert per token"),
    ("t5", "unscaled LM head input"),
    ("llama-dynamic", "another factor"),
    ("olmo2", "norms of each head"),
)


@pytest.mark.parametrize(
    ("name", "mistake"), slow_except([*MUTATIONS, *LONG_MUTATIONS], lambda case: case in FAST)
)
def test_mutation_changes_logits(name: str, mistake: str):
    golden = load(name)
    tiny = tiny_transformer(golden.config)
    is_long = (name, mistake) in LONG_MUTATIONS
    mutate = (LONG_MUTATIONS if is_long else MUTATIONS)[name, mistake]
    mutant = dataclasses.replace(tiny.model, arch_config=mutate(tiny.model.arch_config))
    batch = golden.long if is_long else golden.short
    logits = model_logits(mutant, tiny.params_from_tensors(golden.tensors), batch)
    if is_long:
        error = abs(logits - golden.long_logits).max()
    else:
        error = max_short_logit_error(golden, logits)
    assert error > LOGITS_ATOL


def test_each_fast_mutation_is_a_known_mutation():
    assert {*FAST} <= MUTATIONS.keys() | LONG_MUTATIONS.keys()
