"""Fields that several tiny configs share."""

from __future__ import annotations

from typing import Any

TOKEN_FIELDS: dict[str, Any] = {
    "vocab_size": 29,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
SMALL = TOKEN_FIELDS | {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED_QUERY = SMALL | {"num_key_value_heads": 1, "head_dim": 10, "rms_norm_eps": 1e-3}
# Families whose matrices and norms have LLaMA's names. Sizes are those of GROUPED_QUERY.
LLAMA_LIKE = GROUPED_QUERY | {"head_dim": 8, "num_attention_heads": 3}
DEEPSEEK = SMALL | {
    "intermediate_size": 12, "num_hidden_layers": 3, "num_key_value_heads": 3, "moe_intermediate_size": 5,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.3, "rms_norm_eps": 1e-3,
}  # fmt: skip
GROUPS = {"n_group": 3, "topk_group": 1}
LATENT = {
    "kv_lora_rank": 9, "q_lora_rank": 11, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
}  # fmt: skip
DEEP_YARN = {
    "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip
