"""Parameter trees of other trainers, assembled with NumPy from the tensors of a Hugging Face folder.

The formulas are those of the trainers' own converters. Nothing here uses prep's axis maps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]
Leaves = dict[str, np.ndarray]
Config = Mapping[str, Any]

# Layer, expert and projection of an expert's tensor.
EXPERT_NAME = re.compile(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight")
TUNIX_NORMS = {
    "input_layernorm.weight": "input_layernorm.w",
    "post_attention_layernorm.weight": "post_attention_layernorm.w",
    "self_attn.q_norm.weight": "attn.q_norm.w",
    "self_attn.k_norm.weight": "attn.k_norm.w",
}
TUNIX_BIASES = {f"self_attn.{name}_proj.bias": f"attn.{name}_bias" for name in "qkv"}


def heads_of(config: Config) -> tuple[int, int, int]:
    """Return the number of query heads, of key and value heads, and the width of a head."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    return heads, kv_heads, config.get("head_dim", config["hidden_size"] // heads)


def tunix_leaves(tensors: Tensors, config: Config) -> Leaves:
    """Return the leaves of Tunix 0.1.7 by the rules of its `params.py`: transpose (1, 0), then reshape."""
    if config["model_type"].startswith("gemma"):
        return tunix_gemma_leaves(tensors, config)
    heads, kv_heads, head_dim = heads_of(config)
    leaves: Leaves = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for full_name, tensor in tensors.items():
        if match := EXPERT_NAME.fullmatch(full_name):
            path = f"layers.{match[1]}.mlp.{match[3]}.value"
            experts.setdefault(path, {})[int(match[2])] = tensor.T
        elif full_name == "model.embed_tokens.weight":
            leaves["embedder.input_embedding.value"] = tensor
        elif full_name == "model.norm.weight":
            leaves["final_norm.w.value"] = tensor
        elif full_name == "lm_head.weight":
            leaves["lm_head.w.value"] = tensor.T
        else:
            layer, name = full_name.removeprefix("model.layers.").split(".", 1)
            path, leaf = _tunix_layer_leaf(name, tensor, heads, kv_heads, head_dim)
            leaves[f"layers.{layer}.{path}.value"] = leaf
    return leaves | _stack_experts(experts)


def _stack_experts(experts: Mapping[str, Mapping[int, np.ndarray]]) -> Leaves:
    """Return the leaves of experts, stacked by number."""
    leaves: Leaves = {}
    for path, by_number in experts.items():
        leaves[path] = np.stack([by_number[number] for number in range(len(by_number))])
    return leaves


def _tunix_layer_leaf(
    name: str, tensor: np.ndarray, heads: int, kv_heads: int, head_dim: int
) -> tuple[str, np.ndarray]:
    """Return the path of a layer's leaf and its values."""
    width = tensor.shape[-1]
    if name in TUNIX_NORMS:
        return TUNIX_NORMS[name], tensor
    if name in TUNIX_BIASES:
        return TUNIX_BIASES[name], tensor
    if name == "mlp.gate.weight":
        return "mlp.router.kernel", tensor.T
    if name.startswith("mlp."):
        return name.replace(".weight", ".kernel"), tensor.T
    path = name.replace("self_attn.", "attn.").replace(".weight", ".w")
    if "q_proj" in name:
        return path, tensor.T.reshape(width, heads, head_dim)
    if "o_proj" in name:
        return path, tensor.T.reshape(heads, head_dim, -1)
    return path, tensor.T.reshape(width, kv_heads, head_dim)


TUNIX_GEMMA_NORMS = {
    "input_layernorm.weight": "pre_attention_norm.scale",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm.scale",
    "post_feedforward_layernorm.weight": "post_ffw_norm.scale",
    "self_attn.q_norm.weight": "attn._query_norm.scale",
    "self_attn.k_norm.weight": "attn._key_norm.scale",
}
# Name of `post_attention_layernorm` by model type. In Gemma 1 it is the norm before the MLP.
TUNIX_GEMMA_POST_NORMS = {
    "gemma": "pre_ffw_norm.scale",
    "gemma2": "post_attn_norm.scale",
    "gemma3_text": "post_attention_norm.scale",
}


def tunix_gemma_leaves(tensors: Tensors, config: Config) -> Leaves:
    """Return the leaves of Tunix 0.1.7 for Gemma by the rules of its `params_safetensors.py`."""
    heads, kv_heads, head_dim = heads_of(config)
    norms = {
        **TUNIX_GEMMA_NORMS,
        "post_attention_layernorm.weight": TUNIX_GEMMA_POST_NORMS[config["model_type"]],
    }
    leaves: Leaves = {
        "embedder.input_embedding": tensors["model.embed_tokens.weight"],
        "final_norm.scale": tensors["model.norm.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
        root = f"layers.{layer}."
        for name in names:
            tensor = tensors[prefix + name]
            if name in norms:
                leaves[root + norms[name]] = tensor
            elif name.startswith("mlp."):
                leaves[root + name.replace(".weight", ".kernel")] = tensor.T
        output = tensors[f"{prefix}self_attn.o_proj.weight"]
        leaves[f"{root}attn.attn_vec_einsum.w"] = output.T.reshape(heads, head_dim, -1)
        kernels: list[np.ndarray] = []
        for letter, num_heads in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            kernel = tensors[f"{prefix}self_attn.{letter}_proj.weight"].T
            kernels.append(kernel.reshape(-1, num_heads, head_dim).transpose(1, 0, 2))
        if heads == kv_heads:
            leaves[f"{root}attn.qkv_einsum.w"] = np.stack(kernels)
        else:
            leaves[f"{root}attn.q_einsum.w"] = kernels[0]
            leaves[f"{root}attn.kv_einsum.w"] = np.stack(kernels[1:])
    return {f"{path}.value": leaf for path, leaf in leaves.items()}


MAXTEXT_NORMS = {
    "input_layernorm.weight": "pre_self_attention_layer_norm.scale",
    "post_attention_layernorm.weight": "post_self_attention_layer_norm.scale",
    "self_attn.q_norm.weight": "self_attention.query_norm.scale",
    "self_attn.k_norm.weight": "self_attention.key_norm.scale",
}
MAXTEXT_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "out"}
MAXTEXT_MLP = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
MAXTEXT_EXPERTS = {"w1": "wi_0", "w3": "wi_1", "w2": "wo", **MAXTEXT_MLP}
MAXTEXT_MOE_MODULES = {"mixtral": "MoeBlock_0", "qwen3_moe": "moe_block"}
# Model types with a kernel of queries that is multiplied by 1 / sqrt(head_dim).
MAXTEXT_SCALED = {"llama", "mistral", "mixtral"}


def maxtext_leaves(tensors: Tensors, config: Config) -> Leaves:
    """Return the leaves of MaxText 0.2.5 with stacked layers: axis 1 of each leaf."""
    layers: dict[str, dict[int, np.ndarray]] = {}
    leaves: Leaves = {}
    for path, leaf in maxtext_unscanned_leaves(tensors, config).items():
        match = re.fullmatch(r"(.*)\.layers_(\d+)\.(.*)", path)
        if match is None:
            leaves[path] = leaf
        else:
            stack = layers.setdefault(f"{match[1]}.layers.{match[3]}", {})
            stack[int(match[2])] = leaf
    for path, stack in layers.items():
        leaves[path] = np.stack([stack[layer] for layer in range(len(stack))], axis=1)
    return leaves


def maxtext_unscanned_leaves(tensors: Tensors, config: Config) -> Leaves:
    """Return the leaves of MaxText 0.2.5 by the rules of its `param_mapping.py`, one leaf per layer."""
    leaves: Leaves = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for full_name, tensor in tensors.items():
        if full_name == "model.embed_tokens.weight":
            leaves["token_embedder.embedding"] = tensor
        elif full_name == "model.norm.weight":
            leaves["decoder.decoder_norm.scale"] = tensor
        elif full_name == "lm_head.weight":
            leaves["decoder.logits_dense.kernel"] = tensor.T
        else:
            layer, name = full_name.removeprefix("model.layers.").split(".", 1)
            root = f"decoder.layers_{layer}"
            if match := EXPERT_NAME.fullmatch(full_name):
                module = MAXTEXT_MOE_MODULES[config["model_type"]]
                path = f"{root}.{module}.{MAXTEXT_EXPERTS[match[3]]}"
                experts.setdefault(path, {})[int(match[2])] = tensor.T
                continue
            path, leaf = _maxtext_layer_leaf(name, tensor, config)
            leaves[f"{root}.{path}"] = leaf
    leaves |= _stack_experts(experts)
    return {f"params.params.{path}": leaf for path, leaf in leaves.items()}


def _maxtext_layer_leaf(name: str, tensor: np.ndarray, config: Config) -> tuple[str, np.ndarray]:
    """Return the path of a layer's leaf and its values."""
    heads, kv_heads, head_dim = heads_of(config)
    if name in MAXTEXT_NORMS:
        return MAXTEXT_NORMS[name], tensor
    if name in ("block_sparse_moe.gate.weight", "mlp.gate.weight"):
        return f"{MAXTEXT_MOE_MODULES[config['model_type']]}.gate.kernel", tensor.T
    module, projection, kind = name.split(".")
    if module == "mlp":
        return f"mlp.{MAXTEXT_MLP[projection]}.kernel", tensor.T
    letter = projection[0]
    num_heads = heads if letter == "q" else kv_heads
    path = f"self_attention.{MAXTEXT_PROJECTIONS[letter]}"
    if kind == "bias":
        return f"{path}.bias", tensor.reshape(num_heads, head_dim)
    if letter == "o":
        return f"{path}.kernel", tensor.T.reshape(heads, head_dim, -1)
    kernel = tensor.T.reshape(-1, num_heads, head_dim)
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3" and letter in "qk":
        # `adjust_rope`: the halves of a head are interleaved.
        halves = np.split(kernel, 2, axis=-1)
        kernel = np.stack(halves, axis=-1).reshape(kernel.shape)
    if letter == "q" and config["model_type"] in MAXTEXT_SCALED:
        # `scale_query_layer`
        depth_scale = np.float32(1 / np.sqrt(head_dim))
        kernel = (kernel.astype(np.float32) * depth_scale).astype(kernel.dtype)
    return f"{path}.kernel", kernel


# Trees of a trainer, by the name of the layout.
TREES: Mapping[str, Callable[[Tensors, Config], Leaves]] = {
    "maxtext": maxtext_leaves,
    "maxtext-unscanned": maxtext_unscanned_leaves,
    "tunix": tunix_leaves,
}
# Folder of the item in an output, by the name of the layout.
ITEMS = {"maxtext": "0/items", "maxtext-unscanned": "0/items", "tunix": "0/model_params"}
