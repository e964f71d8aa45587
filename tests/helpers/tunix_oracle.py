"""Restore an exported checkpoint with Tunix, save it again with Tunix, and save the logits of the model.

It runs in the environment of Tunix: `python tunix_oracle.py MODEL/config.json OUT SAVED LOGITS.npy`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
import jax.numpy as jnp
import numpy as np
from flax import nnx

# By name, because pyright runs in an environment without Tunix.
CheckpointManager = importlib.import_module("tunix.sft.checkpoint_manager").CheckpointManager

CLASSES = {"llama": ("llama3", "Llama3"), "qwen2": ("qwen2", "Qwen2"), "qwen3": ("qwen3", "Qwen3")}
NUM_TOKENS = 12


def main(config_path: str, exported: str, saved: str, out: str) -> None:
    """Restore step 0, save it to the folder `saved`, and write the logits of the tokens 1, 2, 3, ..."""
    config = json.loads(Path(config_path).read_text())
    module_name, class_name = CLASSES[config["model_type"]]
    module = importlib.import_module(f"tunix.models.{module_name}.model")
    tied_field = "weight_tying" if module_name == "llama3" else "use_tied_embedding"
    model_config = module.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=1_000_000,
        norm_eps=config["rms_norm_eps"],
        **{tied_field: config["tie_word_embeddings"]},
    )
    model = getattr(module, class_name)(model_config, rngs=nnx.Rngs(0))
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
