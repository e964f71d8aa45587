"""A LLaMA in each output format, read with the format's own library, and assembled with NumPy.

Neither side uses prep's readers or axis maps: the expected leaves are made from the tensors of the
Hugging Face folder by the rules of the formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tests.helpers.golden_flax import decode_msgpack
from tests.helpers.ocdbt_oracle import open_database
from tests.helpers.tiny_checkpoints import read_tensors

Tensors = Mapping[str, np.ndarray]
Leaves = dict[str, np.ndarray]

# The init keeps the axes of each tensor [out, in] and splits the attention heads.
INIT_LAYER_NAMES = {
    "attn_norm.scale": "input_layernorm.weight",
    "attn.q.weight": "self_attn.q_proj.weight",
    "attn.k.weight": "self_attn.k_proj.weight",
    "attn.v.weight": "self_attn.v_proj.weight",
    "attn.o.weight": "self_attn.o_proj.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
EASYLM_LAYER_NAMES = {
    "attention_norm.kernel": "input_layernorm.weight",
    "attention.wq.kernel": "self_attn.q_proj.weight",
    "attention.wk.kernel": "self_attn.k_proj.weight",
    "attention.wv.kernel": "self_attn.v_proj.weight",
    "attention.wo.kernel": "self_attn.o_proj.weight",
    "ffn_norm.kernel": "post_attention_layernorm.weight",
    "feed_forward.w1.kernel": "mlp.gate_proj.weight",
    "feed_forward.w2.kernel": "mlp.down_proj.weight",
    "feed_forward.w3.kernel": "mlp.up_proj.weight",
}


def read_output(layout: str, folder: Path) -> Leaves:
    """Read all leaves of an output with safetensors, TensorStore or msgpack."""
    if layout == "hf":
        return read_tensors(folder)
    if layout == "init":
        return read_init(folder)
    if layout == "hf-flax":
        leaves = decode_msgpack((folder / "flax_model.msgpack").read_bytes(), "flax")
    else:
        leaves = decode_msgpack((folder / "streaming_params").read_bytes(), "easylm")
    return {".".join(path): leaf for path, leaf in leaves.items()}


def expected_output(
    layout: str, tensors: Tensors, config: Mapping[str, Any], *, scan: bool = True
) -> Leaves:
    """Assemble all leaves of an untied LLaMA in a layout. An init has stacked layers with `scan`."""
    if layout == "hf":
        return dict(tensors)
    if layout == "init":
        return _init_leaves(tensors, config, scan)
    if layout == "hf-flax":
        return _flax_leaves(tensors)
    return _easylm_leaves(tensors, config)


def read_init(folder: Path) -> Leaves:
    """Read all leaves of an OCDBT item with TensorStore."""
    base = f"file://{folder.resolve()}/"
    leaves = {}
    for key in open_database(folder.resolve()).list().result():
        name, is_array, _ = key.decode().partition("/.zarray")
        if is_array:
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            leaves[name] = ts.open({"driver": "zarr", "kvstore": store}).result().read().result()
    return leaves


def _init_leaves(tensors: Tensors, config: Mapping[str, Any], scan: bool) -> Leaves:
    width = config["hidden_size"]
    head_dim = width // config["num_attention_heads"]
    leaves = {
        "params.embed.tokens": tensors["model.embed_tokens.weight"],
        "params.final_norm.scale": tensors["model.norm.weight"],
        "params.head.weight": tensors["lm_head.weight"],
    }
    for leaf_name, name in INIT_LAYER_NAMES.items():
        stacked = np.stack(
            [tensors[f"model.layers.{n}.{name}"] for n in range(config["num_hidden_layers"])]
        )
        num_layers = len(stacked)
        if leaf_name == "attn.o.weight":
            stacked = stacked.reshape(num_layers, width, -1, head_dim)
        elif leaf_name.startswith("attn."):
            stacked = stacked.reshape(num_layers, -1, head_dim, width)
        if scan:
            leaves[f"params.layers.{leaf_name}"] = stacked
        else:
            for layer, leaf in enumerate(stacked):
                leaves[f"params.layers.{layer}.{leaf_name}"] = leaf
    return leaves


def _flax_leaves(tensors: Tensors) -> Leaves:
    """Return kernels [in, out]. Norms and the embedding keep their values."""
    leaves = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem == "model.embed_tokens":
            leaves[f"{stem}.embedding"] = tensor
        elif tensor.ndim == 2:
            leaves[f"{stem}.kernel"] = tensor.T
        else:
            leaves[name] = tensor
    return leaves


def _easylm_leaves(tensors: Tensors, config: Mapping[str, Any]) -> Leaves:
    """Return kernels [in, out], with the halves of each query and key head interleaved."""
    leaves = {
        "transformer.wte.embedding": tensors["model.embed_tokens.weight"],
        "transformer.ln_f.kernel": tensors["model.norm.weight"],
        "lm_head.kernel": tensors["lm_head.weight"].T,
    }
    for layer in range(config["num_hidden_layers"]):
        for leaf_name, name in EASYLM_LAYER_NAMES.items():
            tensor = tensors[f"model.layers.{layer}.{name}"]
            if leaf_name == "attention.wq.kernel":
                tensor = _interleaved(tensor, config["num_attention_heads"])
            elif leaf_name == "attention.wk.kernel":
                tensor = _interleaved(tensor, config["num_key_value_heads"])
            leaves[f"transformer.h.{layer}.{leaf_name}"] = tensor.T
    return leaves


def _interleaved(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from (0, 1, ..., n, n+1, ...) to (0, n, 1, n+1, ...)."""
    rows, width = tensor.shape
    halves = tensor.reshape(num_heads, 2, rows // num_heads // 2, width)
    return halves.swapaxes(1, 2).reshape(rows, width)
