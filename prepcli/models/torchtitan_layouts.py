"""State dicts of torchtitan, and of Meta's LLaMA files. No I/O, no jax.

Facts of torchtitan 0.3.0: models/{llama3,qwen3,deepseek_v3,gpt_oss}/state_dict_adapter.py and common/moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from prepcli.algebra.axis_map import DENSE_LAYERS, LAYER_NUMBER, LAYERS, SPARSE_LAYERS
from prepcli.models.parameters import Family, MakeTrees, Parameter, TreeLayout
from prepcli.models.rows import map_rows, split_row, unless_false

TORCHTITAN_LAYOUT = "torchtitan"
_LEAVES = {
    "embed.tokens": "tok_embeddings.weight",
    "final_norm.scale": "norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.scale": "attention_norm.weight",
    "attn.q.weight": "attention.qkv_linear.wq.weight",
    "attn.k.weight": "attention.qkv_linear.wk.weight",
    "attn.v.weight": "attention.qkv_linear.wv.weight",
    "attn.o.weight": "attention.wo.weight",
    "attn.q_norm.scale": "attention.q_norm.weight",
    "attn.k_norm.scale": "attention.k_norm.weight",
    "mlp_norm.scale": "ffn_norm.weight",
    # The MLP is w2(silu(w1 x) * w3 x).
    "mlp.gate.weight": "feed_forward.w1.weight",
    "mlp.down.weight": "feed_forward.w2.weight",
    "mlp.up.weight": "feed_forward.w3.weight",
}
_EXPERTS = {
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.gate.weight": "moe.routed_experts.inner_experts.w1_EFD",
    "mlp.down.weight": "moe.routed_experts.inner_experts.w2_EDF",
    "mlp.up.weight": "moe.routed_experts.inner_experts.w3_EFD",
}
_LAYER_PATH = "layers.{layers}."
_DEEPSEEK_LAYER = {
    "attn_norm.scale": "attention_norm.weight",
    "attn.q.weight": "attention.wq.weight",
    "attn.q_down.weight": "attention.wq_a.weight",
    "attn.q_latent_norm.scale": "attention.q_norm.weight",
    "attn.q_up.weight": "attention.wq_b.weight",
    "attn.kv_latent_norm.scale": "attention.kv_norm.weight",
    "attn.kv_up.weight": "attention.wkv_b.weight",
    "attn.o.weight": "attention.wo.weight",
    "mlp_norm.scale": "ffn_norm.weight",
}
# The latent of keys and values, and the rotated key, are one matrix.
_DEEPSEEK_LATENT = (
    "kv_latent embed <- layers.{layers}.self_attn.kv_a_proj_with_mqa.weight: kv_latent embed"
)
_DENSE_MLP = {path: name for path, name in _LAYER.items() if path.startswith("mlp.")}
_CORRECTED_EXPERTS = {
    **_EXPERTS,
    "mlp.router.correction.bias": "moe.expert_bias_E",
    "mlp.shared.gate.weight": "moe.shared_experts.w1.weight",
    "mlp.shared.down.weight": "moe.shared_experts.w2.weight",
    "mlp.shared.up.weight": "moe.shared_experts.w3.weight",
}
_GPT_OSS_LAYER = {
    **{path: name for path, name in _LAYER.items() if not path.startswith("mlp.")},
    "attn.q.bias": "attention.qkv_linear.wq.bias",
    "attn.k.bias": "attention.qkv_linear.wk.bias",
    "attn.v.bias": "attention.qkv_linear.wv.bias",
    "attn.o.bias": "attention.wo.bias",
    "attn.sinks.bias": "attention.sinks",
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.router.bias": "moe.router.gate.bias",
}
# Gate and up alternate in the rows of one matrix, as in the columns of Hugging Face. The names are those of the
# model's parameters. The adapter of torchtitan lacks their suffixes.
_GPT_OSS_EXPERTS = {
    "mlp1_weight_EGD": "experts (mlp gate_up) embed <- gate_up_proj: experts embed (mlp gate_up)",
    "mlp1_bias_EG": "experts (mlp gate_up) <- gate_up_proj_bias: experts (mlp gate_up)",
    "mlp2_weight_EDF": "experts embed mlp <- down_proj: experts mlp embed",
    "mlp2_bias_ED": "experts embed <- down_proj_bias: experts embed",
}
# Name of the head in Meta's LLaMA files, and in torchtitan before version 0.3.
_HEAD_NAME = {"output.weight": "lm_head.weight"}
# All names of these files.
META_NAMES = {
    **_HEAD_NAME,
    **{
        f"{_LAYER_PATH}attention.w{letter}.weight": f"{_LAYER_PATH}attention.qkv_linear.w{letter}.weight"
        for letter in "qkv"
    },
}
# Entries of a training state other than the parameters.
_STATE_KEYS = ("optimizer", "lr_scheduler", "dataloader", "train_state")
# The router adds this buffer to its scores to balance the experts. It starts at zero. Of the families of Hugging Face,
# only DeepSeek-V3 has a tensor for it.
_BALANCING_BIAS = "moe.expert_bias_E"
_ZERO_BIASES = {f"{_LAYER_PATH}{_BALANCING_BIAS}": ("experts",)}


def torchtitan_layout(
    family: Family,
    *,
    interleaves_heads: bool = False,
    has_experts: bool = False,
) -> dict[str, TreeLayout]:
    """Return the state dict of torchtitan. Its matrices are those of Hugging Face files.

    Args:
        family: The family.
        interleaves_heads: Whether the two elements of a rotated pair are adjacent in the heads of queries and keys.
            Otherwise they are half a head apart, as in Hugging Face files.
        has_experts: Whether all layers have experts.

    Returns:
        Dict with the key "torchtitan".
    """
    layer = _LAYER | _EXPERTS if has_experts else _LAYER
    parameters = family.parameters
    leaves = _outer_leaves(parameters) | _layer_leaves(parameters, LAYERS, layer)
    if interleaves_heads:
        for name in ("wq", "wk"):
            path = f"{_LAYER_PATH}attention.qkv_linear.{name}.weight"
            leaves[path] = map_rows(leaves[path], _interleave_rotary_pairs)
    return _with_zero_biases(leaves) if has_experts else _as_layout(leaves)


def torchtitan_deepseek_layout(family: Family) -> dict[str, TreeLayout]:
    """Return the state dict of torchtitan for a DeepSeek-V3, with dense layers before the layers with experts."""
    parameters = family.parameters
    # The two elements of a rotated pair are adjacent in the heads. torchtitan has no other order.
    has_adjacent_pairs = unless_false("rope_interleave")
    leaves = {
        **_outer_leaves(parameters),
        **_layer_leaves(parameters, LAYERS, _DEEPSEEK_LAYER | _CORRECTED_EXPERTS),
        **_layer_leaves(parameters, SPARSE_LAYERS, _CORRECTED_EXPERTS),
        **_layer_leaves(parameters, DENSE_LAYERS, _DENSE_MLP),
        f"{_LAYER_PATH}attention.wkv_a.weight": Parameter(_DEEPSEEK_LATENT, has_adjacent_pairs),
    }
    # `attention.wq.weight`, an old name of LLaMA's queries, is a present name of DeepSeek's.
    return _as_layout(leaves, path_aliases=_HEAD_NAME, layer_numbers=family.layer_numbers)


def torchtitan_gpt_oss_layout(family: Family) -> dict[str, TreeLayout]:
    """Return the state dict of torchtitan for a GPT-OSS, as a dict with the key "torchtitan"."""
    parameters = family.parameters
    leaves = _outer_leaves(parameters) | _layer_leaves(parameters, LAYERS, _GPT_OSS_LAYER)
    for name, row in _GPT_OSS_EXPERTS.items():
        path = f"{_LAYER_PATH}moe.routed_experts.inner_experts.{name}"
        leaves[path] = Parameter(row.replace("<- ", "<- layers.{layers}.mlp.experts."))
    return _with_zero_biases(leaves)


def _outer_leaves(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the leaves outside of the layers."""
    return {name: _with_tensor_dims(parameters[path]) for path, name in _LEAVES.items()}


def _layer_leaves(
    parameters: Mapping[str, Parameter], group: str, names: Mapping[str, str]
) -> dict[str, Parameter]:
    """Return the leaves of a group of layers.

    Args:
        parameters: Parameters of the family.
        group: Axis (atom) of the layers, and first part of their paths.
        names: Path of a parameter in a layer -> name in a layer of torchtitan.
    """
    layer_path = _LAYER_PATH if group == LAYERS else f"layers.{{{LAYER_NUMBER}}}."
    leaves: dict[str, Parameter] = {}
    for path, name in names.items():
        if f"{group}.{path}" in parameters:
            leaves[f"{layer_path}{name}"] = _with_tensor_dims(parameters[f"{group}.{path}"])
    return leaves


def _with_zero_biases(leaves: Mapping[str, Parameter]) -> dict[str, TreeLayout]:
    """Return the layout of a model with experts, if its files have no bias to balance them."""
    return _as_layout(leaves, non_parameters=(f".{_BALANCING_BIAS}",), zero_leaves=_ZERO_BIASES)


def _as_layout(
    leaves: Mapping[str, Parameter],
    path_aliases: Mapping[str, str] = META_NAMES,
    **fields: Any,
) -> dict[str, TreeLayout]:
    """Return the layout of some leaves, as a dict with its name."""
    layout = TreeLayout(leaves, path_aliases=path_aliases, state_keys=_STATE_KEYS, **fields)
    return {TORCHTITAN_LAYOUT: layout}


def _with_tensor_dims(parameter: Parameter) -> Parameter:
    """Return a parameter with the dims of its tensor on the left side of its rows. Experts are stacked first."""
    _, tensor, leaf_dims = split_row(parameter.row)
    if "{experts}" in tensor:
        leaf_dims = f"experts {leaf_dims}"

    def replace_leaf(row: str) -> str:
        _, tensor, dims = split_row(row)
        return f"{leaf_dims} <- {tensor}: {dims}"

    return map_rows(parameter, replace_leaf)


def _interleave_rotary_pairs(row: str) -> str:
    """Return the row of a query or key matrix with adjacent rotary pairs.

    >>> _interleave_rotary_pairs("(heads head_dim) embed <- q.weight: (heads head_dim) embed")
    '(heads half two) embed <- q.weight: (heads two half) embed'
    """
    leaf, tensor, dims = split_row(row)
    # With 4 elements per head, the tensor has the pairs (0, 2) and (1, 3). The leaf has the order 0, 2, 1, 3.
    leaf = leaf.replace("head_dim", "half two")
    dims = dims.replace("head_dim", "two half")
    return f"{leaf} <- {tensor}: {dims}"


# Model type -> its tree
TREES: Mapping[str, MakeTrees] = {
    "llama": partial(torchtitan_layout, interleaves_heads=True),
    "qwen3": torchtitan_layout,
    # torchtitan has no layers with a dense MLP in this family. An export of a model with some is refused.
    "qwen3_moe": partial(torchtitan_layout, has_experts=True),
    "deepseek_v3": torchtitan_deepseek_layout,
    "gpt_oss": torchtitan_gpt_oss_layout,
}
