"""The config.json of every model with an alias, as data.

Fields unused by conversion and training are omitted. The factors of LongRoPE are placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepcli.models.parameters import HFConfig

ConfigFields = dict[str, Any]
GPT2_TOKEN_IDS = {"bos_token_id": 50256, "eos_token_id": 50256}
LLAMA_TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2}
DEPTH_KEYS = {  # other model types: num_hidden_layers
    "gpt2": ("n_layer",), "gptj": ("n_layer",), "codegen": ("n_layer",), "gpt_neo": ("num_layers",),
    "t5": ("num_layers", "num_decoder_layers"), "mt5": ("num_layers", "num_decoder_layers"), "xglm": ("num_layers",),
}  # fmt: skip


def _gpt2(embed: int, layers: int, heads: int) -> HFConfig:
    return GPT2_TOKEN_IDS | {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32", "vocab_size": 50257,
        "n_embd": embed, "n_layer": layers, "n_head": heads, "n_positions": 1024, "n_ctx": 1024,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "attn_pdrop": 0.1,
        "embd_pdrop": 0.1, "resid_pdrop": 0.1,
    }  # fmt: skip


def _gpt_neo(embed: int, layers: int, heads: int) -> HFConfig:
    return GPT2_TOKEN_IDS | {
        "model_type": "gpt_neo", "architectures": ["GPTNeoForCausalLM"], "torch_dtype": "float32", "vocab_size": 50257,
        "hidden_size": embed, "num_layers": layers, "num_heads": heads, "max_position_embeddings": 2048,
        "intermediate_size": None, "window_size": 256, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02, "attention_dropout": 0.0, "embed_dropout": 0.0, "resid_dropout": 0.0,
        "use_cache": True,
    }  # fmt: skip


def _gptj() -> HFConfig:
    return GPT2_TOKEN_IDS | {
        "model_type": "gptj", "architectures": ["GPTJForCausalLM"], "torch_dtype": "float32", "vocab_size": 50400,
        "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_inner": None, "n_positions": 2048, "rotary": True,
        "rotary_dim": 64, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "scale_attn_weights": True, "tie_word_embeddings": False, "use_cache": True,
    }  # fmt: skip


def _codegen(embed: int, layers: int, heads: int, rotary_dim: int = 64) -> HFConfig:
    return GPT2_TOKEN_IDS | {
        "model_type": "codegen", "architectures": ["CodeGenForCausalLM"], "torch_dtype": "float16", "vocab_size": 51200,
        "n_embd": embed, "n_layer": layers, "n_head": heads, "n_ctx": 2048, "n_inner": None, "n_positions": 2048,
        "rotary_dim": rotary_dim, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True,
    }  # fmt: skip


def _neox(embed: int, layers: int, heads: int, vocab: int = 50304, **more: Any) -> HFConfig:
    return {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "torch_dtype": "float16",
        "vocab_size": vocab, "hidden_size": embed, "intermediate_size": 4 * embed, "num_hidden_layers": layers,
        "num_attention_heads": heads, "max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10000,
        "use_parallel_residual": True, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": False, "use_cache": True, "bos_token_id": 0, "eos_token_id": 0, **more,
    }  # fmt: skip


def _opt(
    embed: int, layers: int, heads: int, word_embed: int | None = None, first: bool = True
) -> HFConfig:
    return {
        "model_type": "opt", "architectures": ["OPTForCausalLM"], "torch_dtype": "float16", "vocab_size": 50272,
        "hidden_size": embed, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * embed,
        "max_position_embeddings": 2048, "word_embed_proj_dim": word_embed or embed, "do_layer_norm_before": first,
        "_remove_final_layer_norm": False, "activation_function": "relu", "init_std": 0.02, "dropout": 0.1,
        "use_cache": True, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    }  # fmt: skip


def _llama_like(
    common: ConfigFields,
    embed: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    **more: Any,
) -> HFConfig:
    """Return a LLaMA-style config. `common` has the fields that all models of a generation share."""
    sizes = {"hidden_size": embed, "intermediate_size": mlp, "num_hidden_layers": layers}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab}
    usual = {
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
    }
    return {**LLAMA_TOKEN_IDS, **usual, **common, **sizes, **counts, **more}


def _generation_fields(
    family: str, name: str, dtype: str, positions: int, eps: float, theta: float | None = None
) -> ConfigFields:
    fields: ConfigFields = {
        "model_type": family,
        "architectures": [f"{name}ForCausalLM"],
        "torch_dtype": dtype,
    }
    fields |= {"max_position_embeddings": positions, "rms_norm_eps": eps}
    return fields | ({} if theta is None else {"rope_theta": theta})


def _longrope_scaling(kind: str, count: int) -> ConfigFields:
    ramp = [1.0 + 0.05 * i for i in range(count)]
    return {"type": kind, "short_factor": ramp, "long_factor": [2 * factor for factor in ramp]}


def _t5(embed: int, mlp: int, layers: int, heads: int, head_dim: int = 64) -> HFConfig:
    return {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "torch_dtype": "float32",
        "vocab_size": 32128, "d_model": embed, "d_ff": mlp, "d_kv": head_dim, "num_layers": layers,
        "num_decoder_layers": layers, "num_heads": heads, "relative_attention_num_buckets": 32, "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0, "is_encoder_decoder": True, "n_positions": 512,
        "use_cache": True, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip


LLAMA_1 = _generation_fields("llama", "Llama", "float16", 2048, 1e-6)
LLAMA_2 = _generation_fields("llama", "Llama", "float16", 4096, 1e-5)
LLAMA_3 = _generation_fields("llama", "Llama", "bfloat16", 8192, 1e-5, 5e5) | {
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
LLAMA_31_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_31 = LLAMA_3 | {"max_position_embeddings": 131072, "rope_scaling": LLAMA_31_ROPE}
LLAMA_31_INSTRUCT = LLAMA_31 | {"eos_token_id": [128001, 128008, 128009]}
LLAMA_32 = LLAMA_31 | {
    "rope_scaling": LLAMA_31_ROPE | {"factor": 32.0},
    "tie_word_embeddings": True,
}
SMOLLM2 = _generation_fields("llama", "Llama", "bfloat16", 8192, 1e-5, 1e5) | {
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "rope_scaling": None, "attention_bias": False,
}  # fmt: skip
MISTRAL = _generation_fields("mistral", "Mistral", "bfloat16", 32768, 1e-5, 1e4) | {
    "sliding_window": 4096
}
MISTRAL_3 = MISTRAL | {"rope_theta": 1e6, "sliding_window": None}
MIXTRAL = _generation_fields("mixtral", "Mixtral", "bfloat16", 32768, 1e-5, 1e6) | {
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
}  # fmt: skip
QWEN_COMMON = {"bos_token_id": 151643, "eos_token_id": 151643, "use_sliding_window": False}
QWEN2 = _generation_fields("qwen2", "Qwen2", "bfloat16", 131072, 1e-6, 1e6) | QWEN_COMMON | {
    "sliding_window": 131072, "max_window_layers": 28, "use_mrope": False,
}  # fmt: skip
QWEN3 = _generation_fields("qwen3", "Qwen3", "bfloat16", 40960, 1e-6, 1e6) | QWEN_COMMON | {
    "head_dim": 128, "attention_bias": False, "rope_scaling": None, "sliding_window": None, "max_window_layers": 28,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "mlp_only_layers": [], "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
GEMMA_COMMON = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "head_dim": 256,
}
GEMMA = _generation_fields("gemma", "Gemma", "bfloat16", 8192, 1e-6, 1e4) | GEMMA_COMMON | {
    "hidden_act": "gelu", "hidden_activation": None, "attention_bias": False, "rope_scaling": None,
}  # fmt: skip
TANH = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
}
GEMMA_2 = _generation_fields("gemma2", "Gemma2", "float32", 8192, 1e-6, 1e4) | GEMMA_COMMON | TANH | {
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
}  # fmt: skip
GEMMA_3 = _generation_fields("gemma3_text", "Gemma3", "bfloat16", 32768, 1e-6, 1e6) | GEMMA_COMMON | TANH | {
    "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6, "rope_local_base_freq": 10000,
    "rope_scaling": None, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "cache_implementation": "hybrid",
}  # fmt: skip
PHI_3 = _generation_fields("phi3", "Phi3", "bfloat16", 4096, 1e-5, 1e4) | {
    "original_max_position_embeddings": 4096, "sliding_window": 2047, "rope_scaling": None, "attention_bias": False,
    "eos_token_id": 32000, "pad_token_id": 32000,
}  # fmt: skip
PHI_35 = PHI_3 | {
    "max_position_embeddings": 131072,
    "sliding_window": 262144,
    "rope_scaling": _longrope_scaling("longrope", 48),
}
PHI_4 = PHI_3 | {
    "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "rope_theta": 250000,
    "sliding_window": None, "bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349,
}  # fmt: skip
PHI_4_MINI = PHI_35 | {
    "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "lm_head_bias": False, "mlp_bias": False,
    "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999,
}  # fmt: skip
T5_11 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FLAN = T5_11 | {"relative_attention_max_distance": 128}
T5_11_SIZES = {
    "small": _t5(512, 1024, 8, 6),
    "base": _t5(768, 2048, 12, 12),
    "large": _t5(1024, 2816, 24, 16),
    "xl": _t5(2048, 5120, 24, 32),
    "xxl": _t5(4096, 10240, 24, 64),
}
SMALL_QWEN = {"tie_word_embeddings": True}
# Sources of the sizes below: litgpt 0.5.13 (OLMo 2, Phi, Falcon, StableLM), OLMo-core 3.0.0 (OLMo 2, OLMoE), Megatron
# Bridge 0.3.1 (DeepSeek V2), and the defaults of the config classes of transformers 5.24 (all others). mT5 has the
# sizes of T5 v1.1 (arXiv:2010.11934).
OLMO_2 = _generation_fields("olmo2", "Olmo2", "float32", 4096, 1e-6, 5e5) | {
    "bos_token_id": None, "eos_token_id": 100257, "pad_token_id": 100277, "attention_bias": False,
}  # fmt: skip
OLMOE = _generation_fields("olmoe", "Olmoe", "bfloat16", 4096, 1e-5, 1e4) | {
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "bos_token_id": None, "eos_token_id": 50279,
    "pad_token_id": 1,
}  # fmt: skip
SMOLLM3 = _generation_fields("smollm3", "SmolLM3", "bfloat16", 65536, 1e-6, 5e6) | {
    "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004,
    "no_rope_layer_interval": 4,
}  # fmt: skip
QWEN15_MOE = _generation_fields("qwen2_moe", "Qwen2Moe", "bfloat16", 8192, 1e-6, 1e6) | QWEN_COMMON | {
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False, "decoder_sparse_step": 1,
}  # fmt: skip
DEEPSEEK_V2 = _generation_fields("deepseek_v2", "DeepseekV2", "bfloat16", 163840, 1e-6, 1e4) | {
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "bos_token_id": 100000, "eos_token_id": 100001,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip
GLM_4 = _generation_fields("glm", "Glm", "bfloat16", 131072, 1.5625e-07, 1e4) | {
    "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True, "bos_token_id": None,
    "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329,
}  # fmt: skip
ERNIE = _generation_fields("ernie4_5", "Ernie4_5", "bfloat16", 131072, 1e-5, 5e5) | {
    "tie_word_embeddings": True, "use_bias": False, "pad_token_id": 0,
}  # fmt: skip
ERNIE_MOE = ERNIE | {
    "model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"], "moe_intermediate_size": 1536,
    "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
}  # fmt: skip
HELIUM = _generation_fields("helium", "Helium", "bfloat16", 4096, 1e-8, 1e5) | {
    "head_dim": 128, "attention_bias": False, "mlp_bias": False, "pad_token_id": 3,
}  # fmt: skip
COMMAND_R = {
    "model_type": "cohere", "architectures": ["CohereForCausalLM"], "torch_dtype": "float16",
    "max_position_embeddings": 131072, "layer_norm_eps": 1e-5, "rope_theta": 8e6, "logit_scale": 0.0625,
    "attention_bias": False, "use_qk_norm": False, "tie_word_embeddings": True, "bos_token_id": 5,
    "eos_token_id": 255001, "pad_token_id": 0,
}  # fmt: skip
PHI_FIELDS = {
    "model_type": "phi", "architectures": ["PhiForCausalLM"], "torch_dtype": "float16", "hidden_act": "gelu_new",
    "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "qk_layernorm": False,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
STABLELM = {
    "model_type": "stablelm", "architectures": ["StableLmForCausalLM"], "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "rope_theta": 10000, "partial_rotary_factor": 0.25,
    "use_qkv_bias": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
STARCODER_2 = {
    "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], "torch_dtype": "float32",
    "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16384, "norm_epsilon": 1e-5,
    "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
FALCON = {
    "model_type": "falcon", "architectures": ["FalconForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 65024,
    "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True, "parallel_attn": True,
    "bias": False, "alibi": False, "new_decoder_architecture": False, "layer_norm_epsilon": 1e-5, "bos_token_id": 11,
    "eos_token_id": 11,
}  # fmt: skip
BIOGPT = {
    "model_type": "biogpt", "architectures": ["BioGptForCausalLM"], "torch_dtype": "float32", "vocab_size": 42384,
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    "hidden_act": "gelu", "max_position_embeddings": 1024, "layer_norm_eps": 1e-12, "scale_embedding": True,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
XGLM = {
    "model_type": "xglm", "architectures": ["XGLMForCausalLM"], "torch_dtype": "float16", "vocab_size": 256008,
    "d_model": 1024, "ffn_dim": 4096, "num_layers": 24, "attention_heads": 16, "activation_function": "gelu",
    "max_position_embeddings": 2048, "scale_embedding": True, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
MT5 = T5_11 | {
    "model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"], "vocab_size": 250112,
}  # fmt: skip

PUBLISHED: Mapping[str, HFConfig] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt-neo-125M": _gpt_neo(768, 12, 12),
    "gpt-neo-1.3B": _gpt_neo(2048, 24, 16),
    "gpt-neo-2.7B": _gpt_neo(2560, 32, 20),
    "gpt-j-6b": _gptj(),
    "codegen-350m-mono": _codegen(1024, 20, 16, rotary_dim=32),
    "codegen-2b-mono": _codegen(2560, 32, 32),
    "codegen-6b-mono": _codegen(4096, 33, 16),
    "codegen-16b-mono": _codegen(6144, 34, 24),
    "pythia-70m": _neox(512, 6, 8),
    "pythia-160m": _neox(768, 12, 12),
    "pythia-410m": _neox(1024, 24, 16),
    "pythia-1b": _neox(2048, 16, 8),
    "pythia-1.4b": _neox(2048, 24, 16),
    "pythia-2.8b": _neox(2560, 32, 32),
    "pythia-6.9b": _neox(4096, 32, 32, 50432),
    "pythia-12b": _neox(5120, 36, 40, 50688),
    "gpt-neox-20b": _neox(6144, 44, 64, 50432, hidden_act="gelu_fast"),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed=512, first=False),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "llama-7b": _llama_like(LLAMA_1, 4096, 11008, 32, 32, 32, 32000),
    "llama-13b": _llama_like(LLAMA_1, 5120, 13824, 40, 40, 40, 32000),
    "llama-30b": _llama_like(LLAMA_1, 6656, 17920, 60, 52, 52, 32000),
    "llama-65b": _llama_like(LLAMA_1, 8192, 22016, 80, 64, 64, 32000, rms_norm_eps=1e-5),
    "llama-2-7b": _llama_like(LLAMA_2, 4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _llama_like(LLAMA_2, 5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": _llama_like(LLAMA_2, 8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": _llama_like(LLAMA_3, 4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _llama_like(LLAMA_3, 8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-8b": _llama_like(LLAMA_31, 4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-8b-instruct": _llama_like(LLAMA_31_INSTRUCT, 4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _llama_like(LLAMA_31, 8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _llama_like(LLAMA_31, 16384, 53248, 126, 128, 8, 128256),
    "llama-3.2-1b": _llama_like(LLAMA_32, 2048, 8192, 16, 32, 8, 128256, head_dim=64),
    "llama-3.2-3b": _llama_like(LLAMA_32, 3072, 8192, 28, 24, 8, 128256, head_dim=128),
    "llama-3.3-70b-instruct": _llama_like(LLAMA_31_INSTRUCT, 8192, 28672, 80, 64, 8, 128256),
    "smollm2-135m": _llama_like(SMOLLM2, 576, 1536, 30, 9, 3, 49152),
    "smollm2-360m": _llama_like(SMOLLM2, 960, 2560, 32, 15, 5, 49152),
    "smollm2-1.7b": _llama_like(SMOLLM2, 2048, 8192, 24, 32, 32, 49152, rope_theta=130000),
    "mistral-7b": _llama_like(MISTRAL, 4096, 14336, 32, 32, 8, 32000),
    "mistral-7b-v0.3": _llama_like(MISTRAL_3, 4096, 14336, 32, 32, 8, 32768),
    "mistral-nemo-12b": _llama_like(
        MISTRAL_3, 5120, 14336, 40, 32, 8, 131072, head_dim=128, max_position_embeddings=128000
    ),
    "mixtral-8x7b": _llama_like(MIXTRAL, 4096, 14336, 32, 32, 8, 32000),
    "mixtral-8x22b": _llama_like(
        MIXTRAL, 6144, 16384, 56, 48, 8, 32000, max_position_embeddings=65536
    ),
    "qwen2-0.5b": _llama_like(QWEN2, 896, 4864, 24, 14, 2, 151936, **SMALL_QWEN),
    "qwen2-1.5b": _llama_like(QWEN2, 1536, 8960, 28, 12, 2, 151936, **SMALL_QWEN),
    "qwen2-7b": _llama_like(QWEN2, 3584, 18944, 28, 28, 4, 152064),
    "qwen2-72b": _llama_like(QWEN2, 8192, 29568, 80, 64, 8, 152064, rms_norm_eps=1e-5),
    "qwen2.5-0.5b": _llama_like(QWEN2, 896, 4864, 24, 14, 2, 151936, **SMALL_QWEN),
    "qwen2.5-1.5b": _llama_like(QWEN2, 1536, 8960, 28, 12, 2, 151936, **SMALL_QWEN),
    "qwen2.5-3b": _llama_like(QWEN2, 2048, 11008, 36, 16, 2, 151936, **SMALL_QWEN),
    "qwen2.5-7b": _llama_like(QWEN2, 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _llama_like(QWEN2, 5120, 13824, 48, 40, 8, 152064, rms_norm_eps=1e-5),
    "qwen2.5-32b": _llama_like(QWEN2, 5120, 27648, 64, 40, 8, 152064, rms_norm_eps=1e-5),
    "qwen2.5-72b": _llama_like(QWEN2, 8192, 29568, 80, 64, 8, 152064, rms_norm_eps=1e-5),
    "qwen3-0.6b": _llama_like(QWEN3, 1024, 3072, 28, 16, 8, 151936, **SMALL_QWEN),
    "qwen3-1.7b": _llama_like(QWEN3, 2048, 6144, 28, 16, 8, 151936, **SMALL_QWEN),
    "qwen3-4b": _llama_like(QWEN3, 2560, 9728, 36, 32, 8, 151936, **SMALL_QWEN),
    "qwen3-8b": _llama_like(QWEN3, 4096, 12288, 36, 32, 8, 151936),
    "qwen3-14b": _llama_like(QWEN3, 5120, 17408, 40, 40, 8, 151936),
    "qwen3-32b": _llama_like(QWEN3, 5120, 25600, 64, 64, 8, 151936),
    "qwen3-30b-a3b": _llama_like(
        QWEN3_MOE, 2048, 6144, 48, 32, 4, 151936, moe_intermediate_size=768
    ),
    "qwen3-235b-a22b": _llama_like(
        QWEN3_MOE, 4096, 12288, 94, 64, 4, 151936, moe_intermediate_size=1536
    ),
    "gemma-2b": _llama_like(GEMMA, 2048, 16384, 18, 8, 1, 256000),
    "gemma-7b": _llama_like(GEMMA, 3072, 24576, 28, 16, 16, 256000),
    "gemma-2-2b": _llama_like(GEMMA_2, 2304, 9216, 26, 8, 4, 256000),
    "gemma-2-9b": _llama_like(GEMMA_2, 3584, 14336, 42, 16, 8, 256000),
    "gemma-2-27b": _llama_like(
        GEMMA_2, 4608, 36864, 46, 32, 16, 256000, head_dim=128, query_pre_attn_scalar=144
    ),
    "gemma-3-270m": _llama_like(GEMMA_3, 640, 2048, 18, 4, 1, 262144),
    "gemma-3-1b": _llama_like(GEMMA_3, 1152, 6912, 26, 4, 1, 262144),
    "phi-3-mini": _llama_like(PHI_3, 3072, 8192, 32, 32, 32, 32064),
    "phi-3-medium": _llama_like(PHI_3, 5120, 17920, 40, 40, 10, 32064),
    "phi-3.5-mini": _llama_like(PHI_35, 3072, 8192, 32, 32, 32, 32064),
    "phi-4": _llama_like(PHI_4, 5120, 17920, 40, 40, 10, 100352),
    "phi-4-mini": _llama_like(PHI_4_MINI, 3072, 8192, 32, 24, 8, 200064),
    "t5-small": _t5(512, 2048, 6, 8),
    "t5-base": _t5(768, 3072, 12, 12),
    "t5-large": _t5(1024, 4096, 24, 16),
    "t5-3b": _t5(1024, 16384, 24, 32, head_dim=128),
    "t5-11b": _t5(1024, 65536, 24, 128, head_dim=128),
    **{f"t5-v1_1-{name}": {**config, **T5_11} for name, config in T5_11_SIZES.items()},
    **{f"flan-t5-{name}": {**config, **FLAN} for name, config in T5_11_SIZES.items()},
    **{f"mt5-{name}": {**config, **MT5} for name, config in T5_11_SIZES.items()},
    "olmo-2-7b": _llama_like(OLMO_2, 4096, 11008, 32, 32, 32, 100352),
    "olmo-2-13b": _llama_like(OLMO_2, 5120, 13824, 40, 40, 40, 100352),
    "olmoe-1b-7b": _llama_like(OLMOE, 2048, 1024, 16, 16, 16, 50304),
    "smollm3-3b": _llama_like(SMOLLM3, 2048, 11008, 36, 16, 4, 128256),
    "qwen1.5-moe-a2.7b": _llama_like(QWEN15_MOE, 2048, 5632, 24, 16, 16, 151936),
    "deepseek-v2-lite": _llama_like(DEEPSEEK_V2, 2048, 10944, 27, 16, 16, 102400),
    "glm-4-9b": _llama_like(GLM_4, 4096, 13696, 40, 32, 2, 151552),
    "ernie-4.5-0.3b": _llama_like(ERNIE, 1024, 3072, 18, 16, 2, 103424, head_dim=128),
    "ernie-4.5-21b-a3b": _llama_like(ERNIE_MOE, 2560, 12288, 28, 20, 4, 103424),
    "helium-2b": _llama_like(HELIUM, 2560, 7040, 24, 20, 20, 48000),
    "command-r": _llama_like(COMMAND_R, 8192, 22528, 40, 64, 64, 256000),
    "phi-1.5": _llama_like(PHI_FIELDS, 2048, 8192, 24, 32, 32, 51200, partial_rotary_factor=0.5),
    "phi-2": _llama_like(PHI_FIELDS, 2560, 10240, 32, 32, 32, 51200, partial_rotary_factor=0.4),
    "stablelm-3b": _llama_like(STABLELM, 2560, 6912, 32, 32, 32, 50304),
    "starcoder2-3b": _llama_like(STARCODER_2, 3072, 12288, 30, 24, 2, 49152),
    "falcon-7b": FALCON,
    "biogpt": BIOGPT,
    "xglm-564m": XGLM,
}


def published_config(
    name: str, dtype: str | None = None, layers: int | None = None, changes: HFConfig | None = None
) -> dict[str, Any]:
    """Return the config of an alias with another number of layers, dtype or fields."""
    return override_config(PUBLISHED[name], dtype, layers, changes)


def override_config(
    config: HFConfig,
    dtype: str | None = None,
    layers: int | None = None,
    changes: HFConfig | None = None,
) -> dict[str, Any]:
    """Return a config with another number of layers, dtype or fields."""
    fields: dict[str, Any] = {**config, **(changes or {})}
    depths = DEPTH_KEYS.get(fields["model_type"], ("num_hidden_layers",))
    fields |= {} if layers is None else dict.fromkeys(depths, layers)
    fields |= {} if dtype is None else {"torch_dtype": dtype}
    if fields["model_type"] == "gpt_neo" and "attention_types" not in fields:
        pairs, rest = divmod(fields["num_layers"], 2)
        alternating = [[["global", "local"], pairs]] if pairs else []
        fields["attention_types"] = alternating + ([[["global"], 1]] if rest else [])
    return fields
