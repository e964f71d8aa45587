"""Parameter trees of JAX trainers with Orbax checkpoints: Tunix and MaxText. No I/O, no jax.

A layout is a table with one line per parameter: its path in prep's tree, and its leaf in the other tree with the
leaf's dims. The tensors on the right side of the rows are those of the family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prepcli.core.json_values import HFConfig
from prepcli.models.declaration import map_rows
from prepcli.models.layouts import interleave_rotary_pairs, renamed_leaf
from prepcli.models.parameters import (
    NEVER,
    Condition,
    Family,
    MakeTrees,
    Parameter,
    TreeLayout,
)
from prepcli.models.rope_config import has_llama3_scaling

# Path of a parameter in prep's tree -> its leaf and dims in the other tree, e.g. `lm_head.w: embed vocab`.
LeafTable = Mapping[str, str]

LAYERS_PREFIX = "layers."


def leaf_parameters(
    parameters: Mapping[str, Parameter], leaves: LeafTable, layer: LeafTable, *, layer_path: str
) -> dict[str, Parameter]:
    """Return the parameters of a tree by their paths in it. Parameters without a line in the tables are omitted.

    Args:
        parameters: Parameters of the family, by their paths in prep's tree.
        leaves: Leaves outside of the layers.
        layer: Leaves of a layer, with paths relative to a layer in both trees.
        layer_path: Path of a layer in the other tree, with `{layers}` in place of its number.
    """
    renamed: dict[str, Parameter] = {}
    for path, parameter in parameters.items():
        if path in leaves:
            leaf_path, leaf = renamed_leaf(parameter, leaves[path])
        elif path.removeprefix(LAYERS_PREFIX) in layer:
            line = layer[path.removeprefix(LAYERS_PREFIX)]
            leaf_path, leaf = renamed_leaf(parameter, f"{layer_path}.{line}")
        else:
            continue
        renamed[leaf_path] = leaf
    return renamed


# Facts of Tunix 0.1.7: models/llama3/params.py, models/qwen2/params.py and models/qwen3/params.py.
_TUNIX_LEAVES = {
    "embed.tokens": "embedder.input_embedding: vocab embed",
    "final_norm.scale": "final_norm.w: embed",
    "head.weight": "lm_head.w: embed vocab",
}
# The optimizer state of `nnx.Optimizer`, which is in an item of its own.
_TUNIX_STATE_KEYS = ("opt_state", "step")
_TUNIX_LAYER = {
    "attn_norm.scale": "input_layernorm.w: embed",
    "attn.q.weight": "attn.q_proj.w: embed heads head_dim",
    "attn.k.weight": "attn.k_proj.w: embed kv_heads head_dim",
    "attn.v.weight": "attn.v_proj.w: embed kv_heads head_dim",
    "attn.o.weight": "attn.o_proj.w: heads head_dim embed",
    "mlp_norm.scale": "post_attention_layernorm.w: embed",
    "mlp.gate.weight": "mlp.gate_proj.kernel: embed mlp",
    "mlp.up.weight": "mlp.up_proj.kernel: embed mlp",
    "mlp.down.weight": "mlp.down_proj.kernel: mlp embed",
}
_TUNIX_QKV_BIASES = {
    "attn.q.bias": "attn.q_bias: (heads head_dim)",
    "attn.k.bias": "attn.k_bias: (kv_heads head_dim)",
    "attn.v.bias": "attn.v_bias: (kv_heads head_dim)",
}
_TUNIX_QK_NORMS = {
    "attn.q_norm.scale": "attn.q_norm.w: head_dim",
    "attn.k_norm.scale": "attn.k_norm.w: head_dim",
}


_TUNIX_EXPERTS = {
    "mlp.router.weight": "mlp.router.kernel: embed experts",
    "mlp.gate.weight": "mlp.gate_proj: experts embed mlp",
    "mlp.up.weight": "mlp.up_proj: experts embed mlp",
    "mlp.down.weight": "mlp.down_proj: experts mlp embed",
}
# Facts of Tunix 0.1.7: models/gemma/model.py and models/gemma3/model.py. Some leaves stack several projections.
_TUNIX_GEMMA_LEAVES = {
    "embed.tokens": "embedder.input_embedding: vocab embed",
    "final_norm.scale": "final_norm.scale: embed",
}
_TUNIX_GEMMA_LAYER = {
    "attn_norm.scale": "pre_attention_norm.scale: embed",
    "attn.o.weight": "attn.attn_vec_einsum.w: heads head_dim embed",
    "attn.q_norm.scale": "attn._query_norm.scale: head_dim",
    "attn.k_norm.scale": "attn._key_norm.scale: head_dim",
    "mlp_norm.scale": "pre_ffw_norm.scale: embed",
    "mlp_post_norm.scale": "post_ffw_norm.scale: embed",
    "mlp.gate.weight": "mlp.gate_proj.kernel: embed mlp",
    "mlp.up.weight": "mlp.up_proj.kernel: embed mlp",
    "mlp.down.weight": "mlp.down_proj.kernel: mlp embed",
}
_PROJECTION = "layers.{{layers}}.self_attn.{name}_proj.weight: ({heads} head_dim) embed"
_TUNIX_GEMMA_LAYER_PATH = "layers.{layers}"

# Facts of MaxText 0.2.5: checkpoint_conversion/utils/param_mapping.py. Kernels are [in, out].
_LAYER_PATH = "decoder.layers_{layers}"
_MAXTEXT_LEAVES = {
    "embed.tokens": "token_embedder.embedding: vocab embed",
    "final_norm.scale": "decoder.decoder_norm.scale: embed",
}
_MAXTEXT_HEAD = {"head.weight": "decoder.logits_dense.kernel: embed vocab"}
_MAXTEXT_ATTENTION = {
    "attn.q.weight": "self_attention.query.kernel: embed heads head_dim",
    "attn.k.weight": "self_attention.key.kernel: embed kv_heads head_dim",
    "attn.v.weight": "self_attention.value.kernel: embed kv_heads head_dim",
    "attn.o.weight": "self_attention.out.kernel: heads head_dim embed",
}
_MAXTEXT_BIASES = {
    "attn.q.bias": "self_attention.query.bias: heads head_dim",
    "attn.k.bias": "self_attention.key.bias: kv_heads head_dim",
    "attn.v.bias": "self_attention.value.bias: kv_heads head_dim",
}
_MAXTEXT_QK_NORMS = {
    "attn.q_norm.scale": "self_attention.query_norm.scale: head_dim",
    "attn.k_norm.scale": "self_attention.key_norm.scale: head_dim",
}
_MAXTEXT_NORMS = {
    "attn_norm.scale": "pre_self_attention_layer_norm.scale: embed",
    "mlp_norm.scale": "post_self_attention_layer_norm.scale: embed",
}
_MAXTEXT_MLP = {
    "mlp.gate.weight": "mlp.wi_0.kernel: embed mlp",
    "mlp.up.weight": "mlp.wi_1.kernel: embed mlp",
    "mlp.down.weight": "mlp.wo.kernel: mlp embed",
}
_MAXTEXT_EXPERTS = {
    "mlp.router.weight": "{module}.gate.kernel: embed experts",
    "mlp.gate.weight": "{module}.wi_0: experts embed mlp",
    "mlp.up.weight": "{module}.wi_1: experts embed mlp",
    "mlp.down.weight": "{module}.wo: experts mlp embed",
}
# In most models of MaxText, attention does not divide by sqrt(head_dim). The kernel of the queries is divided instead.
_SCALED_QUERIES = "{} / sqrt(head_dim)"


def tunix_layout(
    family: Family,
    *,
    qkv_biases: bool = False,
    qk_norms: bool = False,
    has_experts: bool = False,
) -> dict[str, TreeLayout]:
    """Return the parameter tree of Tunix for a family with the names of LLaMA.

    Args:
        family: The family.
        qkv_biases: Whether the class in Tunix has biases of queries, keys and values.
        qk_norms: Whether it has norms of queries and keys.
        has_experts: Whether all layers have experts.
    """
    layer = dict(_TUNIX_LAYER)
    if has_experts:
        layer |= _TUNIX_EXPERTS
    if qkv_biases:
        layer |= _TUNIX_QKV_BIASES
    if qk_norms:
        layer |= _TUNIX_QK_NORMS
    leaves = leaf_parameters(family.parameters, _TUNIX_LEAVES, layer, layer_path="layers.{layers}")
    return {"tunix": TreeLayout(leaves, allows_tied_head=True, state_keys=_TUNIX_STATE_KEYS)}


def tunix_gemma_layout(family: Family, *, post_attention_norm: str = "") -> dict[str, TreeLayout]:
    """Return the parameter tree of Tunix for a Gemma 1, 2 or 3.

    `post_attention_norm` is the name of the norm after the attention, or "" if there is none.
    """
    layer = dict(_TUNIX_GEMMA_LAYER)
    if post_attention_norm:
        layer["attn_post_norm.scale"] = f"{post_attention_norm}.scale: embed"
    leaves = leaf_parameters(
        family.parameters, _TUNIX_GEMMA_LEAVES, layer, layer_path=_TUNIX_GEMMA_LAYER_PATH
    )

    def has_equal_heads(config: HFConfig) -> bool:
        axis_sizes = family.sizes(config)
        return axis_sizes["heads"] == axis_sizes["kv_heads"]

    def has_grouped_heads(config: HFConfig) -> bool:
        return not has_equal_heads(config)

    attention = f"{_TUNIX_GEMMA_LAYER_PATH}.attn"
    queries = _PROJECTION.format(name="q", heads="heads")
    keys_values = _PROJECTION.format(name="{kv of k v}", heads="kv_heads")
    all_three = _PROJECTION.format(name="{qkv of q k v}", heads="heads")
    leaves |= {
        f"{attention}.q_einsum.w": Parameter(
            f"heads embed head_dim <- {queries}", has_grouped_heads
        ),
        f"{attention}.kv_einsum.w": Parameter(
            f"kv kv_heads embed head_dim <- {keys_values}", has_grouped_heads
        ),
        f"{attention}.qkv_einsum.w": Parameter(
            f"qkv heads embed head_dim <- {all_three}", has_equal_heads
        ),
    }
    return {"tunix": TreeLayout(leaves, allows_tied_head=True, state_keys=_TUNIX_STATE_KEYS)}


def maxtext_layouts(
    family: Family,
    *,
    scales_queries: bool,
    interleaves_heads: Condition | None = NEVER,
    experts_module: str = "",
) -> dict[str, TreeLayout]:
    """Return the parameter trees of MaxText, with stacked layers and with one leaf per layer.

    Args:
        family: The family.
        scales_queries: Whether the kernel of the queries is divided by sqrt(head_dim).
        interleaves_heads: When the two elements of a rotated pair are adjacent in the heads of queries and keys.
            Otherwise they are half a head apart, as in Hugging Face files.
        experts_module: Name of the module with experts, or "" for a dense MLP.
    """
    layer = _MAXTEXT_ATTENTION | _MAXTEXT_BIASES | _MAXTEXT_QK_NORMS | _MAXTEXT_NORMS | _MAXTEXT_MLP
    if experts_module:
        for path, line in _MAXTEXT_EXPERTS.items():
            layer[path] = line.format(module=experts_module)
    outer = _MAXTEXT_LEAVES | _MAXTEXT_HEAD
    leaves = leaf_parameters(family.parameters, outer, layer, layer_path=_LAYER_PATH)
    attention = f"{_LAYER_PATH}.self_attention"
    if interleaves_heads is not None:
        for path in (f"{attention}.query.kernel", f"{attention}.key.kernel"):
            row = leaves[path].row
            leaves[path] = Parameter(
                interleave_rotary_pairs(row, "(half two)"), interleaves_heads, else_row=row
            )
    if scales_queries:
        path = f"{attention}.query.kernel"
        leaves[path] = map_rows(leaves[path], _SCALED_QUERIES.format)
    unscanned = TreeLayout(leaves, allows_tied_head=True)
    scanned = dataclasses.replace(unscanned, stacked_name="layers", stack_axis=1)
    return {"maxtext": scanned, "maxtext-unscanned": unscanned}


# Parameter trees of MaxText for Gemma 2 and 3, with changed values and groups of layers. No I/O, no jax.
#
# Facts of MaxText 0.2.5: checkpoint_conversion/utils/param_mapping.py and models/gemma2.py, models/gemma3.py.

_GEMMA_NORMS = {
    "attn_norm.scale": "pre_self_attention_norm.scale: embed",
    "attn_post_norm.scale": "post_self_attention_norm.scale: embed",
    "mlp_norm.scale": "pre_ffw_norm.scale: embed",
    "mlp_post_norm.scale": "post_ffw_norm.scale: embed",
}
# Gemma 2 has no norms of queries and keys.
_GEMMA_LAYER = _MAXTEXT_ATTENTION | _MAXTEXT_QK_NORMS | _MAXTEXT_MLP | _GEMMA_NORMS
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


def maxtext_gemma2_layouts(family: Family) -> dict[str, TreeLayout]:
    """Return the parameter trees of MaxText for a Gemma 2, with pairs of layers."""

    def has_pairs(config: HFConfig) -> bool:
        return family.sizes(config)["layers"] >= len(_KINDS)

    def has_scaled_pairs(config: HFConfig) -> bool:
        return has_pairs(config) and "query_pre_attn_scalar" in family.sizes(config)

    leaves = _outer_leaves(family.parameters, root_dtype="float32")
    for kind in _KINDS:
        # E.g. self_attention_local.query.kernel
        table = {path: line.replace(".", f"_{kind}.", 1) for path, line in _GEMMA_LAYER.items()}
        leaves |= _layer_leaves(
            family.parameters,
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
        num_paired = family.sizes(config)["layers"] // len(_KINDS) * len(_KINDS)
        return {kind: range(i, num_paired, len(_KINDS)) for i, kind in enumerate(_KINDS)}

    unscanned = TreeLayout(leaves, allows_tied_head=True, layer_numbers=pairs)
    scanned = dataclasses.replace(unscanned, stacked_name="layers", stack_axis=1)
    return {"maxtext": scanned, "maxtext-unscanned": unscanned}


def maxtext_gemma3_layouts(family: Family) -> dict[str, TreeLayout]:
    """Return the parameter trees of MaxText for a Gemma 3: groups of layers and a remainder, or one leaf per layer."""
    layer = _GEMMA_LAYER
    outer = _outer_leaves(family.parameters, root_dtype="bfloat16")
    plain = leaf_parameters(family.parameters, {}, layer, layer_path=_LAYER_PATH)
    unscanned = TreeLayout(outer | _with_offset_norms(plain), allows_tied_head=True)
    grouped = dict(outer)
    for position in range(_GROUP_SIZE):
        grouped |= _layer_leaves(
            family.parameters,
            layer,
            layer_path=f"decoder.{{layers}}.layers_{position}",
            index_list=f"group_{position}",
            condition=lambda config: family.sizes(config)["layers"] >= _GROUP_SIZE,
        )
        # The default binds the position of this turn. A closure would read the last one of the loop.
        grouped |= _layer_leaves(
            family.parameters,
            layer,
            layer_path=f"decoder.layers_remainder.layers_{position}",
            index_list=f"remainder_{position}",
            condition=lambda config, position=position: (
                family.sizes(config)["layers"] % _GROUP_SIZE > position
            ),
        )

    def groups(config: HFConfig) -> dict[str, Sequence[int]]:
        return _group_numbers(family.sizes(config)["layers"])

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
    # The head is always tied: the capped logits of MaxText need the embedding.
    leaves = leaf_parameters(parameters, _MAXTEXT_LEAVES, {}, layer_path=_LAYER_PATH)
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
        listed = map_rows(leaf, lambda row: row.replace("{layers}", f"{{layers@{index_list}}}"))
        leaves[path] = dataclasses.replace(listed, condition=condition)
    return _with_offset_norms(leaves)


def _with_offset_norms(leaves: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return leaves with 1 added to the weights of norms."""
    changed = dict(leaves)
    for path, leaf in leaves.items():
        if path.endswith(".scale"):
            changed[path] = map_rows(leaf, _NORM_SCALE.format)
    return changed


# Model type -> its trees, in the order of lists
ORBAX_TREES: Mapping[str, MakeTrees] = {
    "llama": lambda family: {
        **tunix_layout(family),
        # MaxText rotates adjacent pairs in LLaMA 3.1 and later, which have scaled rotary frequencies.
        **maxtext_layouts(family, scales_queries=True, interleaves_heads=has_llama3_scaling),
    },
    "mistral": partial(maxtext_layouts, scales_queries=True),
    "mixtral": partial(maxtext_layouts, scales_queries=True, experts_module="MoeBlock_0"),
    "qwen2": lambda family: {
        **tunix_layout(family, qkv_biases=True),
        **maxtext_layouts(family, scales_queries=False),
    },
    "qwen3": lambda family: {
        **tunix_layout(family, qk_norms=True),
        **maxtext_layouts(family, scales_queries=False),
    },
    # The trainers have no layers with a dense MLP in this family. An export of a model with some is refused.
    "qwen3_moe": lambda family: {
        **tunix_layout(family, qk_norms=True, has_experts=True),
        **maxtext_layouts(family, scales_queries=False, experts_module="moe_block"),
    },
    "gemma": tunix_gemma_layout,
    "gemma2": lambda family: {
        **maxtext_gemma2_layouts(family),
        **tunix_gemma_layout(family, post_attention_norm="post_attn_norm"),
    },
    "gemma3_text": lambda family: {
        **maxtext_gemma3_layouts(family),
        **tunix_gemma_layout(family, post_attention_norm="post_attention_norm"),
    },
}
