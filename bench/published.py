"""config.json of the models that prep has aliases for, as data; what no conversion asks of it is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepcli.aliases import BY_NAME
from trainer.table import Config

GPT_NEO = {
    "model_type": "gpt_neo", "architectures": ["GPTNeoForCausalLM"], "torch_dtype": "float32", "vocab_size": 50257,
    "max_position_embeddings": 2048, "intermediate_size": None, "window_size": 256, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "attention_dropout": 0.0, "embed_dropout": 0.0,
    "resid_dropout": 0.0, "use_cache": True, "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
LLAMA_1 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16", "vocab_size": 32000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "initializer_range": 0.02,
    "tie_word_embeddings": False, "use_cache": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA_2 = LLAMA_1 | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
LLAMA_3 = LLAMA_2 | {
    "torch_dtype": "bfloat16", "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_31 = LLAMA_3 | {"max_position_embeddings": 131072, "rope_scaling": ROPE}
LLAMA_32 = LLAMA_31 | {"rope_scaling": ROPE | {"factor": 32.0}, "tie_word_embeddings": True}

GPT_NEO_SIZES = ("hidden_size", "num_layers", "num_heads")
LLAMA_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES = {"gpt_neo": GPT_NEO_SIZES, "llama": LLAMA_SIZES}
DEPTH = {"gpt_neo": "num_layers", "llama": "num_hidden_layers"}
PUBLISHED: Mapping[str, tuple[Config, tuple[int, ...]]] = {
    "gpt-neo-125M": (GPT_NEO, (768, 12, 12)),
    "gpt-neo-1.3B": (GPT_NEO, (2048, 24, 16)),
    "gpt-neo-2.7B": (GPT_NEO, (2560, 32, 20)),
    "llama-7b": (LLAMA_1, (4096, 11008, 32, 32, 32)),
    "llama-13b": (LLAMA_1, (5120, 13824, 40, 40, 40)),
    "llama-30b": (LLAMA_1, (6656, 17920, 60, 52, 52)),
    "llama-65b": (LLAMA_1 | {"rms_norm_eps": 1e-5}, (8192, 22016, 80, 64, 64)),
    "llama-2-7b": (LLAMA_2, (4096, 11008, 32, 32, 32)),
    "llama-2-13b": (LLAMA_2, (5120, 13824, 40, 40, 40)),
    "llama-2-70b": (LLAMA_2, (8192, 28672, 80, 64, 8)),
    "llama-3-8b": (LLAMA_3, (4096, 14336, 32, 32, 8)),
    "llama-3-70b": (LLAMA_3, (8192, 28672, 80, 64, 8)),
    "llama-3.1-8b": (LLAMA_31, (4096, 14336, 32, 32, 8)),
    "llama-3.1-70b": (LLAMA_31, (8192, 28672, 80, 64, 8)),
    "llama-3.1-405b": (LLAMA_31, (16384, 53248, 126, 128, 8)),
    "llama-3.2-1b": (LLAMA_32 | {"head_dim": 64}, (2048, 8192, 16, 32, 8)),
    "llama-3.2-3b": (LLAMA_32 | {"head_dim": 128}, (3072, 8192, 28, 24, 8)),
}


def config_of(
    name: str, dtype: str | None = None, layers: int | None = None, changes: Config | None = None
) -> dict[str, Any]:
    """config.json of the published model of an alias, made another with so many layers, a dtype, other fields."""
    common, sizes = PUBLISHED[name]
    family = BY_NAME[name].family
    config = {**common, **dict(zip(SIZES[family], sizes, strict=True)), **(changes or {})}
    config |= {} if layers is None else {DEPTH[family]: layers}
    config |= {} if dtype is None else {"torch_dtype": dtype}
    if family == "gpt_neo" and "attention_types" not in config:
        pairs, rest = divmod(config["num_layers"], 2)
        alternating = [[["global", "local"], pairs]] if pairs else []
        config["attention_types"] = alternating + ([[["global"], 1]] if rest else [])
    return config
