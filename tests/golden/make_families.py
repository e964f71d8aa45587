"""Writes families/*.json beside this file: names and shapes of tiny models as transformers has them.

Run by hand with the `parity` extra installed: `python tests/golden/make_families.py`. No weights are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "families"
GPT_NEO = {
    "model_type": "gpt_neo", "vocab_size": 37, "hidden_size": 12, "num_layers": 2, "num_heads": 3,
    "max_position_embeddings": 10, "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 20,
}  # fmt: skip
CONFIGS: Mapping[str, dict[str, Any]] = {
    "gpt_neo-tied": GPT_NEO,
    "gpt_neo-untied-wide": GPT_NEO | {"tie_word_embeddings": False, "intermediate_size": 17},
    "gpt_neo-defaults": {"model_type": "gpt_neo", "num_layers": 1, "attention_types": [[["global"], 1]]},
    "llama-plain": LLAMA,
    "llama-grouped": LLAMA | {"num_key_value_heads": 2},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-head-dim": LLAMA | {"head_dim": 10, "num_key_value_heads": 2},
    "llama-nulls": LLAMA | {"head_dim": None, "num_key_value_heads": None},
    "llama-defaults": {"model_type": "llama", "num_hidden_layers": 1},
}


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as given, and the parameters of its model: name -> shape, one that is tied once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    return {"config": dict(config), "tensors": {name: list(p.shape) for name, p in model.named_parameters()}}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, config in CONFIGS.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(describe(config), indent=1) + "\n")


if __name__ == "__main__":
    main()
