"""Tiny configs of every family, with an odd vocabulary and an odd number of heads.

A family's basic config has the family's name; variants of it, such as `llama-biases`, have longer names.
"""

from __future__ import annotations

from typing import Any

from tests.helpers.config_fields import (
    DEEP_YARN,
    DEEPSEEK,
    GROUPED_QUERY,
    GROUPS,
    LATENT,
    LLAMA_LIKE,
    SMALL,
    TOKEN_FIELDS,
)
from tests.helpers.hybrid_configs import HYBRID_FAMILIES, HYBRID_VARIANTS
from tests.helpers.later_configs import LATER_FAMILIES, LATER_FAMILY_VARIANTS

GPT_NEO: dict[str, Any] = {
    "model_type": "gpt_neo", "vocab_size": 29, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "window_size": 3,
    "max_position_embeddings": 300, "attention_types": [[["global", "local"], 1], [["global"], 1]],
    "layer_norm_epsilon": 1e-3, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 29, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 300,
    "layer_norm_epsilon": 1e-3, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
}  # fmt: skip
GEMMA = GROUPED_QUERY | {"query_pre_attn_scalar": 7, "sliding_window": 5}
LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.5, 4.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}

GPTJ = TOKEN_FIELDS | {
    "model_type": "gptj", "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 300, "rotary_dim": 4, "n_inner": 20,
    "layer_norm_epsilon": 1e-3,
}  # fmt: skip
OPT = TOKEN_FIELDS | {
    "model_type": "opt", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 20,
    "max_position_embeddings": 300,
}  # fmt: skip
GPT_NEOX = SMALL | {"model_type": "gpt_neox", "rotary_pct": 0.5, "layer_norm_eps": 1e-3}
MISTRAL = GROUPED_QUERY | {"model_type": "mistral", "sliding_window": 5}
MIXTRAL = GROUPED_QUERY | {
    "model_type": "mixtral", "num_local_experts": 3, "rope_theta": 2e4, "router_jitter_noise": 0.0,
}  # fmt: skip
QWEN2 = SMALL | {"model_type": "qwen2", "num_key_value_heads": 1, "rms_norm_eps": 1e-3}
QWEN3 = GROUPED_QUERY | {"model_type": "qwen3"}
QWEN3_MOE = GROUPED_QUERY | {
    "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7,
    "norm_topk_prob": True,
}  # fmt: skip
GEMMA1 = GROUPED_QUERY | {"model_type": "gemma"}
GEMMA2 = GEMMA | {
    "model_type": "gemma2", "num_hidden_layers": 3, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0,
}  # fmt: skip
GEMMA3 = GEMMA | {
    "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 2, "rope_theta": 5e4,
    "rope_local_base_freq": 500.0,
}  # fmt: skip
PHI3 = SMALL | {
    "model_type": "phi3",
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-3,
    "partial_rotary_factor": 0.5,
}
QWEN2_MOE = SMALL | {
    "model_type": "qwen2_moe", "num_hidden_layers": 3, "num_key_value_heads": 1, "moe_intermediate_size": 7,
    "shared_expert_intermediate_size": 10, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [0],
    "rms_norm_eps": 1e-3,
}  # fmt: skip
GPT_OSS = GROUPED_QUERY | {
    "model_type": "gpt_oss", "intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 5, "swiglu_limit": 0.4, "swiglu_alpha": 2.0,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "truncate": False,
    },
}  # fmt: skip
DEEPSEEK_V2 = DEEPSEEK | LATENT | GROUPS | {
    "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "q_lora_rank": None,
    "kv_lora_rank": 8, "n_routed_experts": 4, "n_group": 2,
}  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK | LATENT | GROUPS | {"model_type": "deepseek_v3", "rope_scaling": DEEP_YARN}
GLM4_MOE_LITE = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"} | LATENT | {
    "model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 1,
}  # fmt: skip
GLM4_MOE = DEEPSEEK | GROUPS | {
    "model_type": "glm4_moe", "num_key_value_heads": 1, "head_dim": 12, "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
}  # fmt: skip
DOTS1 = DEEPSEEK | {
    "model_type": "dots1", "n_routed_experts": 4, "num_key_value_heads": 1,
    "head_dim": 10, "sliding_window": 5, "max_window_layers": 2,
}  # fmt: skip
ERNIE4_5_MOE = SMALL | {
    "model_type": "ernie4_5_moe", "num_hidden_layers": 4, "num_key_value_heads": 1, "moe_intermediate_size": 5,
    "intermediate_size": 12, "moe_num_experts": 5, "moe_k": 2, "moe_layer_interval": 2, "moe_layer_start_index": 1,
    "rms_norm_eps": 1e-3,
}  # fmt: skip
OLMOE = SMALL | {
    "model_type": "olmoe", "num_key_value_heads": 1, "intermediate_size": 7, "num_experts": 5,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-3,
}  # fmt: skip
FLEX_OLMO = OLMOE | {"model_type": "flex_olmo", "norm_topk_prob": True}
GRANITEMOE = SMALL | {
    "model_type": "granitemoe", "num_key_value_heads": 1, "intermediate_size": 7, "num_local_experts": 5,
    "rms_norm_eps": 1e-3, "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 0.5,
    "residual_multiplier": 0.7,
}  # fmt: skip
GRANITEMOESHARED = GRANITEMOE | {"model_type": "granitemoeshared", "shared_intermediate_size": 10}
T5 = {
    "model_type": "t5", "vocab_size": 29, "d_model": 16, "d_kv": 6, "d_ff": 12, "num_layers": 2,
    "num_decoder_layers": 3, "num_heads": 3, "relative_attention_num_buckets": 9, "relative_attention_max_distance": 40,
    "layer_norm_epsilon": 0.1, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
T5_GATED = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

NEWER_FAMILIES: dict[str, dict[str, Any]] = {  # a golden file has the results of transformers for each
    "gptj": GPTJ,
    "opt": OPT,
    "opt-350m": OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 10},
    "gpt_neox": GPT_NEOX,
    "gpt_neox-serial": GPT_NEOX | {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gemma": GEMMA1,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "phi3": PHI3,
    "qwen2_moe": QWEN2_MOE,
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "dots1": DOTS1,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "olmoe": OLMOE,
    "flex_olmo": FLEX_OLMO,
    "granitemoe": GRANITEMOE,
    "granitemoeshared": GRANITEMOESHARED,
    "t5": T5,
    "t5-gated": T5_GATED,
    "phi3-longrope": PHI3 | {
        "partial_rotary_factor": 1.0, "original_max_position_embeddings": 32, "rope_scaling": LONG_ROPE,
    },
}  # fmt: skip
LAYER_NORM = {key: value for key, value in LLAMA_LIKE.items() if key != "rms_norm_eps"} | {
    "layer_norm_eps": 1e-3
}
SMALL_GPT = TOKEN_FIELDS | {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
GPT_NAMES = TOKEN_FIELDS | {
    "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 300, "n_inner": 20, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
DENSE_FAMILIES: dict[str, dict[str, Any]] = {  # a golden file has the results of transformers for each
    "olmo2": LLAMA_LIKE | {"model_type": "olmo2"},
    "olmo3": LLAMA_LIKE | {
        "model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 5, "rope_theta": 2e4,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    },
    "smollm3": LLAMA_LIKE | {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2},
    "granite": LLAMA_LIKE | {
        "model_type": "granite", "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.3,
        "logits_scaling": 1.5,
    },
    "glm4": LLAMA_LIKE | {"model_type": "glm4"},
    "glm": LLAMA_LIKE | {"model_type": "glm"},
    "starcoder2": SMALL | {
        "model_type": "starcoder2", "num_key_value_heads": 1, "norm_epsilon": 1e-3, "sliding_window": 5,
    },
    "stablelm": LAYER_NORM | {"model_type": "stablelm", "partial_rotary_factor": 0.5},
    "stablelm-parallel": LAYER_NORM | {
        "model_type": "stablelm", "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True,
    },
    "phi": SMALL | {"model_type": "phi", "layer_norm_eps": 1e-3},
    "exaone4": LLAMA_LIKE | {"model_type": "exaone4", "sliding_window": 5, "sliding_window_pattern": 2},
    "ernie4_5": LLAMA_LIKE | {"model_type": "ernie4_5", "use_bias": True},
    "ministral": LLAMA_LIKE | {
        "model_type": "ministral", "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": LLAMA_LIKE | {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "rope_theta": 2e4,
            "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "seed_oss": LLAMA_LIKE | {"model_type": "seed_oss", "attention_out_bias": True},
    "olmo": SMALL | {"model_type": "olmo", "num_key_value_heads": 1, "clip_qkv": 0.8},
    "cohere": LAYER_NORM | {"model_type": "cohere", "logit_scale": 0.4, "use_qk_norm": True},
    "cohere2": LAYER_NORM | {
        "model_type": "cohere2", "logit_scale": 0.4, "sliding_window": 5, "sliding_window_pattern": 2,
    },
    "helium": LLAMA_LIKE | {"model_type": "helium"},
    "arcee": LLAMA_LIKE | {"model_type": "arcee"},
    "hunyuan_v1_dense": LLAMA_LIKE | {
        "model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 30.0, "factor": 1.0},
    },
    "nemotron": SMALL | {"model_type": "nemotron", "num_key_value_heads": 1, "norm_eps": 1e-3},
    "jais2": LAYER_NORM | {"model_type": "jais2"},
    "cwm": LLAMA_LIKE | {"model_type": "cwm", "sliding_window": 5},
    "falcon": SMALL_GPT | {"model_type": "falcon"},
    "falcon-serial": SMALL_GPT | {"model_type": "falcon", "parallel_attn": False, "bias": True},
    "gpt_bigcode": GPT_NAMES | {"model_type": "gpt_bigcode"},
    "gpt_bigcode-heads": GPT_NAMES | {"model_type": "gpt_bigcode", "multi_query": False},
    "bloom": SMALL_GPT | {"model_type": "bloom"},
    "mpt": TOKEN_FIELDS | {
        "model_type": "mpt", "d_model": 24, "n_heads": 3, "n_layers": 2, "max_seq_len": 300,
        "layer_norm_epsilon": 1e-3, "attn_config": {"clip_qkv": 0.8},
    },
    "biogpt": SMALL | {"model_type": "biogpt", "max_position_embeddings": 300},
    "xglm": TOKEN_FIELDS | {
        "model_type": "xglm", "d_model": 24, "attention_heads": 3, "num_layers": 2, "ffn_dim": 20,
        "max_position_embeddings": 64,
    },
    "mt5": T5 | {"model_type": "mt5", "tie_word_embeddings": False},
    "umt5": T5 | {"model_type": "umt5"},
    "vaultgemma": GEMMA | {
        "model_type": "vaultgemma", "hidden_size": 30, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0,
    },
    "persimmon": SMALL | {"model_type": "persimmon", "layer_norm_eps": 1e-3},
    **HYBRID_FAMILIES,
}  # fmt: skip
DENSE_FAMILIES |= LATER_FAMILIES
DENSE = DENSE_FAMILIES
TWO_KINDS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
DENSE_FAMILY_VARIANTS: dict[str, dict[str, Any]] = {  # compared with transformers live only
    "olmo2-biases": DENSE["olmo2"] | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None},
    "olmo3-listed": DENSE["olmo3"] | TWO_KINDS | {"num_hidden_layers": 2, "rope_scaling": None},
    "olmo3-version-5": DENSE["olmo3"] | {
        "rope_scaling": None,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9e4}},
    },
    "smollm3-listed": DENSE["smollm3"] | {"no_rope_layers": [0, 1, 1], "mlp_bias": True, "attention_bias": True},
    "smollm3-sliding": DENSE["smollm3"] | {"use_sliding_window": True, "sliding_window": 4},
    "granite-plain": {key: value for key, value in DENSE["granite"].items() if "multiplier" not in key},
    "glm-whole": DENSE["glm"] | {"partial_rotary_factor": 1.0, "attention_bias": False},
    "starcoder2-bare": DENSE["starcoder2"] | {"use_bias": False, "sliding_window": None},
    "stablelm-qk-norms": DENSE["stablelm"] | {"qk_layernorm": True, "num_key_value_heads": 3},
    "phi-qk-norms": DENSE["phi"] | {"qk_layernorm": True, "partial_rotary_factor": 0.25, "num_key_value_heads": 1},
    "exaone4-no-window": DENSE["exaone4"] | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "exaone4-listed": DENSE["exaone4"] | TWO_KINDS,
    "ernie4_5-yarn": DENSE["ernie4_5"] | {"use_bias": False, "rope_scaling": ROPES["yarn"]},
    "ministral-default": {key: value for key, value in DENSE["ministral"].items() if key != "layer_types"},
    "seed_oss-bare": DENSE["seed_oss"] | {"attention_bias": False, "attention_out_bias": False, "mlp_bias": True},
    "olmo-plain": DENSE["olmo"] | {"clip_qkv": None, "attention_bias": True},
    "cohere-plain": DENSE["cohere"] | {"use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": False},
    "cohere2-listed": DENSE["cohere2"] | TWO_KINDS,
    "hunyuan_v1_dense-plain": DENSE["hunyuan_v1_dense"] | {"rope_scaling": None, "attention_bias": True},
    "nemotron-biases": DENSE["nemotron"] | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "cwm-listed": DENSE["cwm"] | TWO_KINDS | {"mlp_bias": True, "rope_theta": 500.0},
    "falcon-linear": DENSE["falcon"] | {"rope_scaling": {"type": "linear", "factor": 3.0}, "ffn_hidden_size": 20},
    "mpt-plain": DENSE["mpt"] | {"attn_config": {"softmax_scale": 0.5}},
    "biogpt-unscaled": DENSE["biogpt"] | {"scale_embedding": False, "tie_word_embeddings": False},
    "mt5-plain": DENSE["mt5"] | {"feed_forward_proj": "relu"},
    "umt5-unscaled": DENSE["umt5"] | {"tie_word_embeddings": False, "feed_forward_proj": "gated-silu"},
    "umt5-saved": DENSE["umt5"] | {"scale_decoder_outputs": False},
    "ministral3-sliding": DENSE["ministral3"] | {"sliding_window": 5},
    "bloom-8-heads": DENSE["bloom"] | {"num_attention_heads": 8, "tie_word_embeddings": False},
    "persimmon-bare": DENSE["persimmon"] | {
        "qk_layernorm": False, "partial_rotary_factor": 1.0, "hidden_act": "gelu_new", "tie_word_embeddings": True,
    },
    **HYBRID_VARIANTS,
}  # fmt: skip
DENSE_FAMILY_VARIANTS |= LATER_FAMILY_VARIANTS
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 4,
}
NEWER_FAMILY_VARIANTS: dict[str, dict[str, Any]] = {  # compared with transformers live only
    "gptj-tied": GPTJ | {"tie_word_embeddings": True},
    "gptj-names": GPTJ | {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "n_inner": None},
    "opt-bare": OPT | {
        "enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False,
        "activation_function": "gelu",
    },
    "opt-no-last-norm": OPT | {"_remove_final_layer_norm": True, "word_embed_proj_dim": 30},
    "gpt_neox-whole": GPT_NEOX | {"rotary_pct": 1.0, "rotary_emb_base": 500},
    "gpt_neox-default": {key: value for key, value in GPT_NEOX.items() if key != "rotary_pct"},
    "gpt_neox-version-5": GPT_NEOX | {"rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.75}},
    "gpt_neox-linear": GPT_NEOX | {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "mistral-no-window": MISTRAL | {"sliding_window": None, "num_key_value_heads": 3, "head_dim": None},
    "mixtral-window": MIXTRAL | {"sliding_window": 4, "num_experts_per_tok": 1},
    "mixtral-all": MIXTRAL | {"num_experts_per_tok": 3, "hidden_act": "gelu"},
    "qwen2-sliding": QWEN2 | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen2-off": QWEN2 | {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1},
    "qwen2-kinds": QWEN2 | SLIDING | {"tie_word_embeddings": True},
    "qwen3-biases": QWEN3 | SLIDING | {"attention_bias": True},
    "qwen3_moe-plain": QWEN3_MOE | {"norm_topk_prob": False, "num_experts_per_tok": 3, "attention_bias": True},
    "qwen3_moe-mixed": QWEN3_MOE | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen2_moe-sparse": QWEN2_MOE | {
        "mlp_only_layers": [], "qkv_bias": False, "norm_topk_prob": True, "use_sliding_window": True,
        "sliding_window": 4, "max_window_layers": 2, "num_hidden_layers": 2,
    },
    "gpt_oss-defaults": {key: value for key, value in GPT_OSS.items() if key != "rope_parameters"} | {
        "attention_bias": False, "num_hidden_layers": 3,
    },
    "deepseek_v2-greedy": DEEPSEEK_V2 | {
        "topk_method": "greedy", "q_lora_rank": 7, "attention_bias": True, "first_k_dense_replace": 0,
        "num_hidden_layers": 2, "rope_scaling": DEEP_YARN,
    },
    "deepseek_v3-half-split": DEEPSEEK_V3 | {
        "rope_interleave": False, "attention_bias": True, "q_lora_rank": None, "norm_topk_prob": False,
        "rope_scaling": None, "first_k_dense_replace": 2,
    },
    "glm4_moe-plain": GLM4_MOE | {
        "use_qk_norm": False, "attention_bias": True, "n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0,
    },
    "dots1-full": DOTS1 | {"sliding_window": None, "attention_bias": True, "norm_topk_prob": True},
    "ernie4_5_moe-bounded": ERNIE4_5_MOE | {
        "moe_norm_min": 0.5, "moe_num_shared_experts": 0, "moe_layer_interval": 1, "moe_layer_end_index": 2,
        "tie_word_embeddings": False,
    },
    "olmoe-biases": OLMOE | {"attention_bias": True, "num_key_value_heads": 3, "norm_topk_prob": True},
    "granitemoeshared-plain": GRANITEMOESHARED | {"shared_intermediate_size": 0, "attention_bias": True},
    "qwen3_moe-sliding": QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 4},
    "gemma-legacy": GEMMA1 | {"hidden_act": "gelu", "hidden_activation": None},
    "gemma-biases": GEMMA1 | {"attention_bias": True, "tie_word_embeddings": False},
    "gemma2-no-caps": GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma2-kinds": GEMMA2 | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "gemma3_text-linear": GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3_text-version-5": GEMMA3 | {
        "final_logit_softcapping": 2.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "phi3-window": PHI3 | {"sliding_window": 4, "num_key_value_heads": None},
    "phi3-su": PHI3 | {
        "original_max_position_embeddings": 400, "partial_rotary_factor": 1.0,
        "rope_scaling": LONG_ROPE | {"type": "su", "original_max_position_embeddings": 16},
    },
    "t5-stored": T5_GATED | {"dense_act_fn": "quick_gelu", "is_gated_act": True, "num_decoder_layers": None},
    "t5-silu": T5 | {"feed_forward_proj": "gated-silu", "scale_decoder_outputs": False, "num_layers": 1},
    "t5-untied": T5 | {"tie_word_embeddings": False, "scale_decoder_outputs": True},
    "phi3-version-5": PHI3 | {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 300.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 2.0, 3.0],
        "long_factor": [3.0, 4.0, 6.0], "attention_factor": 0.9, "original_max_position_embeddings": 16,
    }},
}  # fmt: skip

FULL = {"layer_types": ["full_attention", "full_attention"]}
YARN = {
    "rope_type": "yarn",
    "factor": 3.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 300.0,
}
NESTED = {
    "sliding_attention": {"rope_type": "default"},
    "full_attention": YARN | {"truncate": False},
}
AMBIGUOUS: dict[str, dict[str, Any]] = {  # transformers ignores some of their fields, or reads more
    "mistral-listed": MISTRAL | FULL,
    "mixtral-listed": MIXTRAL | FULL | {"sliding_window": 4},
    "phi3-listed": PHI3 | FULL | {"sliding_window": 4},
    "qwen3_moe-listed": QWEN3_MOE | FULL | {"use_sliding_window": True, "sliding_window": 4},
    "mixtral-both-names": MIXTRAL | {"num_experts": 4},
    "qwen3_moe-both-names": QWEN3_MOE | {"num_local_experts": 4},
    "qwen3_moe-plain-beyond": QWEN3_MOE | {"mlp_only_layers": [2], "decoder_sparse_step": 1},
    "t5-null": T5 | {"tie_word_embeddings": None},
    "t5-36-buckets": T5 | {"relative_attention_num_buckets": 36, "relative_attention_max_distance": 50},
    "t5-aliases": T5 | {
        "hidden_size": 24, "num_attention_heads": 2, "head_dim": 4, "num_hidden_layers": 1, "num_decoder_layers": None,
    },
    "t5-other-activation": T5 | {"hidden_act": "gelu", "activation_function": "silu"},
    "gemma3_text-underscore": {k: v for k, v in GEMMA3.items() if k != "sliding_window_pattern"} | {
        "_sliding_window_pattern": 2,
    },
    "gemma3_text-truncate": GEMMA3 | {"rope_parameters": NESTED},
    "gemma3_text-truncate-outside": GEMMA3 | {"rope_parameters": NESTED | {"truncate": False}},
    "gemma3_text-type": GEMMA3 | {"rope_scaling": {"type": "linear", "factor": 8.0}},
    "gpt_neox-4.57": GPT_NEOX | {"partial_rotary_factor": 0.5, "rotary_emb_base": 10000, "rope_theta": 10000},
    "gpt_neox-4.57-other": GPT_NEOX | {"partial_rotary_factor": 1.0, "rope_theta": 99},
    "gpt2-by-depth": GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
    "gpt2-by-depth-upcast": GPT2 | {
        "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True, "scale_attn_weights": False,
    },
    "llama-yarn-beta-0": LLAMA | {"rope_scaling": ROPES["yarn"] | {"beta_fast": 0, "beta_slow": 0}},
}  # fmt: skip

FIRST_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-untied": GPT2
    | {"tie_word_embeddings": False, "n_inner": 24, "reorder_and_upcast_attn": True},
    "gpt_neo": GPT_NEO,
    "gpt_neo-untied": GPT_NEO
    | {"tie_word_embeddings": False, "attention_layers": ["local", "local", "global"]},
    "llama": LLAMA,
    "llama-biases": LLAMA
    | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": None},
    **{f"llama-{kind}": LLAMA | {"rope_scaling": rope} for kind, rope in ROPES.items()},
}
GOLDEN = FIRST_FAMILIES | NEWER_FAMILIES | DENSE_FAMILIES  # configs with a golden file
GPT2_VARIANTS: dict[str, dict[str, Any]] = {
    "odd-heads": {"n_embd": 24, "n_head": 3},
    "names": {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "hidden_size": 8,
        "max_position_embeddings": 301,
    },
    "plain-scores": {"scale_attn_weights": False},
    "upcast": {"reorder_and_upcast_attn": True, "activation_function": "relu"},
}
GPT_NEO_VARIANTS: dict[str, dict[str, Any]] = {
    "odd-heads": {"hidden_size": 24, "num_heads": 3},
    "odd": {"num_layers": 5, "attention_types": [[["global", "local"], 2], [["global"], 1]]},
    "attention-layers": {"attention_layers": ["local", "global", "local"]},
    "window-1": {"window_size": 1},
    "window-7": {"window_size": 7},
    "window-300": {"window_size": 300},
    "wide": {"intermediate_size": 37, "activation_function": "gelu", "tie_word_embeddings": False},
    "tanh": {"activation_function": "gelu_pytorch_tanh"},
}
LLAMA_VARIANTS: dict[str, dict[str, Any]] = {
    "odd-heads": {"num_attention_heads": 3, "hidden_size": 24, "head_dim": None},
    "odd": {"num_hidden_layers": 3, "num_key_value_heads": None},
    "groups": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    "theta": {"rope_theta": 5e5},
    "version-5": {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}},
    "both-spellings": {
        "rope_scaling": ROPES["linear"],
        "rope_parameters": {"rope_type": "default"},
    },
    "llama3-outside": {"rope_scaling": ROPES["llama3"], "original_max_position_embeddings": 16},
    "llama3-no-length": {
        "rope_scaling": {
            k: v for k, v in ROPES["llama3"].items() if k != "original_max_position_embeddings"
        }
    },
    "yarn-attention": {
        "rope_scaling": ROPES["yarn"] | {"attention_factor": 0.9, "truncate": False}
    },
    "yarn-mscale": {
        "rope_scaling": ROPES["yarn"] | {"mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 3}
    },
    "yarn-half": {"rope_scaling": ROPES["yarn"] | {"factor": 0.5, "mscale": 0.7, "beta_slow": 0.5}},
    "gelu": {"hidden_act": "gelu_new"},
    "relu": {"hidden_act": "relu", "attention_bias": True},
}
LIVE: dict[str, dict[str, Any]] = {  # all configs that are compared with transformers live
    **GOLDEN,
    **NEWER_FAMILY_VARIANTS,
    **DENSE_FAMILY_VARIANTS,
    **AMBIGUOUS,
    **{f"gpt2-{name}": GPT2 | changes for name, changes in GPT2_VARIANTS.items()},
    **{f"gpt_neo-{name}": GPT_NEO | changes for name, changes in GPT_NEO_VARIANTS.items()},
    **{f"llama-{name}": LLAMA | changes for name, changes in LLAMA_VARIANTS.items()},
}
ODD_HEADS = {  # one config with an odd number of heads per family
    **{name: LIVE[f"{name}-odd-heads"] for name in ("gpt2", "gpt_neo", "llama")},
    **{
        name: config
        for name, config in (NEWER_FAMILIES | DENSE_FAMILIES).items()
        if name == config["model_type"]
    },
}
