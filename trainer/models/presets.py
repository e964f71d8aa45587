"""Published configs of models, for plans without their checkpoints; only fields that decide shapes and positions.

The names are the aliases of `prep models`. Source: the config.json of each model on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from trainer.models.parameters import HFConfig

CHECKPOINT_SUFFIXES = ("-init", "-padded")  # of folders that prep makes from a model


def _llama(hidden: int, layers: int, heads: int, mlp: int, **fields: Any) -> dict[str, Any]:
    """Return the config of a LLaMA model."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": mlp}
    return {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048, **sizes, **fields}


_LLAMA_2 = {"max_position_embeddings": 4096}
_LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 8192, "num_key_value_heads": 8, "rope_theta": 500000.0}

PRESETS: Mapping[str, HFConfig] = {
    "llama-7b": _llama(4096, 32, 32, 11008),
    "llama-13b": _llama(5120, 40, 40, 13824),
    "llama-30b": _llama(6656, 60, 52, 17920),
    "llama-65b": _llama(8192, 80, 64, 22016),
    "llama-2-7b": _llama(4096, 32, 32, 11008, **_LLAMA_2),
    "llama-2-13b": _llama(5120, 40, 40, 13824, **_LLAMA_2),
    "llama-2-70b": _llama(8192, 80, 64, 28672, num_key_value_heads=8, **_LLAMA_2),
    "llama-3-8b": _llama(4096, 32, 32, 14336, **_LLAMA_3),
    "llama-3-70b": _llama(8192, 80, 64, 28672, **_LLAMA_3),
    "gpt2": {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
    },
    "gpt-j-6b": {
        "model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "vocab_size": 50400,
        "rotary_dim": 64,
    },
    "gpt-neo-1.3B": {
        "model_type": "gpt_neo", "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 50257,
        "max_position_embeddings": 2048, "attention_types": [[["global", "local"], 12]], "window_size": 256,
    },
    "flan-t5-base": {
        "model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_decoder_layers": 12,
        "num_heads": 12, "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
}  # fmt: skip


def preset_name(path: str) -> str | None:
    """Return the preset whose checkpoint a path names, such as `llama-7b-init`; None if there is none."""
    name = PurePath(path).name
    while suffix := next((suffix for suffix in CHECKPOINT_SUFFIXES if name.endswith(suffix)), ""):
        name = name.removesuffix(suffix)
    return name if name in PRESETS else None
