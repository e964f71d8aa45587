"""Published configs of models, for plans without their checkpoints and for random starts: the fields without defaults.

The names are the aliases of `prep models`. Source: the config.json of each model on the Hugging
Face hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from prepcli.core.errors import usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import JsonObject, JsonValue
from prepcli.models.parameters import HFConfig

# Suffixes of the folders that prep makes from a model.
CHECKPOINT_SUFFIXES = ("-init", "-padded")


def _llama(hidden: int, layers: int, heads: int, mlp: int, **fields: JsonValue) -> JsonObject:
    """Return the config of a LLaMA model."""
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
    }
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, **sizes,
        **fields,
    }  # fmt: skip


def _gpt2(embed: int, layers: int, heads: int) -> JsonObject:
    """Return the config of a GPT-2 model."""
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": embed, "n_layer": layers, "n_head": heads,
        "n_positions": 1024, "vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256,
    }  # fmt: skip


def _gpt_neo(hidden: int, layers: int, heads: int) -> JsonObject:
    """Return the config of a GPT-Neo model: global and local attention in turn."""
    return {
        "architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", "hidden_size": hidden, "num_layers": layers,
        "num_heads": heads, "vocab_size": 50257, "max_position_embeddings": 2048, "window_size": 256,
        "attention_types": [[["global", "local"], layers // 2]], "bos_token_id": 50256, "eos_token_id": 50256,
    }  # fmt: skip


def _opt(hidden: int, layers: int, heads: int, **fields: JsonValue) -> JsonObject:
    """Return the config of an OPT model."""
    return {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden, "vocab_size": 50272,
        "max_position_embeddings": 2048, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, **fields,
    }  # fmt: skip


def _t5(width: int, layers: int, heads: int, mlp: int, **fields: JsonValue) -> JsonObject:
    """Return the config of a T5 model of version 1.0: ReLU and a tied head."""
    return {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": width, "d_kv": 64, "d_ff": mlp,
        "num_layers": layers, "num_decoder_layers": layers, "num_heads": heads, "vocab_size": 32128,
        "feed_forward_proj": "relu", "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, **fields,
    }  # fmt: skip


def _qwen3(hidden: int, layers: int, heads: int, mlp: int, **fields: JsonValue) -> JsonObject:
    """Return the config of a dense Qwen3 model."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": mlp, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "bos_token_id": 151643, "eos_token_id": 151645, "tie_word_embeddings": False, **fields,
    }  # fmt: skip


def _olmo2(hidden: int, layers: int, heads: int, mlp: int) -> JsonObject:
    """Return the config of an OLMo 2 model."""
    return {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 100352, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "intermediate_size": mlp, "max_position_embeddings": 4096, "rope_theta": 500000.0, "rms_norm_eps": 1e-6,
        "eos_token_id": 100257, "pad_token_id": 100277, "tie_word_embeddings": False,
    }  # fmt: skip


def _gated_t5(width: int, layers: int, heads: int, mlp: int) -> JsonObject:
    """Return the config of a T5 v1.1 or Flan-T5 model: gated GELU and an untied head."""
    return _t5(width, layers, heads, mlp, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


_LLAMA_2 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_LLAMA_3 = {
    "vocab_size": 128256, "max_position_embeddings": 8192, "num_key_value_heads": 8, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
_LLAMA_3_1 = {
    **_LLAMA_3, "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
_LLAMA_3_1_INSTRUCT = {**_LLAMA_3_1, "eos_token_id": [128001, 128008, 128009]}
_GATED_T5_SIZES = {
    "small": (512, 8, 6, 1024), "base": (768, 12, 12, 2048), "large": (1024, 24, 16, 2816), "xl": (2048, 24, 32, 5120),
    "xxl": (4096, 24, 64, 10240),
}  # fmt: skip

PRESETS: Mapping[str, HFConfig] = {
    "llama-7b": _llama(4096, 32, 32, 11008),
    "llama-13b": _llama(5120, 40, 40, 13824),
    "llama-30b": _llama(6656, 60, 52, 17920),
    "llama-65b": _llama(8192, 80, 64, 22016, rms_norm_eps=1e-5),
    "llama-2-7b": _llama(4096, 32, 32, 11008, **_LLAMA_2),
    "llama-2-13b": _llama(5120, 40, 40, 13824, **_LLAMA_2),
    "llama-2-70b": _llama(8192, 80, 64, 28672, num_key_value_heads=8, **_LLAMA_2),
    "llama-3-8b": _llama(4096, 32, 32, 14336, **_LLAMA_3),
    "llama-3-70b": _llama(8192, 80, 64, 28672, **_LLAMA_3),
    "llama-3.1-8b": _llama(4096, 32, 32, 14336, **_LLAMA_3_1),
    "llama-3.1-8b-instruct": _llama(4096, 32, 32, 14336, **_LLAMA_3_1_INSTRUCT),
    "llama-3.1-70b": _llama(8192, 80, 64, 28672, **_LLAMA_3_1),
    "llama-3.3-70b-instruct": _llama(8192, 80, 64, 28672, **_LLAMA_3_1_INSTRUCT),
    "open-llama-3b": _llama(3200, 26, 32, 8640),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    # The text part of a multimodal model, with the embeddings of its image tokens.
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "intermediate_size": 10240, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6, "bos_token_id": 2,
        "eos_token_id": [1, 106], "pad_token_id": 0,
    },
    "olmo-2-7b": _olmo2(4096, 32, 32, 11008),
    "olmo-2-13b": _olmo2(5120, 40, 40, 13824),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt-j-6b": {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16,
        "n_positions": 2048, "vocab_size": 50400, "rotary_dim": 64, "bos_token_id": 50256, "eos_token_id": 50256,
        "tie_word_embeddings": False,
    },
    "gpt-neo-125M": _gpt_neo(768, 12, 12),
    "gpt-neo-1.3B": _gpt_neo(2048, 24, 16),
    "gpt-neo-2.7B": _gpt_neo(2560, 32, 20),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "t5-small": _t5(512, 6, 8, 2048),
    "t5-base": _t5(768, 12, 12, 3072),
    "t5-large": _t5(1024, 24, 16, 4096),
    **{f"t5-v1_1-{size}": _gated_t5(*sizes) for size, sizes in _GATED_T5_SIZES.items()},
    **{f"flan-t5-{size}": _gated_t5(*sizes) for size, sizes in _GATED_T5_SIZES.items()},
}  # fmt: skip


def preset_name(path: str) -> str | None:
    """Return the preset of a checkpoint path such as `llama-7b-init`, or None if there is none."""
    name = PurePath(path).name
    # A folder may have several suffixes, e.g. llama-7b-padded-init.
    while suffix := next((suffix for suffix in CHECKPOINT_SUFFIXES if name.endswith(suffix)), ""):
        name = name.removesuffix(suffix)
    if name in PRESETS:
        return name
    return None


def find_preset(name: str) -> HFConfig:
    """Return the published config of a name.

    Raises:
        UsageError: The name is unknown.
    """
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or "`model.config` takes any config.json"
        raise usage_error(f"unknown preset `{name:.60}`", f"known: {', '.join(PRESETS)}", hint)
    return PRESETS[name]
