"""Restore an exported checkpoint with torchtitan, save it again with torch, and save the logits of the model.

It runs in the environment of torchtitan: `python torchtitan_oracle.py MODEL/config.json OUT SAVED LOGITS.npy`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

# By name, because pyright runs in an environment without torchtitan.
models = {
    name: importlib.import_module(f"torchtitan.models.{name}") for name in ("llama3", "qwen3")
}
attention = importlib.import_module("torchtitan.models.common.attention")
common = importlib.import_module("torchtitan.models.common")
rope = importlib.import_module("torchtitan.models.common.rope")

NUM_TOKENS = 12


def make_config(config: dict[str, Any]) -> Any:
    """Return the config of torchtitan for a dense model of transformers."""
    width = config["hidden_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    sizes = {
        "n_layers": config["num_hidden_layers"],
        "dim": width,
        "n_heads": heads,
        "n_kv_heads": config["num_key_value_heads"],
        "hidden_dim": config["intermediate_size"],
        "attn_backend": "varlen",
    }
    rope_sizes = {
        "dim": head_dim,
        "max_seq_len": 64,
        "theta": config["rope_parameters"]["rope_theta"],
    }
    if config["model_type"] == "llama":
        module = models["llama3"]
        layers = module._build_llama3_layers(**sizes, rope=rope.ComplexRoPE.Config(**rope_sizes))
        model_class = module.Llama3Model
    else:
        module = models["qwen3"]
        layers = module._build_qwen3_layers(
            **sizes, head_dim=head_dim, rope=rope.CosSinRoPE.Config(**rope_sizes)
        )
        model_class = module.Qwen3Model
    eps = config["rms_norm_eps"]
    for layer in layers:
        layer.attention_norm.eps = eps
        layer.ffn_norm.eps = eps
        # The attention for GPUs needs a compiled kernel.
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    vocab = config["vocab_size"]
    zeros = {"weight": torch.nn.init.zeros_}
    return model_class.Config(
        dim=width,
        vocab_size=vocab,
        enable_weight_tying=config["tie_word_embeddings"],
        tok_embeddings=common.Embedding.Config(
            num_embeddings=vocab, embedding_dim=width, param_init=zeros
        ),
        norm=common.RMSNorm.Config(normalized_shape=width, eps=eps, param_init=zeros),
        lm_head=common.Linear.Config(in_features=width, out_features=vocab, param_init=zeros),
        layers=layers,
    )


def main(config_path: str, exported: str, saved: str, out: str) -> None:
    """Restore the model, save it to the folder `saved`, and write the logits of the tokens 1, 2, 3, ..."""
    config = json.loads(Path(config_path).read_text())
    model = make_config(config).build()
    state = model.state_dict()
    load(state, checkpoint_id=exported)
    model.load_state_dict(state)
    save(model.state_dict(), checkpoint_id=saved)
    with torch.no_grad():
        logits = model(torch.arange(1, NUM_TOKENS + 1)[None])
    np.save(out, logits.float().numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
