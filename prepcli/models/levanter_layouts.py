"""Parameter trees of Levanter: the leaves of its Haliax modules. No I/O, no jax.

Facts of marin-levanter 0.2.20: models/*.py. Modules have the names of Hugging Face. A leaf has the axes of the tensor,
with the heads as axes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from prepcli.models.parameters import ALWAYS, Family, MakeTrees, Parameter, TreeLayout
from prepcli.models.rows import map_rows, split_dims, split_row

_EMBEDDINGS = {
    "embed.tokens": "embeddings.token_embeddings.weight",
    "embed.positions": "embeddings.position_embeddings.weight",
}
_HEAD = "head.weight"
_QUERIES = "layers.attn.q"
_LAYER = "{layers}."
_EXPERT = ".{experts}"
# Flags of dropout modules, e.g. `transformer.blocks.stacked.attn.inference`.
_NON_PARAMETERS = (".inference",)


def levanter_layouts(
    family: Family, *, layers_module: str = "layers", has_head: bool = True
) -> dict[str, TreeLayout]:
    """Return the parameter trees of Levanter, with stacked layers and with one leaf per layer.

    Args:
        family: The family.
        layers_module: Name of the module with the layers.
        has_head: Whether the class has a leaf for an untied head.

    Returns:
        Dict with the keys "levanter" and "levanter-unscanned".
    """
    module_path = f"transformer.{layers_module}"
    stacked = _leaves(family.parameters, f"{module_path}.{{layers}}", has_head=has_head)
    single = _leaves(family.parameters, f"{module_path}.blocks.{{layers}}", has_head=has_head)
    return {
        "levanter": TreeLayout(
            stacked,
            stacked_name="stacked",
            stack_axis=0,
            allows_tied_head=True,
            non_parameters=_NON_PARAMETERS,
        ),
        "levanter-unscanned": TreeLayout(
            single, allows_tied_head=True, non_parameters=_NON_PARAMETERS
        ),
    }


def _leaves(
    parameters: Mapping[str, Parameter], layer_path: str, *, has_head: bool
) -> dict[str, Parameter]:
    """Return the parameters by their paths in the tree."""
    has_groups = any("kv_heads" in parameter.row for parameter in parameters.values())
    leaves: dict[str, Parameter] = {}
    for path, parameter in parameters.items():
        # One setting of Levanter adds biases to all matrices. No such model has the names of Hugging Face.
        is_optional_bias = path.endswith(".bias") and parameter.condition != ALWAYS
        if is_optional_bias or (path == _HEAD and not has_head):
            continue
        leaf = _with_leaf_dims(parameter)
        if has_groups and path.startswith(_QUERIES):
            leaf = map_rows(leaf, _split_query_heads)
        leaves[_leaf_path(path, parameter, layer_path)] = leaf
    return leaves


def _leaf_path(path: str, parameter: Parameter, layer_path: str) -> str:
    """Return the path of a leaf, e.g. `transformer.layers.{layers}.mlp.up_proj.weight`."""
    if path in _EMBEDDINGS:
        return _EMBEDDINGS[path]
    _, tensor, _ = split_row(parameter.row)
    if path == _HEAD:
        return tensor
    _, _, module = tensor.partition(_LAYER)
    if not module:
        return f"transformer.{tensor}"
    return f"{layer_path}.{module.replace(_EXPERT, '')}"


def _with_leaf_dims(parameter: Parameter) -> Parameter:
    """Return a parameter with the dims of its leaf in Levanter on the left side of its rows."""
    leaf, tensor, dims = split_row(parameter.row)
    if _EXPERT in tensor:
        # An expert's matrix is [out, in] in the file. The experts of a layer are one leaf [experts, in, out].
        *_, output_dim, input_dim = split_dims(leaf)
        leaf_dims = f"experts {input_dim} {output_dim}"
    else:
        leaf_dims = _without_part(re.sub(r"[()]", "", dims))

    def replace_leaf(row: str) -> str:
        _, tensor, dims = split_row(row)
        return f"{leaf_dims} <- {tensor}: {_without_part(dims)}"

    return map_rows(parameter, replace_leaf)


def _without_part(dims: str) -> str:
    """Return the dims of a whole fused tensor.

    >>> _without_part("embed (qkv=0 heads head_dim)")
    'embed (qkv heads head_dim)'
    """
    return re.sub(r"\bqkv=\d+", "qkv", dims)


def _split_query_heads(row: str) -> str:
    """Return a row of queries with two axes for its heads: key and value heads, and queries for each of them."""
    return re.sub(r"\bheads\b", "kv_heads query_group", row)


def _gpt2_tree(family: Family) -> dict[str, TreeLayout]:
    # The class has only stacked layers, and no head.
    layouts = levanter_layouts(family, layers_module="blocks", has_head=False)
    return {"levanter": layouts["levanter"]}


def _olmo3_tree(family: Family) -> dict[str, TreeLayout]:
    # Levanter stacks layers of one type. The layers of OLMo 3 are of two.
    layouts = levanter_layouts(family, layers_module="_layers")
    return {"levanter-unscanned": layouts["levanter-unscanned"]}


# Model type -> its trees
TREES: Mapping[str, MakeTrees] = {
    "gpt2": _gpt2_tree,
    "llama": levanter_layouts,
    "mistral": levanter_layouts,
    "mixtral": levanter_layouts,
    "qwen2": levanter_layouts,
    "qwen3": levanter_layouts,
    "qwen3_moe": levanter_layouts,
    "gemma": levanter_layouts,
    "gemma2": levanter_layouts,
    "gemma3_text": levanter_layouts,
    "olmo2": levanter_layouts,
    "olmo3": _olmo3_tree,
}
