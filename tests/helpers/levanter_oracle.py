"""Restore an exported checkpoint with Levanter, save it again with Levanter, and save the logits of the model.

It runs in the environment of Levanter: `python levanter_oracle.py MODEL/config.json OUT LAYOUT SAVED LOGITS.npy`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import numpy as np
from transformers import AutoConfig

# By name, because pyright runs in an environment without Levanter.
equinox = importlib.import_module("equinox")
haliax = importlib.import_module("haliax")
checkpoint = importlib.import_module("levanter.checkpoint")
attention = importlib.import_module("levanter.layers.attention")

# Module and config class of each model type.
CLASSES = {
    "llama": ("llama", "LlamaConfig"),
    "mistral": ("mistral", "MistralConfig"),
    "mixtral": ("mixtral", "MixtralConfig"),
    "qwen2": ("qwen", "QwenConfig"),
    "qwen3": ("qwen", "Qwen3Config"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig"),
    "gemma": ("gemma", "GemmaConfig"),
    "gemma2": ("gemma", "Gemma2Config"),
    "gemma3_text": ("gemma", "Gemma3Config"),
    "gpt2": ("gpt2", "Gpt2Config"),
    "olmo2": ("olmo", "Olmo2Config"),
    "olmo3": ("olmo3", "Olmo3Config"),
}
NUM_TOKENS = 12


def make_config(config: dict[str, Any], layout: str) -> Any:
    """Return the config of Levanter for a model of transformers."""
    values = dict(config)
    # Version 4 of transformers, which Levanter needs, has other names for some fields.
    rope = values.pop("rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        values["rope_scaling"] = rope
    if "num_local_experts" in values:
        values["num_experts"] = values["num_local_experts"]
    module, name = CLASSES[values.pop("model_type")]
    hf_config = AutoConfig.for_model(config["model_type"], **values)
    levanter_config = getattr(
        importlib.import_module(f"levanter.models.{module}"), name
    ).from_hf_config(hf_config)
    if layout == "levanter-unscanned":
        levanter_config = dataclasses.replace(levanter_config, scan_layers=False)
    return levanter_config


def main(config_path: str, exported: str, layout: str, saved: str, out: str) -> None:
    """Restore the model, save it to the folder `saved`, and write the logits of the tokens 1, 2, 3, ..."""
    config = json.loads(Path(config_path).read_text())
    model_config = make_config(config, layout)
    vocab = haliax.Axis("vocab", config["vocab_size"])

    def make_model(key: jax.Array) -> Any:
        return model_config.model_type.init(vocab, model_config, key=key)

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    with jax.set_mesh(mesh):
        shapes = equinox.filter_eval_shape(make_model, jax.random.PRNGKey(0))
        model = checkpoint.load_checkpoint(
            shapes, exported, subpath="model", axis_mapping={}, mesh=mesh
        )
        assert checkpoint.latest_checkpoint_path(exported) == exported
        checkpoint.save_checkpoint({"model": model, "step": 5}, 5, f"{saved}/step-5")
        model = equinox.nn.inference_mode(model)
        position = haliax.Axis("position", NUM_TOKENS)
        tokens = haliax.arange(position, start=1)
        logits = model(tokens, attention.AttentionMask.causal())
    np.save(out, np.asarray(logits.rearrange(("position", "vocab")).array, np.float32)[None])


if __name__ == "__main__":
    main(*sys.argv[1:])
