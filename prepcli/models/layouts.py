"""Parameter trees of other libraries, derived from a family's axis-map rows: Flax, EasyLM, Levanter, torchtitan, Meta.

The right side of the rows has the tensors of the family. No I/O, no jax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from prepcli.algebra.axis_map import DENSE_LAYERS, LAYER_NUMBER, LAYERS, SPARSE_LAYERS
from prepcli.models.declaration import map_rows, split_dims, split_row, unless_false
from prepcli.models.parameters import (
    ALWAYS,
    EMBEDDING_PATH_PARTS,
    Condition,
    Family,
    MakeTrees,
    Parameter,
    TreeLayout,
    condition_holds,
    if_set,
)


def renamed_leaf(parameter: Parameter, line: str) -> tuple[str, Parameter]:
    """Return the path of a leaf in another tree, and the parameter with the leaf's dims on the left side of its rows.

    `line` has the path and the dims, e.g. `lm_head.w: embed vocab`. Without dims, the leaf has the dims of the tensor,
    after the experts.
    """
    path, _, leaf_dims = line.partition(": ")
    if not leaf_dims:
        _, tensor, leaf_dims = split_row(parameter.row)
        if "{experts}" in tensor:
            leaf_dims = f"experts {leaf_dims}"
    return path, with_leaf_dims(parameter, leaf_dims)


def with_leaf_dims(parameter: Parameter, leaf_dims: str) -> Parameter:
    """Return a parameter with another left side of its rows."""

    def replace_leaf(row: str) -> str:
        _, tensor, dims = split_row(row)
        return f"{leaf_dims} <- {tensor}: {dims}"

    return map_rows(parameter, replace_leaf)


def interleave_rotary_pairs(row: str, pairs: str = "half two") -> str:
    """Return the row of queries or keys with adjacent rotary pairs in each head. `pairs` is their text in the leaf.

    >>> interleave_rotary_pairs("(heads head_dim) embed <- q.weight: (heads head_dim) embed")
    '(heads half two) embed <- q.weight: (heads two half) embed'
    """
    leaf, tensor, dims = split_row(row)
    # With 4 elements per head, the tensor has the pairs (0, 2) and (1, 3). The leaf has the order 0, 2, 1, 3.
    leaf = leaf.replace("head_dim", pairs)
    dims = dims.replace("head_dim", "two half")
    return f"{leaf} <- {tensor}: {dims}"


# --- Flax classes of transformers 4, and EasyLM

NO_OVERRIDES: Mapping[Condition, bool] = MappingProxyType({})


def hf_flax_layout(
    family: Family,
    *,
    norm_name: Literal["scale", "weight"] = "scale",
    allows_tied_head: bool = False,
    condition_overrides: Mapping[Condition, bool] = NO_OVERRIDES,
    ignored_fields: tuple[str, ...] = (),
) -> dict[str, TreeLayout]:
    """Return the parameter tree of the Flax classes in transformers 4, as a dict of layout name -> layout.

    Its paths follow the tensor names of PyTorch files. Matrices are transposed. A fused tensor is
    one leaf.

    Args:
        family: The family.
        norm_name: Leaf name of a norm's weight.
        allows_tied_head: Whether the tree of a model with a tied head has no leaf for the head.
        condition_overrides: Condition -> true if the Flax class has the parameters with this
            condition in every model, false if in none.
        ignored_fields: Config fields without effect in the Flax class.
    """
    flax_parameters = {}
    for path, row, condition in _conditional_rows(family.parameters):
        _, tensor, dims = split_row(row)
        stem, _, last = tensor.rpartition(".")
        leaf_name = last if last == "bias" else _flax_leaf_name(path, norm_name)
        # The leaf of a fused tensor has all of its parts.
        whole_dims = re.sub(r"=\d+", "", dims)
        # torch.nn.Linear stores [out, in] and flax.linen.Dense [in, out]. GPT-2's Conv1D and FlaxConv1D
        # are the other way around, so both cases reverse the dims.
        leaf = " ".join(reversed(split_dims(whole_dims))) if leaf_name == "kernel" else whole_dims
        if condition_overrides.get(condition, True):
            base = "" if path.startswith("head.") else family.prefix
            flax_parameters[f"{base}{stem}.{leaf_name}"] = Parameter(
                f"{leaf} <- {tensor}: {whole_dims}",
                ALWAYS if condition in condition_overrides else condition,
            )
    return {
        "hf-flax": TreeLayout(
            flax_parameters,
            allows_tied_head=allows_tied_head,
            ignored_fields=ignored_fields,
            follows_prefix=True,
        )
    }


def _conditional_rows(parameters: Mapping[str, Parameter]) -> Iterator[tuple[str, str, Condition]]:
    """Yield the path, row and condition of each `row` and `else_row` of the parameters. Skip `alternate` rows."""
    for path, parameter in parameters.items():
        condition = parameter.condition
        yield path, parameter.row, condition
        if parameter.else_row:
            yield (
                path,
                parameter.else_row,
                # The default binds the condition of this turn. A closure would read the last one of the loop.
                lambda config, condition=condition: not condition_holds(config, condition),
            )


def _flax_leaf_name(path: str, norm_name: str) -> str:
    """Return the last part of a leaf's path in a Flax tree."""
    if not EMBEDDING_PATH_PARTS.isdisjoint(path.split(".")):
        return "embedding"
    if path.endswith(".scale"):
        return norm_name
    return "kernel"


_EASYLM_LAYER = {
    "attention_norm.kernel": "embed <- input_layernorm.weight: embed",
    "attention.wq.kernel": "embed (heads half two) <- self_attn.q_proj.weight: (heads two half) embed",
    "attention.wk.kernel": "embed (kv_heads half two) <- self_attn.k_proj.weight: (kv_heads two half) embed",
    "attention.wv.kernel": "embed (kv_heads head_dim) <- self_attn.v_proj.weight: (kv_heads head_dim) embed",
    "attention.wo.kernel": "(heads head_dim) embed <- self_attn.o_proj.weight: embed (heads head_dim)",
    "ffn_norm.kernel": "embed <- post_attention_layernorm.weight: embed",
    # Names of Meta's files: the MLP is w2(silu(w1 x) * w3 x).
    "feed_forward.w1.kernel": "embed mlp <- mlp.gate_proj.weight: mlp embed",
    "feed_forward.w3.kernel": "embed mlp <- mlp.up_proj.weight: mlp embed",
    "feed_forward.w2.kernel": "mlp embed <- mlp.down_proj.weight: embed mlp",
}
EASYLM_LAYOUT = TreeLayout(
    {
        "transformer.wte.embedding": Parameter("vocab embed <- embed_tokens.weight: vocab embed"),
        **{
            f"transformer.h.{{layers}}.{path}": Parameter(row.replace("<- ", "<- layers.{layers}."))
            for path, row in _EASYLM_LAYER.items()
        },
        "transformer.ln_f.kernel": Parameter("embed <- norm.weight: embed"),
        "lm_head.kernel": Parameter("embed vocab <- lm_head.weight: vocab embed"),
    },
    stacked_name="scan_decoder",
    # Trees of models with a chunked head have this path.
    path_aliases={"lm_head.lm_head.kernel": "lm_head.kernel"},
)
# EasyLM's tree with `scan_layers`
EASYLM_LAYOUTS = {
    "easylm": EASYLM_LAYOUT,
    "easylm-scanned": dataclasses.replace(EASYLM_LAYOUT, stack_axis=0),
}


def _llama_trees(family: Family) -> dict[str, TreeLayout]:
    # The Flax class has no biases in the MLP, whatever the config says.
    overrides = {if_set("mlp_bias"): False}
    return {
        **hf_flax_layout(family, norm_name="weight", condition_overrides=overrides),
        **EASYLM_LAYOUTS,
    }


_TIED = partial(hf_flax_layout, allows_tied_head=True)
_T5 = partial(_TIED, norm_name="weight")
# Model type -> its trees
FLAX_TREES: Mapping[str, MakeTrees] = {
    # The Flax class computes the same scores with and without this field.
    "gpt2": partial(_TIED, ignored_fields=("scale_attn_by_inverse_layer_idx",)),
    "gpt_neo": _TIED,
    "gptj": hf_flax_layout,
    # The Flax class reads neither field: its tree always has these parameters.
    "opt": partial(
        _TIED,
        condition_overrides={
            unless_false("enable_bias"): True,
            unless_false("layer_norm_elementwise_affine"): True,
        },
    ),
    "bloom": _TIED,
    "xglm": _TIED,
    "llama": _llama_trees,
    "mistral": partial(hf_flax_layout, norm_name="weight"),
    "gemma": partial(_TIED, norm_name="weight"),
    "t5": partial(_T5, ignored_fields=("scale_decoder_outputs",)),
    "mt5": _T5,
}


# --- Levanter: the leaves of its Haliax modules
#
# Facts of marin-levanter 0.2.20: models/*.py. Modules have the names of Hugging Face. A leaf has the axes of the
# tensor, with the heads as axes of their own.

_LEVANTER_EMBEDDINGS = {
    "embed.tokens": "embeddings.token_embeddings.weight",
    "embed.positions": "embeddings.position_embeddings.weight",
}
_HEAD = "head.weight"
_QUERIES = "layers.attn.q"
_EXPERT = ".{experts}"
# Flags of dropout modules, e.g. `transformer.blocks.stacked.attn.inference`.
_NON_PARAMETERS = (".inference",)


def levanter_layouts(
    family: Family, *, layers_module: str = "layers", has_head: bool = True
) -> dict[str, TreeLayout]:
    """Return the parameter trees of Levanter, with stacked layers and with one leaf per layer.

    `has_head` is false for a class without a leaf for an untied head.
    """
    module_path = f"transformer.{layers_module}"
    stacked = _levanter_leaves(family.parameters, f"{module_path}.{{layers}}", has_head=has_head)
    single = _levanter_leaves(
        family.parameters, f"{module_path}.blocks.{{layers}}", has_head=has_head
    )
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


def _levanter_leaves(
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
        leaf = _levanter_leaf(parameter)
        if has_groups and path.startswith(_QUERIES):
            # Two axes for the heads of queries: key and value heads, and queries for each of them.
            leaf = map_rows(leaf, partial(re.sub, r"\bheads\b", "kv_heads query_group"))
        leaves[_levanter_path(path, parameter, layer_path)] = leaf
    return leaves


def _levanter_path(path: str, parameter: Parameter, layer_path: str) -> str:
    """Return the path of a leaf, e.g. `transformer.layers.{layers}.mlp.up_proj.weight`."""
    if path in _LEVANTER_EMBEDDINGS:
        return _LEVANTER_EMBEDDINGS[path]
    _, tensor, _ = split_row(parameter.row)
    if path == _HEAD:
        return tensor
    _, _, module = tensor.partition("{layers}.")
    if not module:
        return f"transformer.{tensor}"
    return f"{layer_path}.{module.replace(_EXPERT, '')}"


def _levanter_leaf(parameter: Parameter) -> Parameter:
    """Return a parameter with the dims of its leaf in Levanter on the left side of its rows."""
    leaf, tensor, dims = split_row(parameter.row)
    if _EXPERT in tensor:
        # An expert's matrix is [out, in] in the file. The experts of a layer are one leaf [experts, in, out].
        *_, output_dim, input_dim = split_dims(leaf)
        leaf_dims = f"experts {input_dim} {output_dim}"
    else:
        leaf_dims = _without_part(re.sub(r"[()]", "", dims))

    whole = map_rows(parameter, _without_part)
    return with_leaf_dims(whole, leaf_dims)


def _without_part(dims: str) -> str:
    """Return the dims of a whole fused tensor, or a row of it: `(qkv heads head_dim)` of `(qkv=0 heads head_dim)`."""
    return re.sub(r"\bqkv=\d+", "qkv", dims)


def _gpt2_tree(family: Family) -> dict[str, TreeLayout]:
    # The class has only stacked layers, and no head.
    layouts = levanter_layouts(family, layers_module="blocks", has_head=False)
    return {"levanter": layouts["levanter"]}


def _olmo3_tree(family: Family) -> dict[str, TreeLayout]:
    # Levanter stacks layers of one type. The layers of OLMo 3 are of two.
    layouts = levanter_layouts(family, layers_module="_layers")
    return {"levanter-unscanned": layouts["levanter-unscanned"]}


# Model type -> its trees
LEVANTER_TREES: Mapping[str, MakeTrees] = {
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


# --- State dicts of torchtitan, and of Meta's LLaMA files
#
# Facts of torchtitan 0.3.0: models/{llama3,qwen3,deepseek_v3,gpt_oss}/state_dict_adapter.py and common/moe.py.

TORCHTITAN_LAYOUT = "torchtitan"
_TITAN_LEAVES = {
    "embed.tokens": "tok_embeddings.weight",
    "final_norm.scale": "norm.weight",
    "head.weight": "lm_head.weight",
}
_TITAN_LAYER = {
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
_TITAN_EXPERTS = {
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.gate.weight": "moe.routed_experts.inner_experts.w1_EFD",
    "mlp.down.weight": "moe.routed_experts.inner_experts.w2_EDF",
    "mlp.up.weight": "moe.routed_experts.inner_experts.w3_EFD",
}
_TITAN_LAYER_PATH = "layers.{layers}."
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
_DENSE_MLP = {path: name for path, name in _TITAN_LAYER.items() if path.startswith("mlp.")}
_CORRECTED_EXPERTS = {
    **_TITAN_EXPERTS,
    "mlp.router.correction.bias": "moe.expert_bias_E",
    "mlp.shared.gate.weight": "moe.shared_experts.w1.weight",
    "mlp.shared.down.weight": "moe.shared_experts.w2.weight",
    "mlp.shared.up.weight": "moe.shared_experts.w3.weight",
}
_GPT_OSS_LAYER = {
    **{path: name for path, name in _TITAN_LAYER.items() if not path.startswith("mlp.")},
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
        f"{_TITAN_LAYER_PATH}attention.w{letter}.weight": f"{_TITAN_LAYER_PATH}attention.qkv_linear.w{letter}.weight"
        for letter in "qkv"
    },
}
# Entries of a training state other than the parameters.
_TITAN_STATE_KEYS = ("optimizer", "lr_scheduler", "dataloader", "train_state")
# The router adds this buffer to its scores to balance the experts. It starts at zero. Of the families of Hugging Face,
# only DeepSeek-V3 has a tensor for it.
_BALANCING_BIAS = "moe.expert_bias_E"
_ZERO_BIASES = {f"{_TITAN_LAYER_PATH}{_BALANCING_BIAS}": ("experts",)}


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
    """
    layer = _TITAN_LAYER | _TITAN_EXPERTS if has_experts else _TITAN_LAYER
    parameters = family.parameters
    leaves = _titan_outer_leaves(parameters) | _titan_layer_leaves(parameters, LAYERS, layer)
    if interleaves_heads:
        for name in ("wq", "wk"):
            path = f"{_TITAN_LAYER_PATH}attention.qkv_linear.{name}.weight"
            leaves[path] = map_rows(leaves[path], interleave_rotary_pairs)
    return _with_zero_biases(leaves) if has_experts else _titan_layout(leaves)


def torchtitan_deepseek_layout(family: Family) -> dict[str, TreeLayout]:
    """Return the state dict of torchtitan for a DeepSeek-V3, with dense layers before the layers with experts."""
    parameters = family.parameters
    # The two elements of a rotated pair are adjacent in the heads. torchtitan has no other order.
    has_adjacent_pairs = unless_false("rope_interleave")
    leaves = {
        **_titan_outer_leaves(parameters),
        **_titan_layer_leaves(parameters, LAYERS, _DEEPSEEK_LAYER | _CORRECTED_EXPERTS),
        **_titan_layer_leaves(parameters, SPARSE_LAYERS, _CORRECTED_EXPERTS),
        **_titan_layer_leaves(parameters, DENSE_LAYERS, _DENSE_MLP),
        f"{_TITAN_LAYER_PATH}attention.wkv_a.weight": Parameter(
            _DEEPSEEK_LATENT, has_adjacent_pairs
        ),
    }
    # `attention.wq.weight`, an old name of LLaMA's queries, is a present name of DeepSeek's.
    return _titan_layout(leaves, path_aliases=_HEAD_NAME, layer_numbers=family.layer_numbers)


def torchtitan_gpt_oss_layout(family: Family) -> dict[str, TreeLayout]:
    """Return the state dict of torchtitan for a GPT-OSS, as a dict with the key "torchtitan"."""
    parameters = family.parameters
    leaves = _titan_outer_leaves(parameters) | _titan_layer_leaves(
        parameters, LAYERS, _GPT_OSS_LAYER
    )
    for name, row in _GPT_OSS_EXPERTS.items():
        path = f"{_TITAN_LAYER_PATH}moe.routed_experts.inner_experts.{name}"
        leaves[path] = Parameter(row.replace("<- ", "<- layers.{layers}.mlp.experts."))
    return _with_zero_biases(leaves)


def _titan_outer_leaves(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the leaves outside of the layers."""
    return dict(renamed_leaf(parameters[path], name) for path, name in _TITAN_LEAVES.items())


def _titan_layer_leaves(
    parameters: Mapping[str, Parameter], group: str, names: Mapping[str, str]
) -> dict[str, Parameter]:
    """Return the leaves of a group of layers.

    `names` maps the path of a parameter in a layer to its name in a layer of torchtitan.
    """
    layer_path = _TITAN_LAYER_PATH if group == LAYERS else f"layers.{{{LAYER_NUMBER}}}."
    leaves: dict[str, Parameter] = {}
    for path, name in names.items():
        if parameter := parameters.get(f"{group}.{path}"):
            leaf_path, leaf = renamed_leaf(parameter, f"{layer_path}{name}")
            leaves[leaf_path] = leaf
    return leaves


def _with_zero_biases(leaves: Mapping[str, Parameter]) -> dict[str, TreeLayout]:
    """Return the layout of a model with experts, if its files have no bias to balance them."""
    return _titan_layout(leaves, non_parameters=(f".{_BALANCING_BIAS}",), zero_leaves=_ZERO_BIASES)


def _titan_layout(
    leaves: Mapping[str, Parameter],
    path_aliases: Mapping[str, str] = META_NAMES,
    **fields: Any,
) -> dict[str, TreeLayout]:
    """Return the layout of some leaves, as a dict with its name."""
    layout = TreeLayout(leaves, path_aliases=path_aliases, state_keys=_TITAN_STATE_KEYS, **fields)
    return {TORCHTITAN_LAYOUT: layout}


# Model type -> its tree
TORCHTITAN_TREES: Mapping[str, MakeTrees] = {
    "llama": partial(torchtitan_layout, interleaves_heads=True),
    "qwen3": torchtitan_layout,
    # torchtitan has no layers with a dense MLP in this family. An export of a model with some is refused.
    "qwen3_moe": partial(torchtitan_layout, has_experts=True),
    "deepseek_v3": torchtitan_deepseek_layout,
    "gpt_oss": torchtitan_gpt_oss_layout,
}
