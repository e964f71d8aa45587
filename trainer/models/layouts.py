"""The same tensors in the trees of other libraries, as rows made of a family's own. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from trainer.models.parameters import EMBEDDING_PATH_PARTS, Condition, Parameter, TreeLayout, condition_holds
from trainer.models.rows import split_dims, split_row

NO_OVERRIDES: Mapping[Condition, bool] = MappingProxyType({})


def hf_flax_layout(
    parameters: Mapping[str, Parameter],
    prefix: str,
    norm_name: Literal["scale", "weight"] = "scale",
    allows_tied_head: bool = False,
    condition_overrides: Mapping[Condition, bool] = NO_OVERRIDES,
    ignored_fields: tuple[str, ...] = (),
) -> dict[str, TreeLayout]:
    """The tree of transformers' Flax classes by its name: tensors are called as in other files, matrices have their
    dims the other way round, and fused ones are whole. `norm`: what a norm's weight is called; `fixed`: whether the
    classes have what a family has only under a condition."""
    found = {}
    for path, row, when in _conditional_rows(parameters):
        _, tensor, dims = split_row(row)
        stem, _, last = tensor.rpartition(".")
        kind = last if last == "bias" else _flax_leaf_name(path, norm_name)
        whole = re.sub(r"=\d+", "", dims)
        leaf = " ".join(reversed(split_dims(whole))) if kind == "kernel" else whole
        if condition_overrides.get(when, True):
            base = "" if path.startswith("head.") else prefix
            found[f"{base}{stem}.{kind}"] = Parameter(
                f"{leaf} <- {tensor}: {whole}", "" if when in condition_overrides else when
            )
    return {"hf-flax": TreeLayout(found, allows_tied_head=allows_tied_head, ignored_fields=ignored_fields)}


def _conditional_rows(table: Mapping[str, Parameter]) -> Iterator[tuple[str, str, Condition]]:
    """Path, row and when it holds, of each row that a config may choose."""
    for path, parameter in table.items():
        when = parameter.condition
        yield path, parameter.row, when
        if parameter.else_row:
            yield path, parameter.else_row, lambda config, when=when: not condition_holds(config, when)


def _flax_leaf_name(path: str, norm: str) -> str:
    if not EMBEDDING_PATH_PARTS.isdisjoint(path.split(".")):
        return "embedding"
    return norm if path.endswith(".scale") else "kernel"


_EASYLM_LAYER = {
    "attention_norm.kernel": "embed <- input_layernorm.weight: embed",
    "attention.wq.kernel": "embed (heads half two) <- self_attn.q_proj.weight: (heads two half) embed",
    "attention.wk.kernel": "embed (kv_heads half two) <- self_attn.k_proj.weight: (kv_heads two half) embed",
    "attention.wv.kernel": "embed (kv_heads head_dim) <- self_attn.v_proj.weight: (kv_heads head_dim) embed",
    "attention.wo.kernel": "(heads head_dim) embed <- self_attn.o_proj.weight: embed (heads head_dim)",
    "ffn_norm.kernel": "embed <- post_attention_layernorm.weight: embed",
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
    path_aliases={"lm_head.lm_head.kernel": "lm_head.kernel"},  # with its head computed in chunks
)
