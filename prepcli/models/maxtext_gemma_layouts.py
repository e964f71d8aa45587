"""Parameter trees of MaxText for Gemma 2 and 3, with changed values and groups of layers. No I/O, no jax.

Facts of MaxText 0.2.5: checkpoint_conversion/utils/param_mapping.py and models/gemma2.py, models/gemma3.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prepcli.core.json_values import HFConfig
from prepcli.models.layout_tables import LeafTable, leaf_parameters
from prepcli.models.parameters import Parameter, TreeLayout
from prepcli.models.rows import map_rows

# The head is always tied: the capped logits of MaxText need the embedding.
_LEAVES = {
    "embed.tokens": "token_embedder.embedding: vocab embed",
    "final_norm.scale": "decoder.decoder_norm.scale: embed",
}
_LAYER = {
    "attn_norm.scale": "pre_self_attention_norm.scale: embed",
    "attn.q.weight": "self_attention.query.kernel: embed heads head_dim",
    "attn.k.weight": "self_attention.key.kernel: embed kv_heads head_dim",
    "attn.v.weight": "self_attention.value.kernel: embed kv_heads head_dim",
    "attn.o.weight": "self_attention.out.kernel: heads head_dim embed",
    "attn_post_norm.scale": "post_self_attention_norm.scale: embed",
    "mlp_norm.scale": "pre_ffw_norm.scale: embed",
    "mlp.gate.weight": "mlp.wi_0.kernel: embed mlp",
    "mlp.up.weight": "mlp.wi_1.kernel: embed mlp",
    "mlp.down.weight": "mlp.wo.kernel: mlp embed",
    "mlp_post_norm.scale": "post_ffw_norm.scale: embed",
}
_QK_NORMS = {
    "attn.q_norm.scale": "self_attention.query_norm.scale: head_dim",
    "attn.k_norm.scale": "self_attention.key_norm.scale: head_dim",
}
_LAYER_PATH = "decoder.layers_{layers}"
# In Gemma 2, layer 0 of MaxText has the layers 0 (sliding window) and 1 (full attention) of Hugging Face.
_KINDS = ("local", "global")
# In Gemma 3, a scanned layer of MaxText is a group: five layers with a sliding window, and one with full attention.
_GROUP_SIZE = 6
# MaxText's norms multiply by the weight, and Gemma's by 1 + weight.
_NORM_SCALE = "{} + 1"
# MaxText's tokens have the stored embedding. Gemma multiplies it by sqrt(embed), rounded to the dtype of the model.
_EMBEDDING_SCALE = "{{}} * {dtype}(sqrt(embed))"
# MaxText's Gemma 2 does not scale the scores of attention.
_QUERY_SCALE = "{} / sqrt(query_pre_attn_scalar)"

ConfigSizes = Callable[[HFConfig], Mapping[str, int]]


def maxtext_gemma2_layouts(
    parameters: Mapping[str, Parameter], sizes: ConfigSizes
) -> dict[str, TreeLayout]:
    """Return the parameter trees of MaxText for a Gemma 2, with pairs of layers.

    Args:
        parameters: Parameters of the family.
        sizes: Function from the config to the extent of each atom.

    Returns:
        Dict with the keys "maxtext" and "maxtext-unscanned".
    """

    def has_pairs(config: HFConfig) -> bool:
        return sizes(config)["layers"] >= len(_KINDS)

    def has_scaled_pairs(config: HFConfig) -> bool:
        return has_pairs(config) and "query_pre_attn_scalar" in sizes(config)

    leaves = _outer_leaves(parameters, root_dtype="float32")
    for kind in _KINDS:
        # E.g. self_attention_local.query.kernel
        table = {path: line.replace(".", f"_{kind}.", 1) for path, line in _LAYER.items()}
        leaves |= _layer_leaves(
            parameters,
            table,
            layer_path=_LAYER_PATH,
            index_list=kind,
            condition=has_pairs,
        )
    for path, leaf in leaves.items():
        if path.endswith(".query.kernel"):
            scaled = map_rows(leaf, _QUERY_SCALE.format)
            leaves[path] = dataclasses.replace(scaled, condition=has_scaled_pairs)

    def pairs(config: HFConfig) -> dict[str, Sequence[int]]:
        # The last one of an odd number of layers has no pair, and no leaf.
        num_paired = sizes(config)["layers"] // len(_KINDS) * len(_KINDS)
        return {kind: range(i, num_paired, len(_KINDS)) for i, kind in enumerate(_KINDS)}

    unscanned = TreeLayout(leaves, allows_tied_head=True, layer_numbers=pairs)
    scanned = dataclasses.replace(unscanned, stacked_name="layers", stack_axis=1)
    return {"maxtext": scanned, "maxtext-unscanned": unscanned}


def maxtext_gemma3_layouts(
    parameters: Mapping[str, Parameter], sizes: ConfigSizes
) -> dict[str, TreeLayout]:
    """Return the parameter trees of MaxText for a Gemma 3: groups of layers and a remainder, or one leaf per layer.

    Args:
        parameters: Parameters of the family.
        sizes: Function from the config to the extent of each atom.

    Returns:
        Dict with the keys "maxtext" and "maxtext-unscanned".
    """
    layer = _LAYER | _QK_NORMS
    outer = _outer_leaves(parameters, root_dtype="bfloat16")
    plain = leaf_parameters(parameters, {}, layer, layer_path=_LAYER_PATH)
    unscanned = TreeLayout(outer | _with_offset_norms(plain), allows_tied_head=True)
    grouped = dict(outer)
    for position in range(_GROUP_SIZE):
        grouped |= _layer_leaves(
            parameters,
            layer,
            layer_path=f"decoder.{{layers}}.layers_{position}",
            index_list=f"group_{position}",
            condition=lambda config: sizes(config)["layers"] >= _GROUP_SIZE,
        )
        # The default binds the position of this turn. A closure would read the last one of the loop.
        grouped |= _layer_leaves(
            parameters,
            layer,
            layer_path=f"decoder.layers_remainder.layers_{position}",
            index_list=f"remainder_{position}",
            condition=lambda config, position=position: (
                sizes(config)["layers"] % _GROUP_SIZE > position
            ),
        )

    def groups(config: HFConfig) -> dict[str, Sequence[int]]:
        return _group_numbers(sizes(config)["layers"])

    scanned = TreeLayout(
        grouped,
        stacked_name="layers",
        stack_axis=1,
        allows_tied_head=True,
        layer_numbers=groups,
    )
    return {"maxtext": scanned, "maxtext-unscanned": unscanned}


def _group_numbers(num_layers: int) -> dict[str, Sequence[int]]:
    """Return the numbers of the layers in each position of the groups, and of each layer after the last group.

    >>> numbers = _group_numbers(14)
    >>> list(numbers["group_5"]), list(numbers["remainder_1"])
    ([5, 11], [13])
    """
    num_grouped = num_layers // _GROUP_SIZE * _GROUP_SIZE
    numbers: dict[str, Sequence[int]] = {}
    for position in range(_GROUP_SIZE):
        numbers[f"group_{position}"] = range(position, num_grouped, _GROUP_SIZE)
    for layer in range(num_grouped, num_layers):
        numbers[f"remainder_{layer - num_grouped}"] = [layer]
    return numbers


def _outer_leaves(parameters: Mapping[str, Parameter], *, root_dtype: str) -> dict[str, Parameter]:
    """Return the leaves outside of the layers, with their scales."""
    leaves = leaf_parameters(parameters, _LEAVES, {}, layer_path=_LAYER_PATH)
    path = "token_embedder.embedding"
    leaves[path] = map_rows(leaves[path], _EMBEDDING_SCALE.format(dtype=root_dtype).format)
    return _with_offset_norms(leaves)


def _layer_leaves(
    parameters: Mapping[str, Parameter],
    table: LeafTable,
    *,
    layer_path: str,
    index_list: str,
    condition: Callable[[HFConfig], bool],
) -> dict[str, Parameter]:
    """Return the leaves of the layers in an index list."""
    leaves: dict[str, Parameter] = {}
    for path, leaf in leaf_parameters(parameters, {}, table, layer_path=layer_path).items():
        listed = map_rows(leaf, partial(_list_layers, index_list=index_list))
        leaves[path] = dataclasses.replace(listed, condition=condition)
    return _with_offset_norms(leaves)


def _list_layers(row: str, index_list: str) -> str:
    """Return a row of the layers in an index list."""
    return row.replace("{layers}", f"{{layers@{index_list}}}")


def _with_offset_norms(leaves: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return leaves with 1 added to the weights of norms."""
    changed = dict(leaves)
    for path, leaf in leaves.items():
        if path.endswith(".scale"):
            changed[path] = map_rows(leaf, _NORM_SCALE.format)
    return changed
