"""Tiny GGUF files, written by the package gguf as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.lazy_modules import lazy_module
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT2, LLAMA, checkpoint_tensors

gguf = lazy_module("gguf")
# Widths are multiples of 256, the size of the blocks of K-quants.
WIDE = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | WIDE,
    "qwen2": FAMILY_CONFIGS["qwen2"] | WIDE,
    "qwen3": FAMILY_CONFIGS["qwen3"] | WIDE,
    "qwen3moe": FAMILY_CONFIGS["qwen3_moe"] | WIDE | {"moe_intermediate_size": 256},
    "qwen2moe": FAMILY_CONFIGS["qwen2_moe"]
    | WIDE
    | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512, "mlp_only_layers": []},
    "gemma2": FAMILY_CONFIGS["gemma2"] | WIDE | {"query_pre_attn_scalar": 64},
    "gemma3": FAMILY_CONFIGS["gemma3_text"] | WIDE | {"head_dim": 256, "sliding_window_pattern": 6},
    "phi3": FAMILY_CONFIGS["phi3"] | WIDE,
    "gpt2": GPT2 | {"vocab_size": 64, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_inner": 1024},
}
# transformers loads the architecture `llama` without experts only.
MIXTRAL = FAMILY_CONFIGS["mixtral"] | WIDE | {"num_experts_per_tok": 2}
# transformers loads this architecture from safetensors only.
GPT_OSS = (
    FAMILY_CONFIGS["gpt_oss"]
    | WIDE
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
)
CONFIGS["phi3"].pop("head_dim")
CONFIGS["qwen2moe"].pop("head_dim")
CONFIGS["qwen2"].pop("head_dim")


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Permute rows as `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        .swapaxes(1, 2)
        .reshape(array.shape)
    )


def stored_array(architecture: str, name: str, array: np.ndarray) -> np.ndarray:
    """Return a tensor as llama.cpp stores it."""
    config = CONFIGS.get(architecture, {})
    if name.endswith("shared_expert_gate.weight"):
        return array[0]
    if architecture == "llama" and "q_proj" in name:
        return interleave(array, config["num_attention_heads"])
    if architecture == "llama" and "k_proj" in name:
        return interleave(array, config["num_key_value_heads"])
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return array + np.float32(1)
    if architecture == "gpt2" and ("c_" in name) and array.ndim == 2:
        return array.T
    return array


def split_gate_up(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split and transpose the experts of gpt-oss as `GptOssModel` of llama.cpp's convert_hf_to_gguf.py."""
    split: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        prefix, _, matrix = name.partition(".experts.")
        end = "bias" if matrix.endswith("_bias") else "weight"
        stored = array.swapaxes(1, 2) if array.ndim == 3 else array
        if matrix.startswith("gate_up_proj"):
            split[f"{prefix}.experts.gate_proj.{end}"] = stored[:, ::2]
            split[f"{prefix}.experts.up_proj.{end}"] = stored[:, 1::2]
        elif matrix.startswith("down_proj"):
            split[f"{prefix}.experts.down_proj.{end}"] = stored
        else:
            split[f"{name}.weight" if name.endswith("sinks") else name] = array
    return split


def merge_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the matrices of all experts of a layer under the name of the first one."""
    merged: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if ".experts." not in name:
            merged[name] = array
            continue
        prefix, _, rest = name.partition(".experts.")
        matrix = rest.partition(".")[2]
        key = f"{prefix}.experts.{matrix}"
        previous = merged.get(key)
        part = array[None]
        merged[key] = part if previous is None else np.concatenate([previous, part])
    return merged


def add_metadata(writer: Any, config: dict[str, Any]) -> None:
    """Write the keys of a config.json as metadata of GGUF."""
    writer.add_block_count(config.get("num_hidden_layers", config.get("n_layer")))
    writer.add_embedding_length(config.get("hidden_size", config.get("n_embd")))
    writer.add_feed_forward_length(config.get("intermediate_size", config.get("n_inner")))
    writer.add_head_count(config.get("num_attention_heads", config.get("n_head")))
    if "n_positions" in config:
        writer.add_context_length(config["n_positions"])
        writer.add_layer_norm_eps(1e-5)
        return
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])


def make_gguf(
    path: Path,
    architecture: str,
    type_name: str = "Q8_0",
    extra: Mapping[str, np.ndarray] | None = None,
    *,
    config: dict[str, Any] | None = None,
    tensors_per_part: int = 0,
    layers: int = 2,
    add: Callable[[Any], object] = lambda writer: None,
) -> None:
    """Write a file: matrices of a type, and vectors in float32.

    Args:
        path: The file.
        architecture: A key of CONFIGS.
        type_name: Type of the matrices. Blocks of types that gguf cannot write have random bytes.
        extra: Further tensors.
        config: Content of config.json, if it is not the one of CONFIGS.
        tensors_per_part: Tensors of each file of a model in parts, or 0 for one file.
        layers: Number of layers of the config.
        add: Adds further metadata.
    """
    config = config or CONFIGS[architecture]
    rng = np.random.default_rng(1)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, layers)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    add_metadata(writer, config)
    add(writer)
    quant_type = gguf.GGMLQuantizationType[type_name]
    # Heads of these families are tied, and have no tensor.
    is_tied = architecture in ("gemma2", "gemma3", "gpt2")
    tensors = checkpoint_tensors(config, "float32", is_tied, False)
    if architecture == "gpt-oss":
        tensors = split_gate_up(tensors)
    else:
        tensors = merge_experts(tensors)
    for name, array in tensors.items():
        stored = np.ascontiguousarray(stored_array(architecture, name, array))
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored.ndim < 2 or gguf_name.endswith(".bias"):
            writer.add_tensor(gguf_name, stored)
        elif type_name in ("Q4_K", "Q6_K", "IQ4_NL"):
            shape = gguf.quant_shape_to_byte_shape(stored.shape, quant_type)
            blocks = rng.integers(0, 60, shape, dtype=np.uint8)
            writer.add_tensor(gguf_name, blocks, raw_dtype=quant_type)
        else:
            blocks = gguf.quantize(stored, quant_type)
            writer.add_tensor(gguf_name, blocks, raw_dtype=quant_type)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
