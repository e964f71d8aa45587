"""Parameter trees of Levanter, assembled with NumPy, and its checkpoints, written and read with TensorStore.

The formulas are those of modules in Levanter, and the specs of arrays those of its `tensorstore_serialization.py`.
Nothing here uses prep's axis maps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tests.helpers.ocdbt_oracle import open_database

Tensors = Mapping[str, np.ndarray]
Leaves = dict[str, np.ndarray]
Config = Mapping[str, Any]

LAYER_NAME = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)")
EXPERT_NAME = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
OTHER_NAMES = {
    "model.embed_tokens.weight": "embeddings.token_embeddings.weight",
    "model.norm.weight": "transformer.norm.weight",
    "transformer.wte.weight": "embeddings.token_embeddings.weight",
    "transformer.wpe.weight": "embeddings.position_embeddings.weight",
}
# Name of the module with the layers by model type, where it is not `layers`.
LAYERS_MODULES = {"gpt2": "blocks", "olmo3": "_layers"}


def levanter_leaves(tensors: Tensors, config: Config) -> Leaves:
    """Return the leaves of Levanter with stacked layers, by dotted path."""
    module = LAYERS_MODULES.get(config["model_type"], "layers")
    leaves, layers = _split_layers(tensors, config)
    for name, by_layer in layers.items():
        stacked = np.stack([by_layer[layer] for layer in range(len(by_layer))])
        leaves[f"transformer.{module}.stacked.{name}"] = stacked
    return {f"model.{path}": leaf for path, leaf in leaves.items()}


def levanter_unscanned_leaves(tensors: Tensors, config: Config) -> Leaves:
    """Return the leaves of Levanter with one leaf per layer, by dotted path."""
    module = LAYERS_MODULES.get(config["model_type"], "layers")
    leaves, layers = _split_layers(tensors, config)
    for name, by_layer in layers.items():
        for layer, leaf in by_layer.items():
            leaves[f"transformer.{module}.blocks.{layer}.{name}"] = leaf
    return {f"model.{path}": leaf for path, leaf in leaves.items()}


def _split_layers(
    tensors: Tensors, config: Config
) -> tuple[Leaves, dict[str, dict[int, np.ndarray]]]:
    """Return the leaves outside of the layers, and those of each layer by name and number."""
    others: Leaves = {}
    layers: dict[str, dict[int, np.ndarray]] = {}
    experts: dict[tuple[str, int], dict[int, np.ndarray]] = {}
    for full_name, tensor in tensors.items():
        match = LAYER_NAME.fullmatch(full_name)
        if match is None:
            default = (
                full_name if full_name == "lm_head.weight" else f"transformer.{full_name[12:]}"
            )
            others[OTHER_NAMES.get(full_name, default)] = tensor
            continue
        layer = int(match[1])
        if expert := EXPERT_NAME.fullmatch(match[2]):
            name = f"{expert[1]}.{expert[3]}"
            experts.setdefault((name, layer), {})[int(expert[2])] = tensor.T
        else:
            layers.setdefault(match[2], {})[layer] = _reshape(match[2], tensor, config)
    for (name, layer), by_expert in experts.items():
        stacked = np.stack([by_expert[expert] for expert in range(len(by_expert))])
        layers.setdefault(name, {})[layer] = stacked
    return others, layers


def _reshape(name: str, tensor: np.ndarray, config: Config) -> np.ndarray:
    """Return the leaf of a tensor: the heads are axes of their own."""
    if config["model_type"] == "gpt2":
        heads = config["n_head"]
        head_dim = config["n_embd"] // heads
        if name.startswith("attn.c_attn"):
            return tensor.reshape(*tensor.shape[:-1], 3, heads, head_dim)
        if name == "attn.c_proj.weight":
            return tensor.reshape(heads, head_dim, -1)
        return tensor
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    if not name.startswith("self_attn.") or tensor.shape == (head_dim,):
        return tensor
    if "o_proj" in name:
        return tensor.reshape(-1, heads, head_dim)
    if "q_" in name:
        return tensor.reshape(kv_heads, heads // kv_heads, head_dim, *tensor.shape[1:])
    return tensor.reshape(kv_heads, head_dim, *tensor.shape[1:])


TREES = {"levanter": levanter_leaves, "levanter-unscanned": levanter_unscanned_leaves}


def _array_spec(folder: Path, name: str) -> dict[str, Any]:
    """Return the spec of `_create_ocdbt_spec` in Levanter."""
    base = {"driver": "file", "path": str(folder.resolve())}
    path = name.replace(".", "/")
    return {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": path}}


def write_levanter(folder: Path, leaves: Mapping[str, np.ndarray], step: int) -> None:
    """Write leaves as Levanter saves them, and its metadata."""
    folder.mkdir(parents=True)
    for name, leaf in leaves.items():
        spec = _array_spec(folder, name)
        chunk_grid = {"name": "regular", "configuration": {"chunk_shape": leaf.shape}}
        spec["metadata"] = {
            "shape": leaf.shape,
            "data_type": str(leaf.dtype),
            "chunk_grid": chunk_grid,
        }
        array = ts.open(spec, create=True).result()
        array.write(leaf).result()
    metadata = {"step": step, "timestamp": "2026-01-02T03:04:05", "is_temporary": False}
    (folder / "metadata.json").write_text(json.dumps(metadata))


def read_levanter(folder: Path) -> Leaves:
    """Read all arrays as Levanter restores them, by dotted path."""
    leaves: Leaves = {}
    for key in open_database(folder.resolve()).list().result():
        path, is_document, _ = key.decode().partition("/zarr.json")
        if is_document:
            name = path.replace("/", ".")
            leaves[name] = ts.open(_array_spec(folder, name)).result().read().result()
    return leaves
