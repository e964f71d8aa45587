"""Configs of the models that the benchmarks of memory and context compile."""

from __future__ import annotations

from typing import Any

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 1376,
        "vocab_size": 32000,
    },
    "7b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
        "vocab_size": 32000,
    },
}  # fmt: skip
MODEL_SIZES["7b-layer"] = MODEL_SIZES["7b"] | {"num_hidden_layers": 1}

LLAMA = {"model_type": "llama", "max_position_embeddings": 1 << 17}
DEEP = LLAMA | MODEL_SIZES["small"] | {"num_hidden_layers": 8}
# By name, with `model_type`: LLaMA in the sizes above and five more, and models of other families with width 512.
MODEL_CONFIGS: dict[str, dict[str, Any]] = {name: LLAMA | size for name, size in MODEL_SIZES.items()} | {
    "13b": LLAMA | {
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 13824,
        "vocab_size": 32000,
    },
    "deep": DEEP,
    "shallow": DEEP | {"num_hidden_layers": 4},
    "1b": LLAMA | {
        "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 5632, "vocab_size": 32000,
    },
    "thin-head": DEEP | {"vocab_size": 1024},
    "gpt_neo": {
        "model_type": "gpt_neo", "hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 32000,
        "max_position_embeddings": 32768, "attention_types": [[["global", "local"], 2]], "window_size": 256,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "vocab_size": 32000, "intermediate_size": 2048, "max_position_embeddings": 32768,
    },
    "gemma2": {
        "model_type": "gemma2", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1376, "vocab_size": 32000,
        "max_position_embeddings": 32768, "sliding_window": 256,
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768, "sliding_window": None,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 192, "vocab_size": 32000,
        "num_experts": 32, "num_experts_per_tok": 8,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "hidden_size": 512, "num_hidden_layers": 5, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 1024, "moe_intermediate_size": 192, "vocab_size": 32000,
        "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "kv_lora_rank": 128, "q_lora_rank": 192, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64, "v_head_dim": 64,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "vocab_size": 32000,
        "num_local_experts": 16, "num_experts_per_tok": 4,
    },
    "t5": {
        "model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 4, "num_decoder_layers": 4,
        "num_heads": 8, "vocab_size": 32000, "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
    "lfm2": {
        "model_type": "lfm2", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 1376, "vocab_size": 32000,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 128, "moe_intermediate_size": 192, "vocab_size": 32000,
        "shared_expert_intermediate_size": 192, "num_experts": 32, "num_experts_per_tok": 4,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    "mamba2": {
        "model_type": "mamba2", "hidden_size": 512, "num_hidden_layers": 6, "num_heads": 16, "head_dim": 64,
        "n_groups": 1, "state_size": 128, "vocab_size": 32000,
    },
    "bamba": {
        "model_type": "bamba", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1376, "vocab_size": 32000, "attn_layer_indices": [2, 5],
        "mamba_n_heads": 16, "mamba_d_state": 128,
    },
    "granite_hybrid": {
        "model_type": "granitemoehybrid", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 192, "shared_intermediate_size": 384, "vocab_size": 32000,
        "layer_types": ["mamba", "mamba", "attention"] * 2, "num_local_experts": 16, "num_experts_per_tok": 4,
        "mamba_n_heads": 16, "mamba_d_state": 128,
    },
    "mamba": {
        "model_type": "mamba", "hidden_size": 512, "num_hidden_layers": 6, "state_size": 16, "vocab_size": 32000,
    },
    "jamba": {
        "model_type": "jamba", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1376, "vocab_size": 32000, "attn_layer_period": 3,
        "attn_layer_offset": 2, "num_experts": 4,
    },
    "apertus": {
        "model_type": "apertus", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000,
    },
    "diffllama": LLAMA | MODEL_SIZES["small"] | {"model_type": "diffllama", "num_hidden_layers": 4},
    "doge": MODEL_SIZES["small"] | {"model_type": "doge", "num_hidden_layers": 4},
}  # fmt: skip
# Some or all layers are outside the scan: two layers before two periods, and a single period.
MODEL_CONFIGS["lfm2-first"] = MODEL_CONFIGS["lfm2"] | {
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"]
}
MODEL_CONFIGS["qwen3_5-period"] = MODEL_CONFIGS["qwen3_5"] | {"num_hidden_layers": 4}
