"""State dicts of torchtitan, assembled with NumPy from the tensors of a Hugging Face folder.

The formulas are those of torchtitan's `state_dict_adapter.py`. Nothing here uses prep's axis maps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]
Leaves = dict[str, np.ndarray]

# `from_hf_map` of the adapters of LLaMA 3, Qwen3, DeepSeek-V3 and GPT-OSS.
FROM_HF = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.qkv_linear.wq.weight",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.qkv_linear.wk.weight",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.qkv_linear.wv.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.wo.weight",
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.feed_forward.w1.weight",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.feed_forward.w3.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.feed_forward.w2.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
    "model.layers.{}.mlp.gate.weight": "layers.{}.moe.router.gate.weight",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight": "layers.{}.attention.wkv_a.weight",
    "model.layers.{}.self_attn.kv_a_layernorm.weight": "layers.{}.attention.kv_norm.weight",
    "model.layers.{}.self_attn.kv_b_proj.weight": "layers.{}.attention.wkv_b.weight",
    "model.layers.{}.self_attn.q_a_proj.weight": "layers.{}.attention.wq_a.weight",
    "model.layers.{}.self_attn.q_a_layernorm.weight": "layers.{}.attention.q_norm.weight",
    "model.layers.{}.self_attn.q_b_proj.weight": "layers.{}.attention.wq_b.weight",
    "model.layers.{}.mlp.shared_experts.gate_proj.weight": "layers.{}.moe.shared_experts.w1.weight",
    "model.layers.{}.mlp.shared_experts.up_proj.weight": "layers.{}.moe.shared_experts.w3.weight",
    "model.layers.{}.mlp.shared_experts.down_proj.weight": "layers.{}.moe.shared_experts.w2.weight",
    "model.layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.moe.expert_bias_E",
    "model.layers.{}.self_attn.q_proj.bias": "layers.{}.attention.qkv_linear.wq.bias",
    "model.layers.{}.self_attn.k_proj.bias": "layers.{}.attention.qkv_linear.wk.bias",
    "model.layers.{}.self_attn.v_proj.bias": "layers.{}.attention.qkv_linear.wv.bias",
    "model.layers.{}.self_attn.o_proj.bias": "layers.{}.attention.wo.bias",
    "model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks",
    "model.layers.{}.mlp.router.weight": "layers.{}.moe.router.gate.weight",
    "model.layers.{}.mlp.router.bias": "layers.{}.moe.router.gate.bias",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
# DeepSeek has no fused projection of queries, keys and values.
DEEPSEEK_QUERY = {"model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.wq.weight"}
EXPERTS = {
    "gate_proj": "w1_EFD",
    "up_proj": "w3_EFD",
    "down_proj": "w2_EDF",
}
# Parameters of `GptOssGroupedExperts`. Its matrices are those of Hugging Face, transposed.
GPT_OSS_EXPERTS = {
    "gate_up_proj": "mlp1_weight_EGD",
    "gate_up_proj_bias": "mlp1_bias_EG",
    "down_proj": "mlp2_weight_EDF",
    "down_proj_bias": "mlp2_bias_ED",
}
# Model types with the buffer `expert_bias_E` and without a tensor for it. It starts at zero.
ZERO_BIASES = ("qwen3_moe", "gpt_oss")
GPT_OSS_NAME = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\w+)")
EXPERT_NAME = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight")


def reverse_permute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Return `_reverse_permute` of torchtitan: rotated pairs become adjacent."""
    rows, columns = tensor.shape
    halves = tensor.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(0, 2, 1, 3).reshape(rows, columns)


def torchtitan_state(tensors: Tensors, config: Mapping[str, Any]) -> Leaves:
    """Return the state dict of a model."""
    state: Leaves = {}
    from_hf = FROM_HF
    if config["model_type"] == "deepseek_v3":
        from_hf = FROM_HF | DEEPSEEK_QUERY
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT_NAME.fullmatch(name):
            path = f"layers.{match[1]}.moe.routed_experts.inner_experts.{EXPERTS[match[3]]}"
            experts.setdefault(path, {})[int(match[2])] = tensor
            continue
        if match := GPT_OSS_NAME.fullmatch(name):
            path = f"layers.{match[1]}.moe.routed_experts.inner_experts.{GPT_OSS_EXPERTS[match[2]]}"
            state[path] = (
                np.ascontiguousarray(tensor.swapaxes(1, 2)) if tensor.ndim == 3 else tensor
            )
            continue
        number = re.search(r"\d+", name)
        layer = number[0] if number else ""
        value = tensor
        if config["model_type"] == "llama" and "q_proj" in name:
            value = reverse_permute(tensor, config["num_attention_heads"])
        elif config["model_type"] == "llama" and "k_proj" in name:
            value = reverse_permute(tensor, config["num_key_value_heads"])
        state[from_hf[re.sub(r"\d+", "{}", name, count=1)].format(layer)] = value
    for path, by_number in experts.items():
        state[path] = np.stack([by_number[number] for number in range(len(by_number))])
    if config["model_type"] in ZERO_BIASES:
        experts_count = config.get("num_experts") or config["num_local_experts"]
        for layer in range(config["num_hidden_layers"]):
            state[f"layers.{layer}.moe.expert_bias_E"] = np.zeros(experts_count, np.float32)
    # A tied model has both names in its state dict.
    state.setdefault("lm_head.weight", state["tok_embeddings.weight"])
    return state
