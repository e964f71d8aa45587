"""Tiny Hugging Face checkpoints of every family, written without torch or transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.algebra.axis_map import bind_row
from prepcli.commands.testing.checkpoints import write_checkpoint
from prepcli.engine.fills import numpy_dtype
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import FAMILIES
from prepcli.planning.tensors import itemsize
from tests.helpers.tiny_configs import DENSE_FAMILIES

GPT_NEO: dict[str, Any] = {
    "model_type": "gpt_neo",
    "architectures": ["GPTNeoForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "intermediate_size": None,
    "max_position_embeddings": 64,
    "attention_types": [[["global", "local", "global"], 1]],
    "window_size": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 131,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": None,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GROUPED_QUERY = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
TOKEN_FIELDS = {
    key: value for key, value in SMALL.items() if key.endswith("_id") or key == "vocab_size"
}
DEEPSEEK = SMALL | {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
}  # fmt: skip
# One config for each family without a config above.
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "gptj": TOKEN_FIELDS | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
    "gpt_neox": SMALL,
    "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "mistral": GROUPED_QUERY | {"sliding_window": 8},
    "mixtral": GROUPED_QUERY | {"num_local_experts": 3},
    "qwen2": SMALL | {"num_key_value_heads": 2},
    "qwen3": GROUPED_QUERY,
    "qwen3_moe": GROUPED_QUERY | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2_moe": SMALL | {
        "num_key_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16, "mlp_only_layers": [1],
    },
    "gpt_oss": GROUPED_QUERY | {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v2": DEEPSEEK | LATENT,
    "deepseek_v3": DEEPSEEK | LATENT,
    "glm4_moe": DEEPSEEK | {"num_key_value_heads": 2, "head_dim": 16},
    "glm4_moe_lite": DEEPSEEK | LATENT,
    "dots1": DEEPSEEK | {"num_key_value_heads": 2, "head_dim": 16},
    "ernie4_5_moe": SMALL | {
        "num_key_value_heads": 2, "moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 24,
    },
    "olmoe": SMALL | {"num_key_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 2},
    "flex_olmo": SMALL | {"num_key_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 2},
    "granitemoe": SMALL | {"num_key_value_heads": 2, "num_local_experts": 3},
    "granitemoeshared": SMALL | {
        "num_key_value_heads": 2, "num_local_experts": 3, "shared_intermediate_size": 16,
    },
    "gemma": GROUPED_QUERY,
    "gemma2": GROUPED_QUERY | {"sliding_window": 8},
    "gemma3_text": GROUPED_QUERY | {"sliding_window": 8, "sliding_window_pattern": 2},
    "phi3": SMALL | {"num_key_value_heads": 2},
    "t5": TOKEN_FIELDS | {
        "d_model": 64, "d_kv": 24, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "eos_token_id": 1,
        "decoder_start_token_id": 0, "pad_token_id": 0,
    },
}  # fmt: skip
# Families with golden files of their own, with sizes that meshes divide. Most tests of conversions leave them out.
DENSE_SIZES = GROUPED_QUERY | {
    **{"n_embd": 64, "d_model": 64, "n_head": 4, "n_heads": 4, "attention_heads": 4},
    **{"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
}
# Sizes that depend on others: latent attention has as many heads of keys as of queries, the heads of Mamba-2 make
# up twice the width, the heads of CodeGen are in four shards, and each token has an input of the layers of Gemma 4.
DEPENDENT_SIZES: dict[str, dict[str, int]] = {
    "mamba2": {"num_heads": 8}, "sarvam_mla": {"num_key_value_heads": 4}, "youtu": {"num_key_value_heads": 4},
    "minicpm3": {"num_key_value_heads": 4}, "codegen": {"n_head": 8},
    "gemma4_text": {"vocab_size_per_layer_input": 131},
}  # fmt: skip
DENSE_CONFIGS: dict[str, dict[str, Any]] = {
    name: config | {
        key: value for key, value in DENSE_SIZES.items() if key in config and key != "num_hidden_layers"
    } | DEPENDENT_SIZES.get(name, {})
    for name, config in DENSE_FAMILIES.items()
    if name == config["model_type"]
}  # fmt: skip
ARCHITECTURES = {
    "gptj": "GPTJForCausalLM", "gpt_neox": "GPTNeoXForCausalLM", "opt": "OPTForCausalLM",
    "olmoe": "OlmoeForCausalLM", "flex_olmo": "FlexOlmoForCausalLM", "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM", "dots1": "Dots1ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "t5": "T5ForConditionalGeneration",
}  # fmt: skip
for _name, _config in FAMILY_CONFIGS.items():
    _class = ARCHITECTURES.get(_name, f"{_name.capitalize()}ForCausalLM")
    FAMILY_CONFIGS[_name] = {"model_type": _name, "architectures": [_class], **_config}
ALL_CONFIGS = [GPT2, GPT_NEO, LLAMA, *FAMILY_CONFIGS.values()]
INV_FREQ_BUFFER = {"layers.{}.self_attn.rotary_emb.inv_freq": ("float32", (2,))}
LEGACY_BUFFERS = {
    "gpt2": {"h.{}.attn.bias": ("bool", (1, 1, 64, 64)), "h.{}.attn.masked_bias": ("float32", ())},
    "gpt_neo": {
        "h.{}.attn.attention.bias": ("bool", (1, 1, 64, 64)),
        "h.{}.attn.attention.masked_bias": ("float32", ()),
    },
    "gptj": {"h.{}.attn.bias": ("bool", (1, 1, 64, 64)), "h.{}.attn.masked_bias": ("float32", ())},
    "gpt_neox": {
        "layers.{}.attention.bias": ("bool", (1, 1, 64, 64)),
        "layers.{}.attention.masked_bias": ("float16", ()),
        "layers.{}.attention.rotary_emb.inv_freq": ("float32", (2,)),
    },
    "opt": {},
    "t5": {
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": (
            "float32",
            (8, 4),
        )
    },
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), INV_FREQ_BUFFER
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "phi3", "qwen2_moe"), INV_FREQ_BUFFER),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"), INV_FREQ_BUFFER),
    **dict.fromkeys(("dots1", "ernie4_5_moe", "olmoe", "flex_olmo"), INV_FREQ_BUFFER),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), INV_FREQ_BUFFER),
    "gpt_oss": {},
}


def checkpoint_tensors(
    config: dict[str, Any], dtype: str, tied: bool, legacy: bool, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return random tensors, by their full names, of a checkpoint with this config.

    Args:
        config: Content of its config.json.
        dtype: Dtype of the parameters.
        tied: Whether the head is tied and has no tensor.
        legacy: Whether buffers of old files are included.
        seed: Seed of the values.
    """
    family, rng = FAMILIES[config["model_type"]], np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}

    def add(bare_name: str, tensor_dtype: str, shape: tuple[int, ...]) -> None:
        name = bare_name if bare_name in family.unprefixed else family.prefix + bare_name
        values = rng.standard_normal(math.prod(shape)) * 0.3
        tensors[name] = (
            (values > 0 if tensor_dtype == "bool" else values)
            .astype(numpy_dtype(tensor_dtype))
            .reshape(shape)
        )

    for path, row in parameter_rows(family, config).items():
        if path != family.tying.head_leaf or not tied:
            bound = bind_row(row, family.sizes(config))
            for name, _ in bound.tensors():
                add(name, dtype, bound.source_shape)
    layers = family.sizes(config)["layers"]
    for pattern, (buffer_dtype, shape) in LEGACY_BUFFERS[family.name].items() if legacy else ():
        for layer in range(layers):
            add(pattern.format(layer), buffer_dtype, shape)
    return tensors


def make_checkpoint(
    folder: Path,
    base: dict[str, Any] = GPT_NEO,
    dtype: str = "float32",
    tied: bool | None = None,
    legacy: bool = False,
    files: int = 2,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Write a tiny checkpoint and return its tensors.

    Args:
        folder: Folder to write.
        base: Content of config.json.
        dtype: Dtype of the parameters.
        tied: Whether the head is tied; None for the default of the family.
        legacy: Whether the file has buffers of old files.
        files: Approximate number of shards.
        **changes: Fields to change in the config.
    """
    default = FAMILIES[base["model_type"]].tying.tied_by_default
    is_tied = default if tied is None else tied
    config = {**base, "torch_dtype": dtype, **changes} | (
        {} if is_tied == default else {"tie_word_embeddings": is_tied}
    )
    tensors = checkpoint_tensors(config, dtype, is_tied, legacy)
    write_checkpoint(folder, config, tensors, files)
    return tensors


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read every tensor of a Hugging Face folder with the parser of the safetensors library."""
    from safetensors import deserialize

    from prepcli.formats.safetensors import DTYPES

    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in deserialize(path.read_bytes()):
            dtype = DTYPES[entry["dtype"]]
            assert len(entry["data"]) == math.prod(entry["shape"]) * itemsize(dtype)
            tensors[name] = np.frombuffer(bytes(entry["data"]), numpy_dtype(dtype)).reshape(
                entry["shape"]
            )
    return tensors


def assert_same(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Check that two mappings have the same names and bits."""
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not same_bits(actual[name], expected[name])] == []


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays have the same dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
