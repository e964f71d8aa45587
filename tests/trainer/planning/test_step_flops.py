"""Operations of a step against counts by hand, by XLA, and published figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.model_configs import MODEL_CONFIGS
from prepcli.models.activation_memory import NO_SCORES
from prepcli.models.lora import build_adapters
from prepcli.models.lora_config import LoraConfig
from prepcli.models.registry import FAMILIES
from tests.helpers.later_configs import LATER_FAMILIES
from tests.trainer.planning.test_memory_estimate import make_inputs
from trainer.planning.step_flops import StepFlops, count_step_flops

LLAMA_7B, MIXTRAL, T5 = (MODEL_CONFIGS[name] for name in ("7b", "mixtral", "t5"))
DEEPSEEK_V3 = MODEL_CONFIGS["deepseek_v3"]
LENGTH, ROWS = 2048, 4
TOKENS = LENGTH * ROWS
# Parameters of LLaMA 7B without the embedding and the norms.
MATRICES_7B = 6_738_415_616 - 32000 * 4096 - (2 * 32 + 1) * 4096


def count(family: str, config: Any, **options: Any) -> StepFlops:
    """Count the operations of a step of four sequences."""
    return count_step_flops(
        make_inputs(family, config, micro_batch_size=ROWS, seq_length=LENGTH, **options)
    )


def test_matmul_is_six_per_parameter_and_token():
    assert count("llama", LLAMA_7B).matmul == 6 * MATRICES_7B * TOKENS
    tied = count("llama", LLAMA_7B | {"tie_word_embeddings": True})
    assert tied.matmul == 6 * MATRICES_7B * TOKENS, "a tied head is a matrix product too"


def test_attention_full_is_the_formula_of_palm():
    flops = count("llama", LLAMA_7B)
    assert flops.attention_full == 12 * 32 * 4096 * LENGTH * TOKENS
    assert flops.attention_causal == flops.attention_full * (LENGTH + 1) // (2 * LENGTH)
    assert flops.attention_causal + flops.masked == flops.attention_full


def test_differential_attention_reads_values_of_two_heads():
    plain = count("llama", LLAMA_7B)
    differential = count("diffllama", LLAMA_7B)
    # Products of queries and keys, and twice as many of probabilities and values.
    assert differential.attention_full == 3 * plain.attention_full // 2


def test_windows_limit_attention_per_layer():
    config = LLAMA_7B | {"sliding_window": 256}
    windowed, full = count("mistral", config), count("mistral", config | {"sliding_window": None})
    assert windowed.attention_full == full.attention_full * 256 // LENGTH
    pairs = sum(min(position + 1, 256) for position in range(LENGTH))
    heads_size = full.attention_full // (12 * 32 * LENGTH * TOKENS)
    assert windowed.attention_causal == 12 * 32 * heads_size * pairs * ROWS
    assert windowed.masked + windowed.attention_causal == full.attention_full, (
        "the reference kernel computes all"
    )


def test_chunks_limit_attention_to_their_own_pairs():
    config = tiny_llama4(attention_chunk_size=4)
    flops = count_step_flops(make_inputs("llama4_text", config, seq_length=10))
    whole = count_step_flops(
        make_inputs("llama4_text", tiny_llama4(attention_chunk_size=None), seq_length=10)
    )
    # 10 tokens: 55 pairs, or 10 + 10 + 3 in chunks of 4, 4 and 2.
    assert flops.attention_causal * 55 == whole.attention_causal * 23


def tiny_llama4(**changes: Any) -> dict[str, Any]:
    """Return a config of Llama 4 in which all layers rotate."""
    return LATER_FAMILIES["llama4_text"] | {"no_rope_layers": [1, 1, 1], **changes}


def test_experts_count_for_their_tokens():
    dense = MIXTRAL | {"num_experts_per_tok": 8}
    two, eight = count("mixtral", MIXTRAL), count("mixtral", dense)
    expert_size = 3 * MIXTRAL["hidden_size"] * MIXTRAL["intermediate_size"]
    assert eight.matmul - two.matmul == 6 * 6 * expert_size * MIXTRAL["num_hidden_layers"] * TOKENS


def test_flops_count_the_matrices_of_each_kind_of_layer():
    """The model has one dense layer, four MoE layers with 4 of 32 experts, and shared experts of twice the width."""
    flops = count("deepseek_v3", DEEPSEEK_V3)
    width, heads, mlp = 512, 8, 192
    queries = 192 * width + heads * 96 * 192
    keys_and_values = (128 + 32) * width + heads * (64 + 64) * 128
    attention = queries + keys_and_values + heads * 64 * width
    sparse = 32 * width + 3 * width * (4 * mlp + 2 * mlp)
    matrices = 5 * attention + 3 * width * 1024 + 4 * sparse + 32000 * width
    assert flops.matmul == 6 * matrices * TOKENS
    assert flops.attention_full == 5 * 3 * 2 * heads * (96 + 64) * LENGTH * TOKENS


def test_encoder_and_decoder_count_their_own_tokens():
    short, long = count("t5", T5, source_length=128), count("t5", T5, source_length=256)
    assert long.matmul > short.matmul
    assert long.attention_full > short.attention_full
    assert short.attention_causal < short.attention_full, (
        "only the decoder's own attention is causal"
    )


@pytest.mark.parametrize(
    ("options", "layers", "attention"),
    [
        ({}, 0, 0),
        ({"remat_policy": "dots_saveable"}, 0, 0),
        ({"remat_policy": "dots_with_no_batch_dims_saveable"}, 0, 1),
        ({"remat_policy": "nothing_saveable"}, 1, 1),
        ({"ffn_chunk_size": 512}, 1, 0),
        ({"attention_tile": (512, 512)}, 0, 0.5),
        ({"attention_tile": (512, 512), "remat_policy": "nothing_saveable"}, 1, 1.5),
    ],
)
def test_recomputed_follows_policy_and_chunks(
    options: dict[str, Any], layers: int, attention: float
):
    flops, plain = count("llama", LLAMA_7B, **options), count("llama", LLAMA_7B)
    forward_layers = 2 * (MATRICES_7B - 32000 * 4096) * TOKENS
    forward_attention = plain.attention_full // 3
    forward_attention = (
        forward_attention * 10 // 16 if "attention_tile" in options else forward_attention
    )
    assert flops.recomputed == layers * forward_layers + int(attention * forward_attention)
    assert flops.executed == flops.model_flops_of_visible_pairs + flops.masked + flops.recomputed


@pytest.mark.parametrize(
    ("tile", "window", "num_tiles"),
    [
        # Of 4 x 4 tiles, the ones on and below the diagonal have visible pairs.
        ((512, 512), None, 10),
        # Each row of tiles has the tile on the diagonal and one to the left of it.
        ((512, 512), 256, 7),
        ((512, -1), None, 4),
        ((-1, -1), None, 1),
        # The last tile of each side is padded.
        ((600, 1000), None, 1 + 2 + 2 + 3),
    ],
)
def test_masked_counts_the_tiles_with_visible_pairs(
    tile: tuple[int, int], window: int | None, num_tiles: int
):
    flops = count("mistral", LLAMA_7B | {"sliding_window": window}, attention_tile=tile)
    q_size, kv_size = (LENGTH if size == -1 else size for size in tile)
    pairs = num_tiles * q_size * kv_size
    assert flops.attention_causal + flops.masked == 12 * 32 * 4096 * pairs * ROWS


def test_sources_without_tokens_have_no_pairs():
    pairs = T5["num_layers"] * LENGTH * LENGTH * ROWS
    tiled = count("t5", T5, source_length=0, attention_tile=(LENGTH, LENGTH))
    assert tiled.attention_causal + tiled.masked == 12 * 8 * 64 * pairs


def test_kernels_without_scores_skip_masked_pairs():
    assert count("llama", LLAMA_7B, attention_tile=NO_SCORES).masked == 0


def test_flops_do_not_depend_on_micro_batches():
    inputs = make_inputs("llama", LLAMA_7B, micro_batch_size=ROWS, seq_length=LENGTH)
    half = replace(inputs, micro_batch_size=ROWS // 2, accumulate=2)
    assert count_step_flops(half) == count_step_flops(inputs)


def test_frozen_matrices_have_no_gradients():
    inputs = make_inputs("llama", LLAMA_7B, micro_batch_size=ROWS, seq_length=LENGTH)
    head = "head.weight"
    frozen = count_step_flops(replace(inputs, frozen=frozenset(inputs.leaves.keys() - {head})))
    assert frozen.matmul == 4 * MATRICES_7B * TOKENS + 2 * 32000 * 4096 * TOKENS
    assert frozen.attention_full == count_step_flops(inputs).attention_full
    assert (
        count_step_flops(replace(inputs, frozen=frozenset(inputs.leaves))).matmul
        == 4 * MATRICES_7B * TOKENS
    )


def test_adapters_are_trained_and_their_base_is_frozen():
    family, rank = FAMILIES["llama"], 8
    adapters = build_adapters(
        family, LLAMA_7B, LoraConfig(rank, 16.0, ("attn.q", "mlp.down"))
    ).leaves
    inputs = make_inputs("llama", LLAMA_7B, micro_batch_size=ROWS, seq_length=LENGTH)
    num_adapters = 32 * rank * (4096 + 4096 + 11008 + 4096)
    flops = count_step_flops(replace(inputs, adapters=adapters))
    assert flops.matmul == (4 * MATRICES_7B + 6 * num_adapters) * TOKENS


def test_forward_and_backward_match_the_count_of_xla():
    """XLA also counts elementwise operations, which are few in a wide model."""
    from bench.compiled_memory import lower_step
    from trainer.nn.model_spec import ForwardConfig, build_model

    config = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 1024,
    }
    model = build_model(FAMILIES["llama"], config | {"vocab_size": 512}, is_tied=False)
    forward_config = ForwardConfig(scan_layers=False, head_chunk_size=-1)
    cost = lower_step(model, forward_config, 1, 256).cost_analysis()
    flops = count_step_flops(
        make_inputs("llama", config | {"vocab_size": 512}, seq_length=256, head_chunk_size=-1)
    )
    assert cost is not None
    assert flops.executed == pytest.approx(cost["flops"], rel=0.05)
