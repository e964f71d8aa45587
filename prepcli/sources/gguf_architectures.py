"""Architectures of GGUF: the names of their tensors and settings in llama.cpp and in Hugging Face.

Source: `TensorNameMap` of gguf 0.19 (tensor_mapping.py), and the classes of llama.cpp's convert_hf_to_gguf.py, which
permute queries and keys of LLaMA, add 1 to the norms of Gemma, and transpose the matrices of GPT-2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from prepcli.core.json_values import JsonValue
from prepcli.formats.gguf import GgufMetadata

# Tensors [experts, out, in] of all experts of a layer.
EXPERT_TENSORS = (
    "blk.ffn_gate_exps.weight",
    "blk.ffn_up_exps.weight",
    "blk.ffn_down_exps.weight",
)
# Matrices [1, in] that llama.cpp stores without the dim of size 1.
VECTORS_OF_MATRICES = ("blk.ffn_gate_inp_shexp.weight",)
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Numbers of layers by which llama.cpp recognizes the 27B models, whose queries have another scale.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """A `general.architecture`.

    Attributes:
        model_type: Family in Hugging Face's config.json.
        class_name: Class of transformers.
        tensor_names: Hugging Face's name of each tensor, with `{layer}` and `{expert}`.
        config_keys: Field of config.json by the key of the metadata without the architecture.
        defaults: Further fields of config.json.
        interleaved: Tensors with interleaved rows of heads.
        transposed: Tensors stored transposed.
        rows: Axis map of each tensor that is a part of one of Hugging Face, or its transpose: dims of the stored
            tensor, name with `{layer}`, dims of Hugging Face's tensor.
        norm_offset: Number that llama.cpp adds to the weights of norms.
        bias_fields: Field of config.json that gives all of these modules a bias, without the layer.
    """

    model_type: str
    class_name: str
    tensor_names: Mapping[str, str]
    config_keys: Mapping[str, str]
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)
    interleaved: Collection[str] = ()
    transposed: Collection[str] = ()
    rows: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    bias_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _module_names(names: Mapping[str, str], *, bias: bool = False) -> dict[str, str]:
    """Return the names of weights, and of biases, of modules."""
    tensors = {f"{name}.weight": f"{hf_name}.weight" for name, hf_name in names.items()}
    if bias:
        tensors |= {f"{name}.bias": f"{hf_name}.bias" for name, hf_name in names.items()}
    return tensors


_LAYER = "model.layers.{layer}."
_EMBEDDINGS = _module_names(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_ATTENTION = _module_names(
    {
        "blk.attn_q": _LAYER + "self_attn.q_proj",
        "blk.attn_k": _LAYER + "self_attn.k_proj",
        "blk.attn_v": _LAYER + "self_attn.v_proj",
        "blk.attn_output": _LAYER + "self_attn.o_proj",
    },
    bias=True,
)
_HEAD_NORMS = _module_names(
    {
        "blk.attn_q_norm": _LAYER + "self_attn.q_norm",
        "blk.attn_k_norm": _LAYER + "self_attn.k_norm",
    }
)
_PRE_NORMS = _module_names(
    {
        "blk.attn_norm": _LAYER + "input_layernorm",
        "blk.ffn_norm": _LAYER + "post_attention_layernorm",
    }
)
_SANDWICH_NORMS = _module_names(
    {
        "blk.attn_norm": _LAYER + "input_layernorm",
        "blk.post_attention_norm": _LAYER + "post_attention_layernorm",
        "blk.ffn_norm": _LAYER + "pre_feedforward_layernorm",
        "blk.post_ffw_norm": _LAYER + "post_feedforward_layernorm",
    }
)
_MLP = _module_names(
    {
        "blk.ffn_gate": _LAYER + "mlp.gate_proj",
        "blk.ffn_up": _LAYER + "mlp.up_proj",
        "blk.ffn_down": _LAYER + "mlp.down_proj",
    },
    bias=True,
)
_EXPERTS = _module_names(
    {
        "blk.ffn_gate_inp": _LAYER + "mlp.gate",
        "blk.ffn_gate_exps": _LAYER + "mlp.experts.{expert}.gate_proj",
        "blk.ffn_up_exps": _LAYER + "mlp.experts.{expert}.up_proj",
        "blk.ffn_down_exps": _LAYER + "mlp.experts.{expert}.down_proj",
    }
)
_MIXTRAL_EXPERTS = _module_names(
    {
        "blk.ffn_gate_inp": _LAYER + "block_sparse_moe.gate",
        "blk.ffn_gate_exps": _LAYER + "block_sparse_moe.experts.{expert}.w1",
        "blk.ffn_up_exps": _LAYER + "block_sparse_moe.experts.{expert}.w3",
        "blk.ffn_down_exps": _LAYER + "block_sparse_moe.experts.{expert}.w2",
    }
)
_SHARED_EXPERT = _module_names(
    {
        "blk.ffn_gate_inp_shexp": _LAYER + "mlp.shared_expert_gate",
        "blk.ffn_gate_shexp": _LAYER + "mlp.shared_expert.gate_proj",
        "blk.ffn_up_shexp": _LAYER + "mlp.shared_expert.up_proj",
        "blk.ffn_down_shexp": _LAYER + "mlp.shared_expert.down_proj",
    }
)
_PHI3_FUSED = _module_names(
    {
        "blk.attn_qkv": _LAYER + "self_attn.qkv_proj",
        "blk.attn_output": _LAYER + "self_attn.o_proj",
        "blk.ffn_up": _LAYER + "mlp.gate_up_proj",
        "blk.ffn_down": _LAYER + "mlp.down_proj",
    }
)
_GPT2 = _module_names(
    {
        "output_norm": "transformer.ln_f",
        "blk.attn_norm": "transformer.h.{layer}.ln_1",
        "blk.attn_qkv": "transformer.h.{layer}.attn.c_attn",
        "blk.attn_output": "transformer.h.{layer}.attn.c_proj",
        "blk.ffn_norm": "transformer.h.{layer}.ln_2",
        "blk.ffn_up": "transformer.h.{layer}.mlp.c_fc",
        "blk.ffn_down": "transformer.h.{layer}.mlp.c_proj",
    },
    bias=True,
) | _module_names(
    {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output": "lm_head"}
)

_CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_HEAD_DIM = {"attention.key_length": "head_dim"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

_INTERLEAVED = (
    "blk.attn_q.weight",
    "blk.attn_q.bias",
    "blk.attn_k.weight",
    "blk.attn_k.bias",
)
# The architecture `llama` with experts.
MIXTRAL = GgufArchitecture(
    "mixtral",
    "MixtralForCausalLM",
    _EMBEDDINGS | _ATTENTION | _PRE_NORMS | _MIXTRAL_EXPERTS,
    _CONFIG_KEYS
    | {
        "rope.dimension_count": "head_dim",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    interleaved=_INTERLEAVED,
)

# llama.cpp splits the columns of gate and up, which alternate, and transposes the matrices of experts.
_GPT_OSS_EXPERTS = _LAYER + "mlp.experts."
_GPT_OSS_ROWS = {
    "blk.ffn_down_exps.weight": (
        f"experts embed mlp <- {_GPT_OSS_EXPERTS}down_proj: experts mlp embed"
    ),
    "blk.ffn_down_exps.bias": f"experts embed <- {_GPT_OSS_EXPERTS}down_proj_bias: experts embed",
}
for _number, _name in enumerate(("gate", "up")):
    _GPT_OSS_ROWS[f"blk.ffn_{_name}_exps.weight"] = (
        f"experts mlp embed <- {_GPT_OSS_EXPERTS}gate_up_proj: experts embed (mlp gate_up={_number})"
    )
    _GPT_OSS_ROWS[f"blk.ffn_{_name}_exps.bias"] = (
        f"experts mlp <- {_GPT_OSS_EXPERTS}gate_up_proj_bias: experts (mlp gate_up={_number})"
    )

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "llama",
        "LlamaForCausalLM",
        _EMBEDDINGS | _ATTENTION | _PRE_NORMS | _MLP,
        _CONFIG_KEYS | {"rope.dimension_count": "head_dim"},
        interleaved=_INTERLEAVED,
        bias_fields={
            "attention_bias": ("blk.attn_q", "blk.attn_k", "blk.attn_v", "blk.attn_output"),
            "mlp_bias": ("blk.ffn_gate", "blk.ffn_up", "blk.ffn_down"),
        },
    ),
    "qwen2": GgufArchitecture(
        "qwen2", "Qwen2ForCausalLM", _EMBEDDINGS | _ATTENTION | _PRE_NORMS | _MLP, _CONFIG_KEYS
    ),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _EMBEDDINGS | _ATTENTION | _PRE_NORMS | _EXPERTS | _SHARED_EXPERT,
        _CONFIG_KEYS
        | {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        # llama.cpp does not normalize the weights of the selected experts of this model.
        defaults={"norm_topk_prob": False},
    ),
    "qwen3": GgufArchitecture(
        "qwen3",
        "Qwen3ForCausalLM",
        _EMBEDDINGS | _ATTENTION | _HEAD_NORMS | _PRE_NORMS | _MLP,
        _CONFIG_KEYS | _HEAD_DIM,
    ),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _EMBEDDINGS | _ATTENTION | _HEAD_NORMS | _PRE_NORMS | _EXPERTS,
        _CONFIG_KEYS
        | _HEAD_DIM
        | {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        # llama.cpp always normalizes the weights of the selected experts.
        defaults={"norm_topk_prob": True},
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _EMBEDDINGS
        | _ATTENTION
        | _module_names({"blk.ffn_gate_inp": _LAYER + "mlp.router"}, bias=True)
        | {
            "blk.attn_norm.weight": _LAYER + "input_layernorm.weight",
            "blk.post_attention_norm.weight": _LAYER + "post_attention_layernorm.weight",
            "blk.attn_sinks.weight": _LAYER + "self_attn.sinks",
        },
        _CONFIG_KEYS
        | _HEAD_DIM
        | _WINDOW
        | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        rows=_GPT_OSS_ROWS,
    ),
    "gemma": GgufArchitecture(
        "gemma",
        "GemmaForCausalLM",
        _EMBEDDINGS | _ATTENTION | _PRE_NORMS | _MLP,
        _CONFIG_KEYS | _HEAD_DIM,
        norm_offset=1.0,
    ),
    "gemma2": GgufArchitecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _EMBEDDINGS | _ATTENTION | _SANDWICH_NORMS | _MLP,
        _CONFIG_KEYS | _HEAD_DIM | _WINDOW | _SOFTCAPS,
        norm_offset=1.0,
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _EMBEDDINGS | _ATTENTION | _HEAD_NORMS | _SANDWICH_NORMS | _MLP,
        _CONFIG_KEYS | _HEAD_DIM | _WINDOW,
        norm_offset=1.0,
    ),
    "phi3": GgufArchitecture(
        "phi3",
        "Phi3ForCausalLM",
        _EMBEDDINGS | _PHI3_FUSED | _PRE_NORMS,
        _CONFIG_KEYS | _WINDOW,
    ),
    "gpt2": GgufArchitecture(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2,
        {
            "context_length": "n_positions",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "embedding_length": "n_embd",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        transposed=(
            "blk.attn_qkv.weight",
            "blk.attn_output.weight",
            "blk.ffn_up.weight",
            "blk.ffn_down.weight",
        ),
    ),
}


def needs_config_reason(metadata: GgufMetadata, prefix: str, names: Collection[str]) -> str:
    """Return why the metadata does not describe the model and a config.json is needed, or an empty string."""
    for name in ROPE_FACTORS:
        if name in names:
            return f"it has `{name}`, the factors of a scaled rotary embedding without its settings"
    if metadata.get(f"{prefix}.rope.scaling.type", "none") != "none":
        return "its rotary embedding is scaled"
    if prefix in LAYERS_OF_27B and query_divisor(metadata, prefix) is None:
        return "it does not contain the number of layers, the width and the heads, which give the scale of queries"
    if prefix == "phi3":
        # Phi-3 may rotate a part of each head.
        width = metadata.get("phi3.embedding_length")
        heads = metadata.get("phi3.attention.head_count")
        rotated = metadata.get("phi3.rope.dimension_count")
        if not (isinstance(width, int) and isinstance(heads, int) and isinstance(rotated, int)):
            return ""
        if heads < 1 or rotated >= width // heads:
            return ""
        return f"its rotary embedding rotates {rotated} of the {width // heads} values of a head"
    return ""


def query_divisor(metadata: GgufMetadata, prefix: str) -> int | None:
    """Return the number whose square root divides the queries of Gemma 2 and 3, as llama.cpp computes it.

    It is the width of a head, and in the 27B models the width of the model divided by its heads. The metadata does not
    have it. Source: `f_attention_scale` of llama.cpp (src/llama-model.cpp).
    """
    layers = metadata.get(f"{prefix}.block_count")
    width = metadata.get(f"{prefix}.embedding_length")
    heads = metadata.get(f"{prefix}.attention.head_count")
    if not (isinstance(layers, int) and isinstance(width, int) and isinstance(heads, int)):
        return None
    if not 1 <= heads <= width:
        return None
    head_dim = metadata.get(f"{prefix}.attention.key_length")
    if layers != LAYERS_OF_27B[prefix] and isinstance(head_dim, int):
        return head_dim
    return width // heads
