"""The same tensors in the trees of other libraries, as rows made of a family's own. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from trainer.models.parameters import EMBEDDINGS, Layout, Parameter, When, says
from trainer.models.rows import row_parts, split_dims

NOTHING: Mapping[When, bool] = MappingProxyType({})


def hf_flax(
    table: Mapping[str, Parameter],
    prefix: str,
    norm: Literal["scale", "weight"] = "scale",
    ties: bool = False,
    fixed: Mapping[When, bool] = NOTHING,
    unread: tuple[str, ...] = (),
) -> dict[str, Layout]:
    """The tree of transformers' Flax classes by its name: tensors are called as in other files, matrices have their
    dims the other way round, and fused ones are whole. `norm`: what a norm's weight is called; `fixed`: whether the
    classes have what a family has only under a condition."""
    found = {}
    for path, row, when in _rows(table):
        _, tensor, dims = row_parts(row)
        stem, _, last = tensor.rpartition(".")
        kind = last if last == "bias" else _kind(path, norm)
        whole = re.sub(r"=\d+", "", dims)
        leaf = " ".join(reversed(split_dims(whole))) if kind == "kernel" else whole
        if fixed.get(when, True):
            base = "" if path.startswith("head.") else prefix
            found[f"{base}{stem}.{kind}"] = Parameter(f"{leaf} <- {tensor}: {whole}", "" if when in fixed else when)
    return {"hf-flax": Layout(found, ties=ties, unread=unread)}


def _rows(table: Mapping[str, Parameter]) -> Iterator[tuple[str, str, When]]:
    """Path, row and when it holds, of each row that a config may choose."""
    for path, parameter in table.items():
        when = parameter.when
        yield path, parameter.row, when
        if parameter.otherwise:
            yield path, parameter.otherwise, lambda config, when=when: not says(config, when)


def _kind(path: str, norm: str) -> str:
    if not EMBEDDINGS.isdisjoint(path.split(".")):
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
EASYLM = Layout(
    {
        "transformer.wte.embedding": Parameter("vocab embed <- embed_tokens.weight: vocab embed"),
        **{
            f"transformer.h.{{layers}}.{path}": Parameter(row.replace("<- ", "<- layers.{layers}."))
            for path, row in _EASYLM_LAYER.items()
        },
        "transformer.ln_f.kernel": Parameter("embed <- norm.weight: embed"),
        "lm_head.kernel": Parameter("embed vocab <- lm_head.weight: vocab embed"),
    },
    stacked="scan_decoder",
    spellings={"lm_head.lm_head.kernel": "lm_head.kernel"},  # with its head computed in chunks
)
