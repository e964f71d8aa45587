"""Restore an exported checkpoint with Tunix, save it again with Tunix, and save the logits of the model.

It runs in the environment of Tunix: `python tunix_oracle.py MODEL/config.json OUT SAVED LOGITS.npy`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
import jax.numpy as jnp
import numpy as np
from flax import nnx

# By name, because pyright runs in an environment without Tunix.
CheckpointManager = importlib.import_module("tunix.sft.checkpoint_manager").CheckpointManager

# Module and class of each model type.
CLASSES = {
    "llama": ("llama3", "Llama3"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "qwen3_moe": ("qwen3", "Qwen3"),
    "gemma": ("gemma", "Gemma"),
    "gemma2": ("gemma", "Gemma"),
    "gemma3_text": ("gemma3", "Gemma3"),
}
NUM_TOKENS = 12


def make_config(module: ModuleType, config: dict[str, Any]) -> object:
    """Return the config of Tunix for a model of transformers."""
    model_type = config["model_type"]
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "head_dim": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
    }
    if model_type == "qwen3_moe":
        sizes["hidden_dim"] = config["moe_intermediate_size"]
        sizes["num_experts"] = config["num_local_experts"]
        sizes["num_experts_per_tok"] = config["num_experts_per_tok"]
    if not model_type.startswith("gemma"):
        tied_field = "weight_tying" if model_type == "llama" else "use_tied_embedding"
        return module.ModelConfig(
            **sizes,
            vocab_size=config["vocab_size"],
            rope_theta=1_000_000,
            norm_eps=config["rms_norm_eps"],
            **{tied_field: config["tie_word_embeddings"]},
        )
    sizes["num_embed"] = config["vocab_size"]
    if model_type == "gemma3_text":
        return module.ModelConfig(
            **sizes,
            sliding_window_size=config["sliding_window"],
            global_base_frequency=1_000_000,
            param_dtype=jnp.float32,
        )
    kinds = module.AttentionType
    layers = config["num_hidden_layers"]
    is_second = model_type == "gemma2"
    pattern = (kinds.LOCAL_SLIDING, kinds.GLOBAL) if is_second else (kinds.GLOBAL, kinds.GLOBAL)
    return module.ModelConfig(
        **sizes,
        final_logit_softcap=config.get("final_logit_softcapping"),
        attn_logits_soft_cap=config.get("attn_logit_softcapping"),
        use_post_attn_norm=is_second,
        use_post_ffw_norm=is_second,
        attention_types=(pattern * layers)[:layers],
        sliding_window_size=config.get("sliding_window"),
    )


def main(config_path: str, exported: str, saved: str, out: str) -> None:
    """Restore step 0, save it to the folder `saved`, and write the logits of the tokens 1, 2, 3, ..."""
    config = json.loads(Path(config_path).read_text())
    module_name, class_name = CLASSES[config["model_type"]]
    module = importlib.import_module(f"tunix.models.{module_name}.model")
    model = getattr(module, class_name)(make_config(module, config), rngs=nnx.Rngs(0))
    manager = CheckpointManager(exported)
    step, _ = manager.maybe_restore(model)
    manager.close()
    assert step == 0
    manager = CheckpointManager(saved)
    manager.save(1, model, force=True)
    manager.close()
    tokens = jnp.arange(1, NUM_TOKENS + 1)[None]
    positions = jnp.arange(NUM_TOKENS)[None]
    mask = jnp.tril(jnp.ones((1, NUM_TOKENS, NUM_TOKENS), bool))
    logits = model(tokens, positions, None, mask)
    if isinstance(logits, tuple):
        logits = logits[0]
    np.save(out, np.asarray(logits, np.float32))


if __name__ == "__main__":
    main(*sys.argv[1:])
