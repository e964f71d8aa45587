"""Parameter trees of JAX trainers with Orbax checkpoints: Tunix and MaxText. No I/O, no jax.

A layout is a table with one line per parameter: its path in prep's tree, and its leaf in the other tree with the
leaf's dims. The tensors on the right side of the rows are those of the family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from prepcli.core.json_values import HFConfig
from prepcli.models.layout_tables import leaf_parameters
from prepcli.models.parameters import NEVER, Condition, Parameter, TreeLayout
from prepcli.models.rows import map_rows, split_row

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
_MAXTEXT_LEAVES = {
    "embed.tokens": "token_embedder.embedding: vocab embed",
    "final_norm.scale": "decoder.decoder_norm.scale: embed",
    "head.weight": "decoder.logits_dense.kernel: embed vocab",
}
_MAXTEXT_ATTENTION = {
    "attn_norm.scale": "pre_self_attention_layer_norm.scale: embed",
    "attn.q.weight": "self_attention.query.kernel: embed heads head_dim",
    "attn.k.weight": "self_attention.key.kernel: embed kv_heads head_dim",
    "attn.v.weight": "self_attention.value.kernel: embed kv_heads head_dim",
    "attn.o.weight": "self_attention.out.kernel: heads head_dim embed",
    "attn.q.bias": "self_attention.query.bias: heads head_dim",
    "attn.k.bias": "self_attention.key.bias: kv_heads head_dim",
    "attn.v.bias": "self_attention.value.bias: kv_heads head_dim",
    "attn.q_norm.scale": "self_attention.query_norm.scale: head_dim",
    "attn.k_norm.scale": "self_attention.key_norm.scale: head_dim",
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
    parameters: Mapping[str, Parameter],
    *,
    qkv_biases: bool = False,
    qk_norms: bool = False,
    has_experts: bool = False,
) -> dict[str, TreeLayout]:
    """Return the parameter tree of Tunix for a family with the names of LLaMA.

    Args:
        parameters: Parameters of the family.
        qkv_biases: Whether the class in Tunix has biases of queries, keys and values.
        qk_norms: Whether it has norms of queries and keys.
        has_experts: Whether all layers have experts.

    Returns:
        Dict with the key "tunix".
    """
    layer = dict(_TUNIX_LAYER)
    if has_experts:
        layer |= _TUNIX_EXPERTS
    if qkv_biases:
        layer |= _TUNIX_QKV_BIASES
    if qk_norms:
        layer |= _TUNIX_QK_NORMS
    leaves = leaf_parameters(parameters, _TUNIX_LEAVES, layer, layer_path="layers.{layers}")
    return {"tunix": TreeLayout(leaves, allows_tied_head=True, state_keys=_TUNIX_STATE_KEYS)}


def tunix_gemma_layout(
    parameters: Mapping[str, Parameter],
    sizes: Callable[[HFConfig], Mapping[str, int]],
    *,
    post_attention_norm: str = "",
) -> dict[str, TreeLayout]:
    """Return the parameter tree of Tunix for a Gemma 1, 2 or 3.

    Args:
        parameters: Parameters of the family.
        sizes: Function from the config to the extent of each atom.
        post_attention_norm: Name of the norm after the attention, or "" if there is none.

    Returns:
        Dict with the key "tunix".
    """
    layer = dict(_TUNIX_GEMMA_LAYER)
    if post_attention_norm:
        layer["attn_post_norm.scale"] = f"{post_attention_norm}.scale: embed"
    leaves = leaf_parameters(
        parameters, _TUNIX_GEMMA_LEAVES, layer, layer_path=_TUNIX_GEMMA_LAYER_PATH
    )

    def has_equal_heads(config: HFConfig) -> bool:
        axis_sizes = sizes(config)
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
    parameters: Mapping[str, Parameter],
    *,
    scales_queries: bool,
    interleaves_heads: Condition | None = NEVER,
    experts_module: str = "",
) -> dict[str, TreeLayout]:
    """Return the parameter trees of MaxText, with stacked layers and with one leaf per layer.

    Args:
        parameters: Parameters of the family.
        scales_queries: Whether the kernel of the queries is divided by sqrt(head_dim).
        interleaves_heads: When the two elements of a rotated pair are adjacent in the heads of queries and keys.
            Otherwise they are half a head apart, as in Hugging Face files.
        experts_module: Name of the module with experts, or "" for a dense MLP.

    Returns:
        Dict with the keys "maxtext" and "maxtext-unscanned".
    """
    if experts_module:
        experts = {
            path: line.format(module=experts_module) for path, line in _MAXTEXT_EXPERTS.items()
        }
        layer = _MAXTEXT_ATTENTION | experts
    else:
        layer = _MAXTEXT_ATTENTION | _MAXTEXT_MLP
    leaves = leaf_parameters(
        parameters, _MAXTEXT_LEAVES, layer, layer_path="decoder.layers_{layers}"
    )
    attention = "decoder.layers_{layers}.self_attention"
    if interleaves_heads is not None:
        for path in (f"{attention}.query.kernel", f"{attention}.key.kernel"):
            leaves[path] = _interleave_rotary_pairs(leaves[path], interleaves_heads)
    if scales_queries:
        path = f"{attention}.query.kernel"
        leaves[path] = map_rows(leaves[path], _SCALED_QUERIES.format)
    unscanned = TreeLayout(leaves, allows_tied_head=True)
    scanned = dataclasses.replace(unscanned, stacked_name="layers", stack_axis=1)
    return {"maxtext": scanned, "maxtext-unscanned": unscanned}


def _interleave_rotary_pairs(parameter: Parameter, condition: Condition) -> Parameter:
    """Return a query or key parameter with adjacent rotary pairs in each head, if the config meets the condition."""
    leaf, tensor, dims = split_row(parameter.row)
    # With 4 elements per head, the tensor has the pairs (0, 2) and (1, 3). The leaf has the order 0, 2, 1, 3.
    interleaved_leaf = leaf.replace("head_dim", "(half two)")
    interleaved_dims = dims.replace("head_dim", "two half")
    return Parameter(
        f"{interleaved_leaf} <- {tensor}: {interleaved_dims}", condition, else_row=parameter.row
    )
