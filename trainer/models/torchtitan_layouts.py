"""State dicts of torchtitan, and of Meta's LLaMA files. No I/O, no jax.

Facts of torchtitan 0.3.0: models/llama3/state_dict_adapter.py and models/qwen3/state_dict_adapter.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.models.layout_tables import LAYERS_PREFIX
from trainer.models.parameters import Parameter, TreeLayout
from trainer.models.rows import map_rows, split_row

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
# Names of Meta's LLaMA files, and of torchtitan before version 0.3.
META_NAMES = {
    "output.weight": "lm_head.weight",
    **{
        f"{_LAYER_PATH}attention.w{letter}.weight": f"{_LAYER_PATH}attention.qkv_linear.w{letter}.weight"
        for letter in "qkv"
    },
}
# Entries of a training state other than the parameters.
_STATE_KEYS = ("optimizer", "lr_scheduler", "dataloader", "train_state")
# The router adds this buffer to its scores to balance the experts. Files of Hugging Face have none.
_BALANCING_BIAS = ".moe.expert_bias_E"


def torchtitan_layout(
    parameters: Mapping[str, Parameter],
    *,
    interleaves_heads: bool = False,
    has_experts: bool = False,
) -> dict[str, TreeLayout]:
    """Return the state dict of torchtitan. Its matrices are those of Hugging Face files.

    Args:
        parameters: Parameters of the family.
        interleaves_heads: Whether the two elements of a rotated pair are adjacent in the heads of queries and keys.
            Otherwise they are half a head apart, as in Hugging Face files.
        has_experts: Whether all layers have experts.

    Returns:
        Dict with the key "torchtitan".
    """
    layer = _LAYER | _EXPERTS if has_experts else _LAYER
    leaves: dict[str, Parameter] = {}
    for path, parameter in parameters.items():
        layer_path = path.removeprefix(LAYERS_PREFIX)
        if path in _LEAVES:
            leaves[_LEAVES[path]] = _with_tensor_dims(parameter)
        elif layer_path in layer:
            leaf = _with_tensor_dims(parameter)
            if interleaves_heads and layer_path in ("attn.q.weight", "attn.k.weight"):
                leaf = map_rows(leaf, _interleave_rotary_pairs)
            leaves[f"{_LAYER_PATH}{layer[layer_path]}"] = leaf
    layout = TreeLayout(
        leaves,
        path_aliases=META_NAMES,
        non_parameters=(_BALANCING_BIAS,),
        state_keys=_STATE_KEYS,
    )
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
