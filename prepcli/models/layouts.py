"""Parameter trees of other libraries for the same tensors, derived from a family's axis-map rows. No I/O, no jax."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal

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
from prepcli.models.rows import split_dims, split_row, unless_false

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

    Returns:
        Dict with the key "hf-flax".
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
TREES: Mapping[str, MakeTrees] = {
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
