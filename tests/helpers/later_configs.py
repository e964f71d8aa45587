"""Tiny configs of the families that came after `tests.helpers.tiny_configs`, with and without experts."""

from __future__ import annotations

from typing import Any

from tests.helpers.config_fields import (
    DEEP_YARN,
    DEEPSEEK,
    GROUPS,
    LATENT,
    LLAMA_LIKE,
    SMALL,
    TOKEN_FIELDS,
)

EXPERTS = LLAMA_LIKE | {"intermediate_size": 7, "num_experts_per_tok": 2}
# DeepSeek's fields without the ones that only some families have.
CORRECTED = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}
GROUPED = CORRECTED | {"num_key_value_heads": 1, "head_dim": 8}
GEMMA4: dict[str, Any] = SMALL | {
    "model_type": "gemma4_text", "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 12,
    "intermediate_size": 10,
    "vocab_size_per_layer_input": 31, "hidden_size_per_layer_input": 6, "rms_norm_eps": 0.1, "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 9.0,
}  # fmt: skip
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8,
}  # fmt: skip
# Configs with a golden file of the results of transformers.
LATER_FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": LLAMA_LIKE | {"model_type": "apertus"},
    "bitnet": LLAMA_LIKE | {"model_type": "bitnet"},
    "codegen": TOKEN_FIELDS | {
        "model_type": "codegen", "n_embd": 40, "n_layer": 2, "n_head": 8, "n_positions": 300, "rotary_dim": 4,
        "n_inner": 20, "layer_norm_epsilon": 1e-3,
    },
    "diffllama": LLAMA_LIKE | {"model_type": "diffllama", "num_attention_heads": 12, "num_key_value_heads": 4},
    "doge": LLAMA_LIKE | {
        "model_type": "doge", "num_attention_heads": 9, "num_key_value_heads": 3, "attention_bias": True,
        "max_position_embeddings": 320,
    },
    "exaone": LLAMA_LIKE | {"model_type": "exaone", "mlp_bias": True},
    "exaone_moe": EXPERTS | {
        "model_type": "exaone_moe", "num_experts": 4, "num_shared_experts": 2, "sliding_window": 5,
        "sliding_window_pattern": 2, "moe_intermediate_size": 5, "num_hidden_layers": 3,
    },
    "flint": EXPERTS | {
        "model_type": "flint", "num_experts": 4, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 10,
        "num_hidden_layers": 4, "mlp_only_layers": [0], "sliding_window": 5,
    },
    "gemma4_text": GEMMA4,
    "gpt_neox_japanese": SMALL | {
        "model_type": "gpt_neox_japanese", "num_hidden_layers": 3, "intermediate_multiple_size": 2,
        "layer_norm_eps": 1e-3, "rotary_emb_base": 300,
    },
    "granite_swa": LLAMA_LIKE | {
        "model_type": "granite_swa", "sliding_window": 5, "attention_multiplier": 0.3,
        "layer_rope_theta": [0, 300.0],
    },
    "granitemoe_swa": EXPERTS | {
        "model_type": "granitemoe_swa", "num_local_experts": 5, "shared_intermediate_size": 10,
        "sliding_window": 5, "attention_multiplier": 0.2, "layer_rope_theta": [500.0, 300.0],
    },
    "hunyuan_v1_moe": EXPERTS | {
        "model_type": "hunyuan_v1_moe", "num_experts": 5, "moe_topk": [2, 2],
        "rope_scaling": {"type": "dynamic", "alpha": 30.0, "factor": 1.0},
    },
    "hy_v3": EXPERTS | {
        "model_type": "hy_v3", "num_experts": 4, "moe_intermediate_size": 5, "num_shared_experts": 2,
    },
    "hyperclovax": LLAMA_LIKE | {
        "model_type": "hyperclovax", "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "logits_scaling": 1.5,
    },
    "internlm3": LLAMA_LIKE | {"model_type": "internlm3", "qkv_bias": True, "bias": True},
    "iquestcoder": LLAMA_LIKE | {"model_type": "iquestcoder"},
    "llama4_text": EXPERTS | {
        "model_type": "llama4_text", "num_local_experts": 4, "num_hidden_layers": 3, "moe_layers": [0, 2],
        "intermediate_size_mlp": 12, "no_rope_layer_interval": 3, "attention_chunk_size": 6, "floor_scale": 9,
        "attn_scale": 0.5,
    },
    "mellum": EXPERTS | {
        "model_type": "mellum", "num_experts": 4, "moe_intermediate_size": 5, "sliding_window": 5,
        "num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "minicpm3": SMALL | LATENT | {
        "model_type": "minicpm3", "num_key_value_heads": 3, "rms_norm_eps": 1e-3, "scale_emb": 3, "dim_model_base": 16,
    },
    "minimax_m2": EXPERTS | {"model_type": "minimax_m2", "num_local_experts": 5, "rotary_dim": 4},
    "nanochat": SMALL | {
        "model_type": "nanochat", "num_key_value_heads": 1, "rms_norm_eps": 1e-3, "final_logit_softcapping": 2.0,
    },
    "phimoe": EXPERTS | {"model_type": "phimoe", "num_local_experts": 5, "router_jitter_noise": 0.3},
    "sarvam_mla": CORRECTED | LATENT | {
        "model_type": "sarvam_mla", "num_experts": 4, "rope_scaling": DEEP_YARN | {"type": "deepseek_yarn"},
    },
    "sarvam_moe": GROUPED | {"model_type": "sarvam_moe", "num_experts": 4, "use_qkv_bias": True},
    "solar_open": GROUPED | GROUPS | {"model_type": "solar_open"},
    "youtu": SMALL | LATENT | {"model_type": "youtu", "num_key_value_heads": 3, "rms_norm_eps": 1e-3},
}  # fmt: skip
FAMILIES = LATER_FAMILIES
# Configs without a golden file. Tests compare them with the installed transformers.
LATER_FAMILY_VARIANTS: dict[str, dict[str, Any]] = {
    "apertus-plain-rotation": FAMILIES["apertus"] | {
        "attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "bitnet-biases": FAMILIES["bitnet"] | {
        "attention_bias": True, "hidden_act": "silu", "rope_theta": 300.0, "tie_word_embeddings": True,
    },
    "codegen-names": TOKEN_FIELDS | {
        "model_type": "codegen", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 300, "rotary_dim": 6, "activation_function": "relu", "tie_word_embeddings": True,
    },
    "diffllama-biases": FAMILIES["diffllama"] | {
        "attention_bias": True, "num_key_value_heads": None, "num_attention_heads": 6, "head_dim": None,
        "rope_scaling": {"type": "linear", "factor": 4.0}, "tie_word_embeddings": True,
    },
    "doge-sliding": FAMILIES["doge"] | {
        "attention_bias": False, "mlp_bias": True, "sliding_window": 5, "num_key_value_heads": None,
        "tie_word_embeddings": True, "rms_norm_eps": 0.1,
    },
    "gpt_neox_japanese-one-layer": FAMILIES["gpt_neox_japanese"] | {
        "num_hidden_layers": 1, "rotary_pct": 0.5, "tie_word_embeddings": False, "hidden_act": "relu",
    },
    "exaone-names": {key: value for key, value in FAMILIES["exaone"].items() if key != "num_hidden_layers"} | {
        "num_layers": 3, "layer_norm_epsilon": 0.1, "activation_function": "gelu_new", "attention_bias": True,
    },
    "exaone_moe-listed": FAMILIES["exaone_moe"] | {
        "mlp_layer_types": ["sparse", "dense", "sparse"], "sliding_window": 4, "norm_topk_prob": False,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "flint-listed": FAMILIES["flint"] | {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "mlp_only_layers": [], "decoder_sparse_step": 2,
        "norm_topk_prob": False, "attention_bias": True,
    },
    "gemma4_text-keys-as-values": FAMILIES["gemma4_text"] | {
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "attention_bias": True,
        "num_global_key_value_heads": 3, "use_bidirectional_attention": "vision", "layer_types": None,
        "num_hidden_layers": 7, "sliding_window": 3, "rms_norm_eps": 0.3,
    },
    "gemma4_text-experts": FAMILIES["gemma4_text"] | GEMMA4_EXPERTS | {"rms_norm_eps": 0.3},
    "gemma4_text-saved": {key: value for key, value in GEMMA4.items() if key != "global_head_dim"} | {
        "per_layer_config": {str(layer): {"head_dim": 10} for layer in range(4)}, "layer_types": ["full_attention"] * 4,
        "num_kv_shared_layers": 3, "vocab_size_per_layer_input": 29,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 300.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "granite_swa-plain": FAMILIES["granite_swa"] | {
        "layer_rope_theta": None, "mlp_bias": True, "attention_bias": True, "tie_word_embeddings": False,
    },
    "granitemoe_swa-plain": FAMILIES["granitemoe_swa"] | {
        "layer_rope_theta": [0, 0], "shared_intermediate_size": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "hunyuan_v1_moe-plain": FAMILIES["hunyuan_v1_moe"] | {
        "rope_scaling": None, "moe_topk": 3, "attention_bias": True, "tie_word_embeddings": True,
    },
    "hy_v3-listed": FAMILIES["hy_v3"] | {"mlp_layer_types": ["sparse", "sparse"], "attention_bias": True},
    "hyperclovax-plain": FAMILIES["hyperclovax"] | {"use_post_norm": False, "attention_multiplier": 0.3},
    "llama4_text-listed": FAMILIES["llama4_text"] | {
        "moe_layers": None, "no_rope_layers": [0, 1, 0], "use_qk_norm": False, "attention_bias": True,
        "layer_types": ["chunked_attention", "full_attention", "full_attention"],
    },
    "llama4_text-plain": FAMILIES["llama4_text"] | {
        "attention_chunk_size": None, "attn_temperature_tuning": False, "num_experts_per_tok": 1,
    },
    "mellum-version-5": FAMILIES["mellum"] | {
        "mlp_layer_types": None, "norm_topk_prob": False, "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "minicpm3-plain": FAMILIES["minicpm3"] | {
        "q_lora_rank": None, "scale_depth": None, "dim_model_base": None, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "minimax_m2-whole": {key: value for key, value in FAMILIES["minimax_m2"].items() if key != "rotary_dim"},
    "nanochat-plain": FAMILIES["nanochat"] | {
        "final_logit_softcapping": None, "attention_bias": True, "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "phimoe-longrope": FAMILIES["phimoe"] | {
        "router_jitter_noise": 0.01, "attention_bias": True, "lm_head_bias": True, "sliding_window": 6,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.5, 2.5, 4.0], "long_factor": [2.0, 3.0, 5.0, 9.0],
            "short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 32,
        },
    },
    "sarvam_mla-latent": FAMILIES["sarvam_mla"] | GROUPS | {
        "num_experts": 6, "rope_interleave": False, "first_k_dense_replace": 0, "rope_scaling": None, "head_dim": 13,
    },
    "sarvam_moe-plain": FAMILIES["sarvam_moe"] | {
        "use_qkv_bias": False, "use_qk_norm": False, "first_k_dense_replace": 0, "partial_rotary_factor": 0.5,
    },
    "solar_open-biases": FAMILIES["solar_open"] | {"attention_bias": True, "norm_topk_prob": False},
    "youtu-plain": FAMILIES["youtu"] | {
        "q_lora_rank": None, "rope_interleave": False, "attention_bias": True, "tie_word_embeddings": False,
    },
}  # fmt: skip
