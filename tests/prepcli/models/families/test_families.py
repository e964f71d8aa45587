"""Parameters of all families against transformers: golden files, and live if installed. Errors of other families."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from prepcli.algebra.axis_map import bind_row, stack_axis
from prepcli.core.errors import PrepError
from prepcli.models.families._llama_style import PRE_NORMS, llama_like, partial_rope
from prepcli.models.param_tree import LAYER_PARTS
from prepcli.models.parameters import HFConfig, dropped_patterns, parameter_rows
from prepcli.models.registry import (
    ADD_FAMILY_HINT,
    FAMILIES,
    MECHANISMS,
    MODEL_TYPES,
    NEW_LAYER_HINT,
    family_of,
    missing_mechanism,
)
from tests.golden import make_families

NAMES = sorted(path.stem for path in make_families.FOLDER.glob("*.json"))


@cache
def read_golden(name: str) -> dict[str, Any]:
    """Return the golden file of a config."""
    return json.loads((make_families.FOLDER / f"{name}.json").read_text())


def tensor_shapes(config: HFConfig, scan: bool = True) -> dict[str, list[int]]:
    """Return name -> shape of the tensors of a checkpoint, by the rows of its family."""
    family = family_of(config)
    shapes = {}
    for path, row in parameter_rows(family, config, scan).items():
        if path == family.tying.head_leaf and family.is_tied(config):
            continue
        bound = bind_row(row, family.sizes(config))
        for bare, _ in bound.tensors():
            shapes[bare if bare in family.unprefixed else family.prefix + bare] = list(
                bound.source_shape
            )
    return shapes


def test_every_config_has_a_golden_file():
    configs = {name: read_golden(name)["config"] for name in NAMES}
    assert configs == dict(make_families.CONFIGS)
    assert {config["model_type"] for config in configs.values()} == set(FAMILIES)


def test_reading_a_family_imports_no_other_kin():
    script = """
import sys
from prepcli.models.registry import FAMILIES, MODEL_TYPES
assert FAMILIES["gpt2"].name == "gpt2"
kin = dict.fromkeys(MODEL_TYPES.values())
print([name for name in kin if f"prepcli.models.families.{name}" in sys.modules])
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{[MODEL_TYPES['gpt2']]}\n"


def test_each_type_is_declared_once_with_a_title():
    assert [family.name for family in FAMILIES.values()] == [*FAMILIES]
    assert all(family.title for family in FAMILIES.values())
    for kin in dict.fromkeys(MODEL_TYPES.values()):
        declared = importlib.import_module(f"prepcli.models.families.{kin}").FAMILIES
        assert {*declared} == {name for name, module in MODEL_TYPES.items() if module == kin}
    assert "gpt5" not in FAMILIES
    with pytest.raises(KeyError):
        FAMILIES["gpt5"]


def test_names_and_shapes_equal_golden_files():
    for name in NAMES:
        golden = read_golden(name)
        for scan in (True, False):
            assert tensor_shapes(golden["config"], scan) == golden["tensors"], name


@pytest.mark.parametrize("name", NAMES)
def test_golden_files_equal_transformers(name: str):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert make_families.describe(read_golden(name)["config"]) == read_golden(name)


def test_dropped_patterns_match_no_parameter():
    for name in NAMES:
        golden = read_golden(name)
        family = family_of(golden["config"])
        patterns = dropped_patterns(family)
        bare = [tensor.removeprefix(family.prefix) for tensor in golden["tensors"]]
        assert not [
            tensor for tensor in bare for pattern in patterns if re.fullmatch(pattern, tensor)
        ]


FULL = ["full_attention"]
# Fields of OPT, T5 and Falcon with which their optional parameters exist.
OPTIONAL_PARAMETERS = {
    "word_embed_proj_dim": 24,
    "feed_forward_proj": "gated-gelu",
    "parallel_attn": False,
}
# Layers with a mixer only, with attention only, and with one of both, and all biases.
HYBRIDS: dict[str, list[dict[str, Any]]] = {
    "lfm2": [
        {"layer_types": types * 16, "conv_bias": True}
        for types in (["conv"] * 2, FULL * 2, ["conv", *FULL])
    ],
    "qwen": [
        {"full_attention_interval": interval, "attention_bias": True} for interval in (1, 4, 99)
    ],
}
MAMBA_BIASES = {"mamba_proj_bias": True, "attention_bias": True}
# Fields of families in which one parameter excludes another: layers of one kind, plain queries.
EXCLUSIVE_PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "qwen2_moe": [{"mlp_only_layers": [1]}, {}],
    "qwen3_moe": [{"mlp_only_layers": [1]}, {}],
    "deepseek_v2": [{"first_k_dense_replace": 1}, {"q_lora_rank": None}],
    "deepseek_v3": [{}, {"first_k_dense_replace": 0, "q_lora_rank": None}],
    "dots1": [{"first_k_dense_replace": 1}, {}],
    "glm4_moe": [{"use_qk_norm": True}, {"first_k_dense_replace": 0}],
    "glm4_moe_lite": [{}, {"mlp_layer_types": ["sparse"] * 47, "q_lora_rank": None}],
    "ernie4_5_moe": [{}, {"moe_layer_start_index": 0}],
    "granitemoeshared": [{"shared_intermediate_size": 4}],
    "exaone_moe": [{}, {"first_k_dense_replace": 0}],
    "flint": [{}, {"mlp_only_layers": []}],
    "gemma4_text": [
        {"num_kv_shared_layers": 12, "use_double_wide_mlp": True, "attention_bias": True},
        {"layer_types": FULL * 30, "attention_bias": True},
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
    ],
    "gpt_neox_japanese": [{}, {"num_hidden_layers": 1}],
    "granitemoe_swa": [{"shared_intermediate_size": 4}],
    "hy_v3": [{}, {"mlp_layer_types": ["sparse"] * 80}],
    "internlm3": [{"qkv_bias": True, "bias": True}],
    "llama4_text": [{}, {"interleave_moe_layer_step": 2}],
    "mellum": [{}, {"mlp_layer_types": ["dense", *["sparse"] * 27]}],
    "minicpm3": [{}, {"q_lora_rank": None}],
    "sarvam_mla": [{"q_lora_rank": 8}, {"first_k_dense_replace": 0}],
    "sarvam_moe": [{"use_qkv_bias": True}, {"first_k_dense_replace": 0}],
    "youtu": [{}, {"q_lora_rank": None}],
    "lfm2": HYBRIDS["lfm2"],
    "lfm2_moe": [*HYBRIDS["lfm2"], {"num_dense_layers": 0}],
    "qwen3_5_text": HYBRIDS["qwen"],
    "qwen3_5_moe_text": HYBRIDS["qwen"],
    "qwen3_next": [*HYBRIDS["qwen"], {"mlp_only_layers": [1]}],
    "bamba": [
        {"attn_layer_indices": layers, **MAMBA_BIASES} for layers in ([], [1], [*range(32)])
    ],
    "jamba": [
        {"attn_layer_period": 64, "attn_layer_offset": offset, **fields, "mamba_proj_bias": True}
        for offset in (4, 40)
        for fields in ({}, {"num_experts": 1})
    ],
    "nemotron_h": [
        {"use_bias": True, "mlp_bias": True, "layers_block_type": types}
        for types in (["linear_attention", "moe", "full_attention", "mlp"], ["linear_attention"])
    ],
    "granitemoehybrid": [
        MAMBA_BIASES, MAMBA_BIASES | {"layer_types": ["mamba"] + ["attention"] * 31}, {"num_local_experts": 0},
        MAMBA_BIASES | {"layer_types": ["attention"] * 32, "position_embedding_type": "rope"},
    ],
}  # fmt: skip


def test_family_parameters_are_consistent():
    for family in FAMILIES.values():
        conditions = (parameter.condition for parameter in family.parameters.values())
        fields = {
            condition: True for condition in conditions if condition and isinstance(condition, str)
        }
        seen: set[str] = set()
        for changes in EXCLUSIVE_PARAMETERS.get(family.name, [{}]):
            config = {"model_type": family.name, **OPTIONAL_PARAMETERS, **fields, **changes}
            rows = parameter_rows(family, config)
            seen |= {*rows}
            assert list(rows) == [path for path in family.parameters if path in rows], family.name
            assert family.tying.head_leaf in rows
            bound = [bind_row(row, family.sizes(config)) for row in rows.values()]
            names = [row.name_parts for row in bound]
            assert len({(row.name_parts, row.source_dims) for row in bound}) == len(bound)
            stems = {name[0] for name in names}
            assert {family.tying.head_tensor, family.tying.embedding_tensor} <= stems
            for path, row in rows.items():
                has_layers = not LAYER_PARTS.isdisjoint(path.split("."))
                assert has_layers == (stack_axis(row.leaf_dims) is not None)
                assert all(part.isidentifier() for part in path.split("."))
        assert seen == {*family.parameters}, family.name


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gpt2", "n_head": 0}, "n_head is 0"),
        ({"model_type": "gpt2", "hidden_size": -1, "n_embd": 8}, "hidden_size is -1"),
        ({"model_type": "gpt2", "n_inner": 0.5}, "n_inner is 0.5"),
        ({"model_type": "gpt_neo", "num_heads": 0}, "num_heads is 0"),
        ({"model_type": "gpt_neo", "hidden_size": "12"}, "hidden_size is '12'"),
        ({"model_type": "gpt_neo", "num_layers": -1}, "num_layers is -1"),
        ({"model_type": "gpt_neo", "vocab_size": True}, "vocab_size is True"),
        ({"model_type": "llama", "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"model_type": "llama", "hidden_size": 4096.0}, "hidden_size is 4096.0"),
        ({"model_type": "llama", "num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"model_type": "llama", "intermediate_size": [1]}, r"intermediate_size is \[1\]"),
        ({"model_type": "opt", "ffn_dim": 0}, "ffn_dim is 0"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts is 0"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": "7"}, "moe_intermediate_size is '7'"),
        ({"model_type": "gpt_neox", "num_attention_heads": False}, "num_attention_heads is False"),
        ({"model_type": "t5", "num_decoder_layers": 0}, "num_decoder_layers is 0"),
    ],
)
def test_sizes_reject_invalid_config(config: dict[str, Any], reason: str):
    with pytest.raises(PrepError, match=reason) as caught:
        family_of(config).sizes(config)
    assert caught.value.what == "config.json is invalid"


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "lamma"}, {"model_type": None}, {"model_type": ["llama"]}]
)
def test_family_of_error_names_the_page_of_families(config: dict[str, Any]):
    with pytest.raises(PrepError) as caught:
        family_of(config)
    assert str(config.get("model_type")) in caught.value.what
    assert caught.value.why == f"`prep docs families` lists the {len(FAMILIES)} supported ones"


COMMON = (
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
)


@pytest.mark.parametrize(
    ("config", "nearest"),
    [
        ({"model_type": "gpt_j"}, "gptj"),
        ({"model_type": "gpt-neox"}, "gpt_neox"),
        ({"model_type": "gemma3"}, "gemma"),
        ({"model_type": "zzz", "architectures": ["MistralForCausalLM"]}, "mistral"),
        ({"model_type": "zzz", "architectures": [3, "LLaMAForCausalLM"]}, "llama"),
        ({"model_type": "zzz", "architectures": ["T5ForConditionalGeneration"]}, "t5"),
        ({"model_type": "zzz", "architectures": "Llama"}, ""),
        ({"model_type": "zzz", "architectures": None}, ""),
        (
            {
                "model_type": "zzz",
                **dict.fromkeys(("hidden_size", "num_key_value_heads", *COMMON), 8),
            },
            "llama",
        ),
        (
            {
                "model_type": "x",
                "n_embd": 8,
                "n_layer": 2,
                "n_head": 2,
                "n_positions": 9,
                "vocab_size": 7,
            },
            "gpt2",
        ),
        (
            {
                "model_type": "x",
                "d_model": 8,
                "d_kv": 2,
                "d_ff": 2,
                "num_heads": 9,
                "vocab_size": 7,
            },
            "t5",
        ),
    ],
)
def test_family_of_error_names_most_similar_family(config: dict[str, Any], nearest: str):
    with pytest.raises(PrepError) as caught:
        family_of(config)
    assert (
        caught.value.hint
        == (f"the most similar family is {nearest}; " if nearest else "") + ADD_FAMILY_HINT
    )
    assert (Path(__file__).parents[4] / "docs" / "how-to" / "add-a-family.md").is_file()


def test_tie_word_embeddings_overrides_default():
    for family in FAMILIES.values():
        assert family.is_tied({}) == family.tying.tied_by_default, family.name
        assert family.is_tied({"tie_word_embeddings": True})
        assert not family.is_tied({"tie_word_embeddings": False})


@pytest.mark.parametrize("name", FAMILIES)
def test_tied_by_default_equals_transformers(name: str):
    path = make_families.FOLDER / f"{name}-defaults.json"
    if not path.exists():
        path = make_families.FOLDER / f"{name}.json"
    golden = json.loads(path.read_text())
    assert "tie_word_embeddings" not in golden["config"]
    tying = FAMILIES[name].tying
    assert tying.tied_by_default == (tying.head_tensor not in golden["tensors"])


def test_golden_files_are_small():
    assert all(path.stat().st_size < 50_000 for path in Path(make_families.FOLDER).iterdir())


def test_bloom_ignores_the_mlp_width_of_its_config():
    """The decoder of transformers ignores it too. Conversions compare the shapes of the tensors in any case."""
    config = {"model_type": "bloom", "hidden_size": 16, "n_inner": 24}
    assert FAMILIES["bloom"].sizes(config)["mlp"] == 64


def test_apertus_without_a_scaling_has_the_one_of_its_class():
    for fields in ({}, {"rope_scaling": {}}, {"rope_theta": 300.0}):
        rope = FAMILIES["apertus"].arch_config({"model_type": "apertus", **fields}).rope
        assert rope is not None
        assert (rope.rope_type, rope.theta, rope.factor) == ("llama3", 12e6, 8.0)


def test_apertus_rejects_another_activation():
    with pytest.raises(PrepError) as caught:
        FAMILIES["apertus"].arch_config({"model_type": "apertus", "hidden_act": "silu"})
    assert caught.value.what == "activation `silu` is not supported"


def test_codegen_rejects_heads_without_shards():
    with pytest.raises(PrepError) as caught:
        FAMILIES["codegen"].sizes({"model_type": "codegen", "n_embd": 24, "n_head": 6})
    assert caught.value.why == "n_head is 6, it must be a multiple of 4"


def test_codegen_rejects_codegen2():
    # CodeGen2 1B, with eight shards of heads in the fused tensor.
    config = {"model_type": "codegen", "n_embd": 2048, "n_head": 16, "head_dim": 128}
    with pytest.raises(PrepError) as caught:
        FAMILIES["codegen"].sizes(config)
    assert caught.value.what == "`head_dim` is not supported for this family"


def test_codegen_rejects_rotary_dim_null():
    with pytest.raises(PrepError, match="rotary_dim is null"):
        FAMILIES["codegen"].arch_config({"model_type": "codegen", "rotary_dim": None})


def test_diffllama_rejects_unpaired_heads():
    config = {"model_type": "diffllama", "num_attention_heads": 3}
    with pytest.raises(PrepError) as caught:
        FAMILIES["diffllama"].arch_config(config)
    why = "num_key_value_heads is 3, and differential attention needs pairs of them"
    assert caught.value.why == why


def test_diffllama_rejects_attention_dropout():
    with pytest.raises(PrepError) as caught:
        FAMILIES["diffllama"].arch_config({"model_type": "diffllama", "attention_dropout": 0.1})
    assert caught.value.what == "`attention_dropout` is not supported for this family"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"is_moe": True}, "`is_moe` is not supported for this family"),
        (
            {"max_position_embeddings": 4096},
            "keep_window_size 2048 is not supported for this family",
        ),
    ],
)
def test_doge_rejects_experts_and_dropped_keys(changes: dict[str, Any], what: str):
    with pytest.raises(PrepError) as caught:
        FAMILIES["doge"].arch_config({"model_type": "doge", **changes})
    assert caught.value.what == what


def test_bitnet_rejects_heads_without_the_width_of_their_norm():
    config = {"model_type": "bitnet", "hidden_size": 24, "num_attention_heads": 3, "head_dim": 10}
    with pytest.raises(PrepError) as caught:
        FAMILIES["bitnet"].arch_config(config | {"num_key_value_heads": 1})
    assert caught.value.why == "the norm of 30 elements of heads has the hidden_size, 24"


@pytest.mark.parametrize("aliases", [{}, {"num_layers": "num_hidden_layers"}])
def test_changed_config_supports_no_further_fields(aliases: dict[str, str]):
    family = llama_like(
        "partial", "A test.", layer=PRE_NORMS, rope=partial_rope(0.5, 2048), aliases=aliases
    )
    family.arch_config({"num_layers": 3, "partial_rotary_factor": 0.5})
    for field, value in (("sliding_window", 8), ("clip_qkv", 5.0), ("num_experts", 8)):
        with pytest.raises(PrepError, match=f"`{field}` is not supported"):
            family.arch_config({field: value})


def test_outer_share_of_rotation_beside_the_inner_one_is_refused():
    rope = {"rope_type": "default", "partial_rotary_factor": 1.0}
    config: HFConfig = {"rope_parameters": rope, "partial_rotary_factor": 0.5}
    with pytest.raises(PrepError, match="`partial_rotary_factor` is not supported"):
        FAMILIES["llama"].arch_config(config)


@pytest.mark.parametrize(
    ("config", "mechanism"),
    [
        ({"model_type": "zamba2", "state_size": 16}, "state-space layers"),
        ({"model_type": "zamba", "mamba_d_state": 16}, "state-space layers"),
        ({"model_type": "rwkv"}, "recurrent layers"),
        ({"model_type": "deepseek_v32", "n_routed_experts": 256}, "sparse attention"),
        ({"model_type": "minimax", "num_experts": 32}, "linear attention"),
        ({"model_type": "dbrx"}, "a sparse MoE"),
        ({"model_type": "llava", "vision_config": {}}, "an image, video or audio encoder"),
        ({"model_type": "bert", "type_vocab_size": 2}, "an encoder without a decoder"),
        ({"model_type": "bart"}, "cross attention other than T5's"),
        ({"model_type": "new", "index_topk": 2048}, "sparse attention"),
        ({"model_type": "new", "vision_config": {"depth": 3}}, "an image, video or audio encoder"),
        ({"model_type": ["mamba"], "ssm_state_size": 8}, "state-space layers"),
    ],
)
def test_error_names_missing_mechanism(config: dict[str, Any], mechanism: str) -> None:
    with pytest.raises(PrepError) as caught:
        family_of(config)
    assert caught.value.why.startswith(f"it needs {mechanism}")
    assert caught.value.hint == NEW_LAYER_HINT


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "new"},
        {"model_type": "new", "alibi": True},
        {"model_type": "new", "kv_lora_rank": None, "type_vocab_size": 0},
        {},
    ],
)
def test_missing_mechanism_is_empty_for_unknown_family(config: dict[str, Any]) -> None:
    assert missing_mechanism(config) == ""


def test_mechanisms_exclude_supported_families() -> None:
    model_types = [name for types, _ in MECHANISMS.values() for name in types.split()]
    assert len(model_types) == len(set(model_types))
    assert not set(model_types) & set(FAMILIES)
