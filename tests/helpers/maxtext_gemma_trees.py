"""Parameter trees of MaxText 0.2.5 for Gemma 2 and 3, assembled with NumPy from the tensors of a Hugging Face folder.

The formulas are those of MaxText's checkpoint_conversion/utils/param_mapping.py. Nothing here uses prep's axis maps.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.helpers.trainer_trees import Config, Leaves, Tensors, heads_of

NORMS = {
    "input_layernorm": "pre_self_attention_norm",
    "post_attention_layernorm": "post_self_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "self_attention.query_norm",
    "self_attn.k_norm": "self_attention.key_norm",
}
PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
MLP = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}


def gemma_leaves(tensors: Tensors, config: Config, *, scan: bool) -> Leaves:
    """Return the leaves of MaxText for a Gemma 2 or 3."""
    is_gemma2 = config["model_type"] == "gemma2"
    root_dtype = np.float32 if is_gemma2 else ml_dtypes.bfloat16
    normalizer = root_dtype(config["hidden_size"] ** 0.5)
    embedding = tensors["model.embed_tokens.weight"]
    leaves: Leaves = {
        "token_embedder.embedding": (embedding * normalizer).astype(embedding.dtype),
        "decoder.decoder_norm.scale": _offset(tensors["model.norm.weight"]),
    }
    layers: list[Leaves] = []
    for number in range(config["num_hidden_layers"]):
        layers.append(_layer_leaves(tensors, config, number))
    if is_gemma2:
        leaves |= _gemma2_layers(layers, scan=scan)
    elif scan:
        leaves |= _gemma3_groups(layers)
    else:
        leaves |= _numbered("decoder.layers_", layers)
    return {f"params.params.{path}": leaf for path, leaf in leaves.items()}


def _offset(weight: np.ndarray) -> np.ndarray:
    """Return the weight of a norm in MaxText: `scale_rmsnorm_layer`."""
    return (weight + 1.0).astype(weight.dtype)


def _layer_leaves(tensors: Tensors, config: Config, number: int) -> Leaves:
    """Return the leaves of one layer of Hugging Face, by their paths in the layer."""
    heads, kv_heads, head_dim = heads_of(config)
    prefix = f"model.layers.{number}."
    leaves: Leaves = {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            continue
        module = name.removeprefix(prefix).removesuffix(".weight")
        last = module.rpartition(".")[2]
        if module in NORMS:
            leaves[f"{NORMS[module]}.scale"] = _offset(tensor)
        elif last in MLP:
            leaves[f"mlp.{MLP[last]}.kernel"] = tensor.T
        elif last == "o_proj":
            leaves["self_attention.out.kernel"] = tensor.T.reshape(heads, head_dim, -1)
        else:
            num_heads = heads if last == "q_proj" else kv_heads
            kernel = tensor.T.reshape(-1, num_heads, head_dim)
            if last == "q_proj" and config["model_type"] == "gemma2":
                depth_scale = np.float32(1 / np.sqrt(config["query_pre_attn_scalar"]))
                kernel = (kernel * depth_scale).astype(tensor.dtype)
            leaves[f"self_attention.{PROJECTIONS[last]}.kernel"] = kernel
    return leaves


def _gemma2_layers(layers: list[Leaves], *, scan: bool) -> Leaves:
    """Return pairs of layers: `layers_0` of MaxText has the layers 0 and 1 of Hugging Face."""
    pairs: list[Leaves] = []
    for number in range(0, len(layers), 2):
        pair: Leaves = {}
        for kind, layer in zip(("local", "global"), layers[number : number + 2], strict=True):
            for path, leaf in layer.items():
                pair[path.replace(".", f"_{kind}.", 1)] = leaf
        pairs.append(pair)
    if scan:
        return _stacked("decoder.layers.", pairs)
    return _numbered("decoder.layers_", pairs)


def _gemma3_groups(layers: list[Leaves]) -> Leaves:
    """Return groups of six layers, and the remaining layers."""
    num_grouped = len(layers) - len(layers) % 6
    leaves = _numbered("decoder.layers_remainder.layers_", layers[num_grouped:])
    if num_grouped:
        for position in range(6):
            leaves |= _stacked(f"decoder.layers.layers_{position}.", layers[position:num_grouped:6])
    return leaves


def _stacked(prefix: str, layers: list[Leaves]) -> Leaves:
    """Return the leaves of layers, stacked on axis 1."""
    leaves: Leaves = {}
    for path in layers[0]:
        leaves[prefix + path] = np.stack([layer[path] for layer in layers], axis=1)
    return leaves


def _numbered(prefix: str, layers: list[Leaves]) -> Leaves:
    """Return the leaves of layers, with their numbers in the paths."""
    leaves: Leaves = {}
    for number, layer in enumerate(layers):
        for path, leaf in layer.items():
            leaves[f"{prefix}{number}.{path}"] = leaf
    return leaves
