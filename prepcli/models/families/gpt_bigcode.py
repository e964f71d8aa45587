"""GPT-BigCode (SantaCoder, StarCoder 1): GPT-2 with one head of keys and values for all query heads."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ArchConfig, reject_unsupported_fields
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style
from prepcli.models.parameters import HFConfig, Parameter
from prepcli.models.rows import (
    Parameters,
    build_family,
    embedding,
    layer_norm,
    linear,
    matrix,
    stack,
    unless_false,
)

HAS_MULTI_QUERY = unless_false("multi_query")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GPTBigCodeConfig."""
    axis_sizes = _gpt_style.sizes(
        config, vocab=50257, positions=1024, embed=768, layers=12, heads=12
    )
    return {**axis_sizes, "kv_heads": 1 if HAS_MULTI_QUERY(config) else axis_sizes["heads"]}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, "multi_query")
    plain = _gpt_style.arch_config(
        config, sizes(config), activation=("activation_function", "gelu_pytorch_tanh")
    )
    scale = plain.attn_scale if config.get("scale_attn_weights", True) else 1.0
    return dataclasses.replace(plain, attn_scale=scale)


def _fused_qkv() -> Parameters:
    """Return the parameters of queries, keys and values.

    With one head of keys and values, all queries come first. Otherwise the rows of a head are
    together, as in GPT-NeoX.
    """
    parameters: Parameters = {}
    for number, (projection, heads) in enumerate(
        (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
    ):
        parts = ["heads head_dim", "kv_heads head_dim", "kv_heads head_dim"]
        parts[number] = f">{parts[number]}"
        multi_query = f"({' | '.join(parts)})"
        by_head = f"(heads qkv={number} head_dim)"
        parameters[f"attn.{projection}.weight"] = Parameter(
            f"{heads} head_dim embed <- attn.c_attn.weight: {multi_query} embed",
            condition=HAS_MULTI_QUERY,
            else_row=f"heads head_dim embed <- attn.c_attn.weight: {by_head} embed",
        )
        parameters[f"attn.{projection}.bias"] = Parameter(
            f"{heads} head_dim <- attn.c_attn.bias: {multi_query}",
            condition=HAS_MULTI_QUERY,
            else_row=f"heads head_dim <- attn.c_attn.bias: {by_head}",
        )
    return parameters


PARAMETERS = {
    **embedding("tokens", "vocab embed <- wte.weight: vocab embed"),
    **embedding("positions", "positions embed <- wpe.weight: positions embed"),
    **stack("layers", "h.{layers}", {
        **layer_norm("attn_norm", "embed <- ln_1.weight: embed"),
        **_fused_qkv(),
        **linear("attn.o", "embed heads head_dim <- attn.c_proj.weight: embed (heads head_dim)"),
        **layer_norm("mlp_norm", "embed <- ln_2.weight: embed"),
        **linear("mlp.up", "mlp embed <- mlp.c_fc.weight: mlp embed"),
        **linear("mlp.down", "embed mlp <- mlp.c_proj.weight: embed mlp"),
    }),
    **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
FAMILY = build_family(
    name="gpt_bigcode",
    prefix="transformer.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=True,
    dropped=_gpt_style.mask_buffers("h.{i}.attn"),
    dropout_fields=DropoutFields(
        attention=("attn_pdrop", 0.1), residual=("resid_pdrop", 0.1), embedding=("embd_pdrop", 0.1)
    ),
)
