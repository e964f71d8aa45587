"""Tiny configs of families with recurrent mixers, alone or beside attention."""

from __future__ import annotations

from typing import Any

SMALL = {
    "vocab_size": 29, "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 3, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
CONV_AND_ATTENTION = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
LFM2 = SMALL | CONV_AND_ATTENTION | {
    "model_type": "lfm2", "norm_eps": 1e-3, "block_auto_adjust_ff_dim": False,
}  # fmt: skip
LFM2_MOE = SMALL | CONV_AND_ATTENTION | {
    "model_type": "lfm2_moe", "norm_eps": 1e-3, "moe_intermediate_size": 5, "num_experts": 4,
    "num_experts_per_tok": 2, "num_dense_layers": 1, "routed_scaling_factor": 1.3,
}  # fmt: skip
QWEN3_5 = SMALL | {
    "model_type": "qwen3_5_text", "num_hidden_layers": 3, "head_dim": 16, "rms_norm_eps": 1e-3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
QWEN3_5_MOE = QWEN3_5 | {
    "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 5, "shared_expert_intermediate_size": 6,
    "num_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_NEXT = QWEN3_5_MOE | {
    "model_type": "qwen3_next", "mlp_only_layers": [0],
}  # fmt: skip
MAMBA2 = {
    "model_type": "mamba2", "vocab_size": 29, "hidden_size": 12, "num_heads": 4, "head_dim": 6, "n_groups": 2,
    "state_size": 5, "num_hidden_layers": 2, "conv_kernel": 3, "layer_norm_epsilon": 1e-3, "time_step_rank": 2,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
MAMBA_SIZES = {"mamba_n_heads": 4, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_n_groups": 2}
BAMBA = SMALL | MAMBA_SIZES | {
    "model_type": "bamba", "num_hidden_layers": 3, "rms_norm_eps": 1e-3, "attn_layer_indices": [1],
}  # fmt: skip
GRANITE_HYBRID = SMALL | MAMBA_SIZES | {
    "model_type": "granitemoehybrid", "num_hidden_layers": 3, "rms_norm_eps": 1e-3, "intermediate_size": 5,
    "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "shared_intermediate_size": 8,
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7,
}  # fmt: skip
FALCON_H1 = SMALL | MAMBA_SIZES | {
    "model_type": "falcon_h1", "num_hidden_layers": 2, "rms_norm_eps": 1e-3, "mamba_d_ssm": 20, "mamba_rms_norm": True,
    "mamba_norm_before_gate": False, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7,
    "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.8, "mlp_multipliers": [0.6, 1.4],
    "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.9, 0.5, 1.7, 0.8, 1.2], "ssm_out_multiplier": 0.6,
}  # fmt: skip
NEMOTRON_H = SMALL | {
    "model_type": "nemotron_h", "layer_norm_epsilon": 1e-3, "num_hidden_layers": 4, "head_dim": 10,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 4,
    "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 5, "conv_kernel": 3, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 5, "moe_shared_expert_intermediate_size": 6,
    "routed_scaling_factor": 1.3,
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "vocab_size": 29, "hidden_size": 12, "state_size": 5, "num_hidden_layers": 2,
    "conv_kernel": 3, "layer_norm_epsilon": 1e-3, "time_step_rank": 3, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": None,
}  # fmt: skip
FALCON_MAMBA = MAMBA | {"model_type": "falcon_mamba", "mixer_rms_eps": 0.1}
# With a smaller epsilon, rounding errors grow in training: losses of torch in float32 and float64 differ by 1e-5.
JAMBA = SMALL | {
    "model_type": "jamba", "num_hidden_layers": 3, "rms_norm_eps": 1e-2, "attn_layer_period": 3, "attn_layer_offset": 2,
    "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 3, "num_experts_per_tok": 2,
    "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_dt_rank": 3, "intermediate_size": 6,
}  # fmt: skip

# Configs with a golden file of the results of transformers.
HYBRID_FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "mamba2": MAMBA2,
    "bamba": BAMBA,
    "granitemoehybrid": GRANITE_HYBRID,
    "falcon_h1": FALCON_H1,
    "nemotron_h": NEMOTRON_H,
    "mamba": MAMBA,
    "jamba": JAMBA,
    "falcon_mamba": FALCON_MAMBA,
}
# Configs without a golden file. Tests compare them with the installed transformers.
HYBRID_VARIANTS: dict[str, dict[str, Any]] = {
    "lfm2-biases": LFM2 | {"conv_bias": True, "conv_L_cache": 4, "layer_types": ["conv"] * 4},
    "lfm2-widths": {key: value for key, value in LFM2.items() if key != "layer_types"} | {
        "block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3,
        "full_attn_idxs": [1], "num_hidden_layers": 3,
    },
    "lfm2_moe-plain": LFM2_MOE | {
        "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False, "layer_types": ["conv"] * 4,
    },
    "qwen3_5_text-biases": QWEN3_5 | {
        "attention_bias": True, "linear_num_value_heads": 2, "hidden_act": "gelu_new",
        "rope_parameters": {
            "rope_theta": 300.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        },
    },
    "qwen3_5_moe_text-default-types": {
        key: value for key, value in QWEN3_5_MOE.items() if key != "layer_types"
    } | {"full_attention_interval": 2},
    "qwen3_next-sparse": QWEN3_NEXT | {
        "mlp_only_layers": [], "norm_topk_prob": False, "num_hidden_layers": 2,
        "layer_types": ["linear_attention"] * 2,
    },
    "mamba2-biases": MAMBA2 | {
        "use_bias": True, "use_conv_bias": False, "time_step_limit": [0.3, 0.9], "hidden_act": "gelu",
    },
    "bamba-biases": BAMBA | {
        "mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True,
        "attn_layer_indices": None, "mamba_d_head": 12,
    },
    "granitemoehybrid-dense": GRANITE_HYBRID | {
        "num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True, "mamba_proj_bias": True,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    },
    "jamba-dense": JAMBA | {
        "num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_dt_rank": "auto",
        "tie_word_embeddings": True, "hidden_act": "gelu",
    },
    "mamba-biases": MAMBA | {
        "use_bias": True, "use_conv_bias": False, "expand": 3, "hidden_act": "gelu", "time_step_rank": "auto",
        "tie_word_embeddings": False,
    },
    "falcon_mamba-biases": FALCON_MAMBA | {
        "use_bias": True, "use_conv_bias": False, "expand": 3, "hidden_act": "gelu", "time_step_rank": "auto",
        "tie_word_embeddings": False,
    },
    "nemotron_h-pattern": {key: value for key, value in NEMOTRON_H.items() if key != "layers_block_type"} | {
        "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5, "mlp_bias": True, "use_bias": True,
        "use_conv_bias": False, "mlp_hidden_act": "gelu", "mamba_hidden_act": "relu",
    },
    "nemotron_h-groups": NEMOTRON_H | {
        "layers_block_type": ["linear_attention", "moe", "moe", "linear_attention"], "mlp_bias": True,
        "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "norm_topk_prob": False, "time_step_min": 0.4,
    },
    "falcon_h1-biases": FALCON_H1 | {
        "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True,
        "mamba_conv_bias": False, "mamba_norm_before_gate": True, "mamba_d_ssm": None, "tie_word_embeddings": True,
    },
    "falcon_h1-no-norm": FALCON_H1 | {
        "mamba_rms_norm": False, "mamba_d_head": 5, "mlp_multipliers": None, "ssm_multipliers": None,
    },
    "granitemoehybrid-attention": GRANITE_HYBRID | {
        "num_local_experts": 0, "position_embedding_type": "rope", "layer_types": ["attention"] * 3,
    },
}  # fmt: skip
