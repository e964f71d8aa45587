"""A LLaMA with the tensors of a trainer that prep does not support: fused, stacked, transposed and renamed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.helpers.hf_folders import write_hf_folder
from tests.helpers.tiny_checkpoints import LLAMA

CONFIG = LLAMA | {"model_type": "own_llama"}
# Of the config LLAMA: 8 heads and 4 heads of keys with 4 elements each.
HEADS = 32
KV_HEADS = 16
LAYERS = 3
FAMILY_MAP = """
# The map of a trainer with fused projections.
family llama
size side = 2
drop rotary.*

model.embed_tokens.weight: vocab embed <- tok: embed vocab   # transposed
model.norm.weight: embed <- norm: 1 embed
lm_head.weight: vocab embed <- out: vocab embed
model.layers.{layers}.input_layernorm.weight: embed <- norms: side=0 layers embed
model.layers.{layers}.post_attention_layernorm.weight: embed <- norms: side=1 layers embed
model.layers.{layers}.self_attn.q_proj.weight: (heads head_dim) embed <- h.{layers}.qkv: embed (>heads head_dim | kv_heads head_dim | kv_heads head_dim)
model.layers.{layers}.self_attn.k_proj.weight: (kv_heads head_dim) embed <- h.{layers}.qkv: embed (heads head_dim | >kv_heads head_dim | kv_heads head_dim)
model.layers.{layers}.self_attn.v_proj.weight: (kv_heads head_dim) embed <- h.{layers}.qkv: embed (heads head_dim | kv_heads head_dim | >kv_heads head_dim)
model.layers.{layers}.self_attn.o_proj.weight: embed (heads head_dim) <- h.{layers}.out: heads head_dim embed
model.layers.{layers}.mlp.gate_proj.weight: mlp embed <- gate_up: layers (mlp side=0) embed
model.layers.{layers}.mlp.up_proj.weight: mlp embed <- gate_up: layers (mlp side=1) embed
model.layers.{layers}.mlp.down_proj.weight: embed mlp <- h.{layers}.down: embed mlp
"""  # noqa: E501 - a row is one line

# Every matrix of a LLaMA is transposed, and its layers are stacked: only the final norm has the bytes of one tensor.
STACKED_MAP = """
size layers = 3
size embed = 32
size kv = 16
size mlp = 48
size vocab = vocab_size
tok: embed vocab <- model.embed_tokens.weight: vocab embed
out: embed vocab <- lm_head.weight: vocab embed
norm: embed <- model.norm.weight: embed
norms: side=0 layers embed <- model.layers.{layers}.input_layernorm.weight: embed
norms: side=1 layers embed <- model.layers.{layers}.post_attention_layernorm.weight: embed
q: layers embed inner <- model.layers.{layers}.self_attn.q_proj.weight: inner embed
k: layers embed kv <- model.layers.{layers}.self_attn.k_proj.weight: kv embed
v: layers embed kv <- model.layers.{layers}.self_attn.v_proj.weight: kv embed
o: layers inner embed <- model.layers.{layers}.self_attn.o_proj.weight: embed inner
gate: layers embed mlp <- model.layers.{layers}.mlp.gate_proj.weight: mlp embed
up: layers embed mlp <- model.layers.{layers}.mlp.up_proj.weight: mlp embed
down: layers mlp embed <- model.layers.{layers}.mlp.down_proj.weight: embed mlp
size inner = 32
size side = 2
"""


def foreign_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of FAMILY_MAP, made with NumPy from the tensors of a LLaMA."""

    def stacked(name: str) -> np.ndarray:
        return np.stack([tensors[f"model.layers.{i}.{name}.weight"] for i in range(LAYERS)])

    gate_up = np.stack([stacked("mlp.gate_proj"), stacked("mlp.up_proj")], axis=2)
    foreign = {
        "tok": tensors["model.embed_tokens.weight"].T,
        "norm": tensors["model.norm.weight"][None],
        "out": tensors["lm_head.weight"],
        "norms": np.stack([stacked("input_layernorm"), stacked("post_attention_layernorm")]),
        "gate_up": gate_up.reshape(LAYERS, -1, gate_up.shape[-1]),
        "rotary.inv_freq": np.arange(4, dtype=np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        names = [f"{prefix}self_attn.{part}_proj.weight" for part in "qkv"]
        out = tensors[f"{prefix}self_attn.o_proj.weight"]
        foreign[f"h.{layer}.qkv"] = np.concatenate([tensors[name] for name in names]).T
        foreign[f"h.{layer}.out"] = out.T.reshape(8, 4, -1)
        foreign[f"h.{layer}.down"] = tensors[f"{prefix}mlp.down_proj.weight"]
    return {name: np.ascontiguousarray(value) for name, value in foreign.items()}


def write_foreign_folder(folder: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a folder with the tensors of FAMILY_MAP in two files."""
    foreign = foreign_tensors(tensors)
    names = sorted(foreign)
    files = {
        "model-1.safetensors": {name: foreign[name] for name in names[::2]},
        "model-2.safetensors": {name: foreign[name] for name in names[1::2]},
    }
    return write_hf_folder(folder, files, CONFIG)


def stacked_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a LLaMA with stacked layers of transposed matrices, made with NumPy. The heads of queries are a dim."""
    stacked = {
        "tok": tensors["model.embed_tokens.weight"].T,
        "norm": tensors["model.norm.weight"][None],
        "out": tensors["lm_head.weight"],
    }
    parts = [f"self_attn.{part}_proj" for part in "qkvo"]
    parts += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    for part in parts:
        layers = [tensors[f"model.layers.{layer}.{part}.weight"].T for layer in range(LAYERS)]
        stacked[f"h.{part.split('.')[1]}"] = np.stack(layers)
    stacked["h.q_proj"] = stacked["h.q_proj"].reshape(LAYERS, HEADS, 8, 4)
    for kind in ("input", "post_attention"):
        layers = [tensors[f"model.layers.{n}.{kind}_layernorm.weight"] for n in range(LAYERS)]
        stacked[f"h.{kind}_norm"] = np.stack(layers)
    return {name: np.ascontiguousarray(value) for name, value in stacked.items()}
