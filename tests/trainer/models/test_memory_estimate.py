"""Tests of the memory estimate of a training step against XLA's memory plans of the same step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from trainer.models.memory_estimate import MemoryEstimate, estimate_memory
from trainer.models.memory_inputs import MemoryInputs
from trainer.models.mesh import parse_mesh
from trainer.models.param_tree import param_leaves
from trainer.models.registry import FAMILIES
from trainer.models.remat import ACTIVATION_NAMES, RematPolicy
from trainer.models.rules import DEFAULT_RULES

MIB = 1 << 20
SMALL = {
    "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 1376,
    "vocab_size": 32000,
}  # fmt: skip
DEEP = SMALL | {"num_hidden_layers": 8}
LLAMA_7B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
    "vocab_size": 32000,
}  # fmt: skip
LLAMA_13B = LLAMA_7B | {
    "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 13824,
}  # fmt: skip
NEO = {
    "hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    "attention_types": [[["global", "local"], 2]], "window_size": 256,
}  # fmt: skip
NEOX = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 32000,
    "intermediate_size": 2048, "max_position_embeddings": 32768,
}  # fmt: skip
MIXTRAL = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1024, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 32768, "sliding_window": None,
}  # fmt: skip
QWEN_MOE = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "moe_intermediate_size": 192, "vocab_size": 32000, "num_experts": 32, "num_experts_per_tok": 8,
}  # fmt: skip
T5 = {
    "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 8,
    "vocab_size": 32000, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip


def make_inputs(family_name: str, config: Mapping[str, Any], mesh: str = "", **options: Any) -> MemoryInputs:
    """Return the inputs of the estimate of a family's config."""
    family = FAMILIES[family_name]
    return MemoryInputs(
        arch_config=family.arch_config(config),
        leaves=param_leaves(family, config, family.is_tied(config)),
        mesh=parse_mesh(mesh) if mesh else None,
        rules=DEFAULT_RULES,
        **{"micro_batch_size": 1, **options},
    )


def estimate(family_name: str, config: Mapping[str, Any], mesh: str = "", **options: Any) -> MemoryEstimate:
    """Estimate the memory of a family's config."""
    return estimate_memory(make_inputs(family_name, config, mesh, **options))


# family, config, mesh, rows, length, remat policy, and the MiB of arguments and temporaries that XLA's
# `memory_analysis()` states for a whole training step in float32 (jax 0.10.2 on CPU devices)
COMPILED = [
    ("llama", SMALL, "", 1, 2048, "none", 1847),
    ("llama", SMALL, "", 1, 2048, "nothing_saveable", 1386),
    ("llama", SMALL, "", 1, 2048, "dots_saveable", 1607),
    ("llama", SMALL, "", 1, 2048, "dots_with_no_batch_dims_saveable", 1431),
    ("llama", SMALL, "", 1, 8192, "none", 16152),
    ("llama", SMALL, "", 1, 8192, "nothing_saveable", 9319),
    ("llama", DEEP, "", 4, 256, "none", 1684),
    ("llama", DEEP, "", 4, 256, "nothing_saveable", 1487),
    ("llama", DEEP, "", 4, 1024, "none", 4556),
    ("llama", DEEP, "", 4, 1024, "everything_saveable", 5820),
    ("llama", DEEP, "", 4, 1024, "dots_saveable", 3499),
    ("llama", DEEP, "1,2,4", 4, 1024, "none", 606),
    ("llama", DEEP, "1,2,4", 4, 1024, "nothing_saveable", 264),
    ("llama", LLAMA_7B, "1,64,4", 64, 2048, "none", 12546),
    ("llama", LLAMA_7B, "1,64,4", 64, 2048, "nothing_saveable", 1698),
    ("gpt_neo", NEO, "", 4, 1024, "none", 3125),
    ("gpt_neo", NEO, "", 4, 1024, "nothing_saveable", 2202),
    ("gpt_neox", NEOX, "", 4, 1024, "none", 2789),
    ("gpt_neox", NEOX, "", 4, 1024, "nothing_saveable", 1580),
    ("mixtral", MIXTRAL, "", 4, 1024, "none", 3484),
    ("mixtral", MIXTRAL, "", 4, 1024, "nothing_saveable", 2487),
    ("mixtral", MIXTRAL, "", 4, 1024, "dots_saveable", 2998),
    ("mixtral", MIXTRAL, "1,2,4", 4, 1024, "nothing_saveable", 328),
    ("qwen3_moe", QWEN_MOE, "", 4, 1024, "none", 3262),
    ("qwen3_moe", QWEN_MOE, "", 4, 1024, "nothing_saveable", 2288),
    ("t5", T5, "", 4, 1024, "none", 6230),
    ("t5", T5, "", 4, 1024, "nothing_saveable", 2493),
]


@pytest.mark.parametrize(("family", "config", "mesh", "rows", "length", "remat_policy", "compiled_mib"), COMPILED)
def test_peak_is_close_to_xla_plan(
    family: str, config: Mapping[str, Any], mesh: str, rows: int, length: int, remat_policy: str, compiled_mib: int
):
    options = {"micro_batch_size": rows, "seq_length": length, "remat_policy": remat_policy}
    memory = estimate(family, config, mesh, source_length=length if family == "t5" else 0, **options)
    assert memory.peak / MIB == pytest.approx(compiled_mib, rel=0.15)


# MiB of temporaries of loss and gradients without the optimizer
@pytest.mark.parametrize(
    ("length", "remat_policy", "temp_mib"),
    [(8192, "none", 15386), (8192, "nothing_saveable", 8925), (32768, "nothing_saveable", 140745)],
)
def test_activations_grow_with_length_like_xla_plan(length: int, remat_policy: str, temp_mib: int):
    memory = estimate("llama", SMALL, seq_length=length, remat_policy=remat_policy)
    assert memory.activations / MIB == pytest.approx(temp_mib, rel=0.1)


@pytest.mark.parametrize(
    ("length", "ffn_chunk_size", "temp_mib"),
    [(8192, 1024, 364), (32768, -1, 2527), (32768, 1024, 1281), (131072, 1024, 4982)],
)
def test_blockwise_attention_grows_linearly_like_xla_plan(length: int, ffn_chunk_size: int, temp_mib: int):
    options = {"remat_policy": "nothing_saveable", "attention_tile": (512, 512), "ffn_chunk_size": ffn_chunk_size}
    memory = estimate("llama", SMALL, seq_length=length, **options)
    assert memory.activations / MIB == pytest.approx(temp_mib, rel=0.15)


ATTENTION = ("q", "k", "v", "attention_output")
TWO_BLOCKS = ("o", "mlp_hidden")
THIN_HEAD = DEEP | {"vocab_size": 1024}  # layers need more than the head


@pytest.mark.parametrize(
    ("family", "config", "mesh", "rows", "length", "names", "temp_mib"),
    [
        ("llama", DEEP, "", 1, 4096, ATTENTION[:3], 687),
        ("llama", DEEP, "", 1, 4096, ATTENTION, 760),
        ("llama", DEEP, "", 1, 4096, TWO_BLOCKS, 813),
        ("gpt_neox", NEOX, "", 1, 2048, ("attention_output", "mlp_hidden"), 352),
        ("llama", THIN_HEAD, "1,2,4", 2, 2048, ATTENTION, 104),
        ("llama", THIN_HEAD, "1,2,4", 2, 2048, ("o",), 80),
        ("llama", THIN_HEAD, "1,2,4", 2, 2048, ("mlp_hidden",), 111),
    ],
)
def test_named_activations_need_memory_like_xla_plan(
    family: str, config: Mapping[str, Any], mesh: str, rows: int, length: int, names: tuple[str, ...], temp_mib: int
):
    options = {"micro_batch_size": rows, "seq_length": length, "remat_policy": names, "attention_tile": (512, 512)}
    memory = estimate(family, config, mesh, **options)
    assert memory.activations / MIB == pytest.approx(temp_mib, rel=0.15)


@pytest.mark.parametrize(
    ("family", "config", "name", "num_arrays"),
    [("llama", DEEP, "o", 8), ("llama", DEEP, "mlp_output", 0), ("gpt_neox", NEOX, "o", 0), ("gemma2", {}, "o", 26)],
)
def test_outputs_of_blocks_are_saved_for_norms(family: str, config: Mapping[str, Any], name: str, num_arrays: int):
    plain, named = (
        make_inputs(family, config, seq_length=64, remat_policy=policy) for policy in ("nothing_saveable", (name,))
    )
    difference = estimate_memory(named).saved - estimate_memory(plain).saved
    assert difference == num_arrays * 64 * plain.embed_size * 4


def test_offload_moves_inputs_of_layers_out_of_the_peak():
    options: dict[str, Any] = {"seq_length": 4096, "attention_tile": (512, 512), "remat_policy": ATTENTION}
    kept, offloaded = (estimate("llama", DEEP, **options, offload=place) for place in ("none", "residuals"))
    inputs_nbytes = 8 * 4096 * 512 * 4
    assert (kept.offloaded, offloaded.offloaded) == (0, inputs_nbytes)
    assert kept.peak - offloaded.peak == inputs_nbytes


@pytest.mark.parametrize(
    ("mesh", "rows", "temp_mib"), [("sp:2", 1, 855), ("sp:4", 1, 520), ("fsdp:2,mp:2,sp:2", 2, 496)]
)
def test_ring_attention_splits_tokens_like_xla_plan(mesh: str, rows: int, temp_mib: int):
    options = {"remat_policy": "nothing_saveable", "attention_tile": (512, 512), "ffn_chunk_size": 1024}
    memory = estimate("llama", SMALL, mesh, micro_batch_size=rows, seq_length=32768, **options)
    assert memory.activations / MIB == pytest.approx(temp_mib, rel=0.15)


def test_tile_of_ring_attention_lies_in_one_block():
    """Each of 4 devices has two blocks of 1,024 of 8,192 tokens."""
    memory = estimate("llama", SMALL, "sp:4", seq_length=8192, attention_tile=(-1, -1))
    assert memory.scores == 8 * 1024 * 1024 * 4


# MiB of arguments and temporaries of a whole training step in bfloat16 that XLA plans for v5p:8x8x4 (libtpu 0.0.52)
@pytest.mark.parametrize(
    ("config", "ffn_chunk_size", "compiled_mib"),
    [(LLAMA_7B, -1, 4477), (LLAMA_7B, 2048, 3930), (LLAMA_13B, 2048, 5829)],
)
def test_peak_is_close_to_tpu_plan(config: Mapping[str, Any], ffn_chunk_size: int, compiled_mib: int):
    options = {"itemsize": 2, "blocks_overlap": False, "remat_policy": "nothing_saveable", "attention_tile": (512, 512)}
    sizes = {"micro_batch_size": 64, "seq_length": 32768, "ffn_chunk_size": ffn_chunk_size}
    memory = estimate("llama", config, "1,64,4", **sizes, **options)
    assert memory.peak / MIB == pytest.approx(compiled_mib, rel=0.15)


@pytest.mark.parametrize("remat_policy", ["none", "everything_saveable"])
def test_layers_without_remat_hold_attention_and_mlp(remat_policy: str):
    overlapping, exclusive = (
        estimate("llama", DEEP, seq_length=1024, remat_policy=remat_policy, blocks_overlap=overlap)
        for overlap in (True, False)
    )
    assert overlapping == exclusive


def test_experts_need_rows_of_one_chunk_and_save_nothing():
    """Each token has 2 outputs and 2 gradients of 512 float32 elements."""
    options: dict[str, Any] = {"seq_length": 4096, "remat_policy": "dots_saveable"}
    two, four = (
        estimate("mixtral", MIXTRAL | {"num_experts_per_tok": top_k}, **options, ffn_chunk_size=1024)
        for top_k in (2, 4)
    )
    assert 2 * 2 * 1024 * 512 * 4 <= four.layer - two.layer <= 3 * 2 * 1024 * 512 * 4
    assert four.saved == two.saved


def test_scores_of_13b_at_32k_take_40_gib_per_layer():
    memory = estimate("llama", LLAMA_13B, "1,8,4", micro_batch_size=8, seq_length=32768)
    assert memory.scores == 10 * 32768**2 * 4, "1 row x 10 heads x queries x keys, float32"
    assert memory.peak > memory.scores * 40, "without rematerialization each layer saves its scores"


def test_state_takes_12_bytes_per_parameter():
    memory = estimate("llama", SMALL, seq_length=64)
    count = 2 * (4 * 512 * 512 + 3 * 512 * 1376 + 2 * 512) + 2 * 32000 * 512 + 512
    assert (memory.parameters, memory.moments, memory.state) == (4 * count, 8 * count, 12 * count)


def test_mesh_splits_state_and_activations():
    one_device = estimate("llama", DEEP, micro_batch_size=8, seq_length=1024)
    split = estimate("llama", DEEP, "1,2,4", micro_batch_size=8, seq_length=1024)
    assert split.parameters == pytest.approx(one_device.parameters / 8, rel=0.01)
    assert split.scores == one_device.scores / 8
    assert one_device.saved / 8 < split.saved < one_device.saved / 4


def test_bfloat16_halves_part_of_saved_activations():
    float32, bfloat16 = (
        estimate("llama", DEEP, micro_batch_size=8, seq_length=1024, itemsize=itemsize) for itemsize in (4, 2)
    )
    assert 0.5 < bfloat16.saved / float32.saved < 0.8
    assert bfloat16.scores == float32.scores, "scores are float32"
    assert bfloat16.state == float32.state


def test_remat_policies_are_ordered_by_saved_bytes():
    policies = ("everything_saveable", "none", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
    saved = [
        estimate("llama", DEEP, micro_batch_size=4, seq_length=1024, remat_policy=policy).saved for policy in policies
    ]
    assert saved == sorted(saved, reverse=True)
    assert len({*saved}) == len(policies)


def test_indivisible_kv_heads_count_as_repeated():
    grouped = DEEP | {"num_key_value_heads": 2}
    divided = estimate("llama", grouped, "1,1,2", seq_length=1024)
    repeated = estimate("llama", grouped, "1,1,4", seq_length=1024)
    assert repeated.saved > divided.saved / 2


@pytest.mark.parametrize("head_chunk_size", [512, 1024, 4096, -1])
def test_lm_head_grows_with_chunk_size(head_chunk_size: int):
    memory = estimate("llama", SMALL, seq_length=4096, head_chunk_size=head_chunk_size)
    tokens = 4096 if head_chunk_size == -1 else head_chunk_size
    assert memory.head == 4 * (2 * tokens * 32000 + 32000 * 512)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_an_estimate(name: str):
    inputs = make_inputs(name, {}, seq_length=16)
    memory = estimate_memory(replace(inputs, source_length=16 if inputs.arch_config.encoder else 0))
    assert min(memory.parameters, memory.saved, memory.layer, memory.head, memory.scores) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat_policy", ["none", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", ACTIVATION_NAMES]
)
@pytest.mark.parametrize(("family_name", "config"), [("llama", SMALL), ("gpt_neox", NEOX), ("mixtral", MIXTRAL)])
def test_activations_are_close_to_current_xla_plan(
    family_name: str, config: Mapping[str, Any], remat_policy: RematPolicy
):
    """The margin is wide, because XLA fuses less with the flags of the test suite."""
    from bench.compiled_memory import compile_step
    from trainer.nn.model_spec import ForwardConfig, build_model

    family = FAMILIES[family_name]
    model = build_model(family, config, is_tied=family.is_tied(config))
    compiled = compile_step(model, ForwardConfig(remat_policy=remat_policy), 1, 1024)
    memory = estimate(family_name, config, seq_length=1024, remat_policy=remat_policy)
    assert memory.activations == pytest.approx(compiled.temp_nbytes, rel=0.35)
