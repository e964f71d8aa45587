"""The memory estimate of a training step against what XLA planned for the same step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from trainer.models.memory_estimate import MemoryEstimate, MemoryInputs, estimate_memory
from trainer.models.mesh import DEFAULT_RULES, parse_mesh
from trainer.models.param_tree import param_leaves
from trainer.models.registry import FAMILIES

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
T5 = {
    "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 8,
    "vocab_size": 32000, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip


def run(family: str, config: Mapping[str, Any], mesh: str = "", **how: Any) -> MemoryInputs:
    found = FAMILIES[family]
    model = param_leaves(found, config, found.tied(config))
    on = parse_mesh(mesh) if mesh else None
    return MemoryInputs(found.traits(config), model, on, DEFAULT_RULES, **{"sequences": 1, **how})


def estimated(family: str, config: Mapping[str, Any], mesh: str = "", **how: Any) -> MemoryEstimate:
    return estimate_memory(run(family, config, mesh, **how))


# `memory_analysis()` of a whole training step in float32, jax 0.10.2 on CPU devices: arguments and temporaries, in MiB
COMPILED = [
    ("llama", SMALL, "", 1, 2048, "none", 1943),
    ("llama", SMALL, "", 1, 2048, "nothing_saveable", 1338),
    ("llama", SMALL, "", 1, 2048, "dots_saveable", 1571),
    ("llama", SMALL, "", 1, 2048, "dots_with_no_batch_dims_saveable", 1393),
    ("llama", SMALL, "", 1, 8192, "none", 16632),
    ("llama", SMALL, "", 1, 8192, "nothing_saveable", 9282),
    ("llama", DEEP, "", 4, 256, "none", 2075),
    ("llama", DEEP, "", 4, 256, "nothing_saveable", 1559),
    ("llama", DEEP, "", 4, 1024, "none", 5852),
    ("llama", DEEP, "", 4, 1024, "dots_saveable", 3722),
    ("llama", DEEP, "1,2,4", 4, 1024, "none", 820),
    ("llama", DEEP, "1,2,4", 4, 1024, "nothing_saveable", 296),
    ("llama", LLAMA_7B, "1,64,4", 64, 2048, "none", 18564),
    ("llama", LLAMA_7B, "1,64,4", 64, 2048, "nothing_saveable", 1893),
    ("gpt_neo", NEO, "", 4, 1024, "none", 3861),
    ("gpt_neo", NEO, "", 4, 1024, "nothing_saveable", 2140),
    ("gpt_neox", NEOX, "", 4, 1024, "none", 3624),
    ("gpt_neox", NEOX, "", 4, 1024, "nothing_saveable", 1704),
    ("mixtral", MIXTRAL, "", 4, 1024, "none", 4003),
    ("mixtral", MIXTRAL, "", 4, 1024, "nothing_saveable", 2624),
    ("t5", T5, "", 4, 1024, "none", 8269),
    ("t5", T5, "", 4, 1024, "nothing_saveable", 2604),
]


@pytest.mark.parametrize(("family", "config", "mesh", "rows", "length", "remat", "compiled_mib"), COMPILED)
def test_the_peak_is_near_what_xla_plans(
    family: str, config: Mapping[str, Any], mesh: str, rows: int, length: int, remat: str, compiled_mib: int
):
    source = length if family == "t5" else 0
    found = estimated(family, config, mesh, sequences=rows, length=length, source_length=source, remat=remat)
    assert found.peak / MIB == pytest.approx(compiled_mib, rel=0.15)


# Loss and gradients alone: temporaries without the optimizer, in MiB
@pytest.mark.parametrize(
    ("length", "remat", "temp_mib"),
    [(8192, "none", 15939), (8192, "nothing_saveable", 8925), (32768, "nothing_saveable", 141013)],
)
def test_activations_grow_as_the_compiled_ones(length: int, remat: str, temp_mib: int):
    found = estimated("llama", SMALL, length=length, remat=remat)
    assert found.activations / MIB == pytest.approx(temp_mib, rel=0.1)


def test_dense_scores_of_13b_at_32k_are_40_gib_a_layer():
    found = estimated("llama", LLAMA_13B, "1,8,4", sequences=8, length=32768)
    assert found.scores == 10 * 32768**2 * 4, "batch 1 x 10 heads x queries x keys, float32"
    assert found.peak > found.scores * 40, "without rematerialisation each layer keeps its own"


def test_state_is_twelve_bytes_a_parameter():
    found = estimated("llama", SMALL, length=64)
    count = 2 * (4 * 512 * 512 + 3 * 512 * 1376 + 2 * 512) + 2 * 32000 * 512 + 512
    assert (found.parameters, found.moments, found.state) == (4 * count, 8 * count, 12 * count)


def test_a_mesh_splits_state_and_activations():
    whole = estimated("llama", DEEP, sequences=8, length=1024)
    split = estimated("llama", DEEP, "1,2,4", sequences=8, length=1024)
    assert split.parameters == pytest.approx(whole.parameters / 8, rel=0.01)
    assert split.scores == whole.scores / 8
    assert whole.saved / 8 < split.saved < whole.saved / 4


def test_bfloat16_halves_part_of_what_is_saved():
    wide, narrow = (estimated("llama", DEEP, sequences=8, length=1024, itemsize=itemsize) for itemsize in (4, 2))
    assert 0.5 < narrow.saved / wide.saved < 0.8
    assert narrow.scores == wide.scores, "scores are float32"
    assert narrow.state == wide.state


def test_remat_policies_are_ordered():
    policies = ("none", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
    saved = [estimated("llama", DEEP, sequences=4, length=1024, remat=remat).saved for remat in policies]
    assert saved == sorted(saved, reverse=True)
    assert len({*saved}) == len(policies)


def test_grouped_keys_wider_than_a_mesh_allows_are_repeated():
    grouped = DEEP | {"num_key_value_heads": 2}
    divided = estimated("llama", grouped, "1,1,2", sequences=1, length=1024)
    repeated = estimated("llama", grouped, "1,1,4", sequences=1, length=1024)
    assert repeated.saved > divided.saved / 2


@pytest.mark.parametrize("head_chunk", [512, 1024, 4096, -1])
def test_logits_grow_with_the_chunk(head_chunk: int):
    found = estimated("llama", SMALL, length=4096, head_chunk=head_chunk)
    tokens = 4096 if head_chunk == -1 else head_chunk
    assert found.head == 4 * (3 * tokens * 32000 + 32000 * 512)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_an_estimate(name: str):
    made = run(name, {}, length=16)
    source = 16 if made.arch_config.encoder else 0
    found = estimate_memory(replace(made, source_length=source))
    assert min(found.parameters, found.saved, found.layer, found.head, found.scores) > 0


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"])
@pytest.mark.parametrize(("family", "config"), [("llama", SMALL), ("gpt_neox", NEOX), ("mixtral", MIXTRAL)])
def test_activations_are_near_those_compiled_now(family: str, config: Mapping[str, Any], remat: str):
    """Of what XLA compiles here; with the suite's flags it fuses less, so the margin is wide."""
    from bench.compiled_memory import compile_step
    from trainer.nn.transformer import ForwardConfig, build_model

    found = FAMILIES[family]
    compiled = compile_step(
        build_model(found, config, is_tied=found.tied(config)), ForwardConfig(remat_policy=remat), 1, 1024
    )
    expected = estimated(family, config, length=1024, remat=remat)
    assert expected.activations == pytest.approx(compiled.temp_nbytes, rel=0.35)
