"""Script that writes families/*.json beside this file: names and shapes of tiny models' tensors in transformers.

Run it by hand with the `parity` extra installed: `python -m tests.golden.make_families`. It allocates no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.commands.testing.tiny_model import tensor_shapes
from tests.helpers.tiny_configs import DENSE_FAMILIES, NEWER_FAMILIES, NEWER_FAMILY_VARIANTS

FOLDER = Path(__file__).parent / "families"
GPT_NEO = {
    "model_type": "gpt_neo", "vocab_size": 37, "hidden_size": 12, "num_layers": 2, "num_heads": 3,
    "max_position_embeddings": 10, "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 37,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 10,
}
NEW_NAMES = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 7,
}
LLAMA = {
    "model_type": "llama", "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 20,
}  # fmt: skip
PLAIN = (
    "opt",
    "gpt_neox",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
)
# Fields without which a model of transformers with only default values cannot be built, or has many experts.
WITHOUT_DEFAULT: Mapping[str, dict[str, Any]] = {
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "exaone_moe": {"num_hidden_layers": 2, "num_experts": 4},
    "flint": {"num_hidden_layers": 3, "num_experts": 4},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hy_v3": {"num_hidden_layers": 2, "num_experts": 4},
    "llama4_text": {"num_local_experts": 4},
    "mellum": {"num_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "gemma4_text": {"num_hidden_layers": 6},
    "minimax_m2": {"num_local_experts": 4},
    "sarvam_mla": {"num_hidden_layers": 2, "n_routed_experts": 4},
    "sarvam_moe": {"num_hidden_layers": 2, "n_routed_experts": 4},
    "solar_open": {"n_routed_experts": 4},
    "lfm2_moe": {"layer_types": ["conv"], "num_dense_layers": 0, "num_experts": 4},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_moe_text": {"num_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {"num_hidden_layers": 4},
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "gpt2-tied": GPT2,
    "gpt2-untied-wide": GPT2 | {"tie_word_embeddings": False, "n_inner": 17},
    "gpt2-names": {"model_type": "gpt2", "vocab_size": 37, "n_inner": None, **NEW_NAMES},
    "gpt2-both-names": GPT2 | NEW_NAMES,
    "gpt2-defaults": {"model_type": "gpt2", "n_layer": 1},
    "gpt_neo-tied": GPT_NEO,
    "gpt_neo-untied-wide": GPT_NEO | {"tie_word_embeddings": False, "intermediate_size": 17},
    "gpt_neo-defaults": {
        "model_type": "gpt_neo",
        "num_layers": 1,
        "attention_types": [[["global"], 1]],
    },
    "llama-plain": LLAMA,
    "llama-grouped": LLAMA | {"num_key_value_heads": 2},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-head-dim": LLAMA | {"head_dim": 10, "num_key_value_heads": 2},
    "llama-nulls": LLAMA | {"head_dim": None, "num_key_value_heads": None},
    "llama-defaults": {"model_type": "llama", "num_hidden_layers": 1},
    **NEWER_FAMILIES,
    **NEWER_FAMILY_VARIANTS,
    **DENSE_FAMILIES,
    "gptj-defaults": {"model_type": "gptj", "n_layer": 1},
    **{
        f"{name}-defaults": {"model_type": name, "num_hidden_layers": 1}
        for name in NEWER_FAMILIES
        if name in PLAIN
    },
    **{
        f"{name}-defaults": {"model_type": name, "num_hidden_layers": 1}
        | WITHOUT_DEFAULT.get(name, {})
        for name, config in DENSE_FAMILIES.items()
        if name == config["model_type"] and not name.endswith("t5")
    },
    "deepseek_v3-defaults": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "n_routed_experts": 8,
    },
    "gpt_oss-class-defaults": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 1,
        "num_local_experts": 4,
    },
    **{f"{name}-defaults": {"model_type": name} for name in ("t5", "mt5", "umt5")},
    "qwen3_moe-defaults": {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 3},
}


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config and the shape of each tensor by name; tied parameters are listed once."""
    return {"config": dict(config), "tensors": tensor_shapes(config)}


def main() -> None:
    """Write the files of all configs."""
    FOLDER.mkdir(exist_ok=True)
    for name, config in CONFIGS.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(describe(config), indent=1) + "\n")


if __name__ == "__main__":
    main()
