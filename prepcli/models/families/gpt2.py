"""GPT-2: learned positions, biases on all matrices, fused QKV. Matrices are stored as [in, out]."""

from __future__ import annotations

import dataclasses
import math

from prepcli.models.architecture import ArchConfig, reject_unsupported_fields
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style
from prepcli.models.layouts import hf_flax_layout
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.parameters import HFConfig
from prepcli.models.rows import (
    build_family,
    embedding,
    fused_qkv,
    layer_norm,
    linear,
    matrix,
    stack,
)

INVERSE_LAYER_SCALE_FIELD = "scale_attn_by_inverse_layer_idx"


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GPT2Config."""
    return _gpt_style.sizes(config, vocab=50257, positions=1024, embed=768, layers=12, heads=12)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported.

    `reorder_and_upcast_attn` asks for attention scores in float32. The trainer always computes them
    so.
    """
    reject_unsupported_fields(config, INVERSE_LAYER_SCALE_FIELD)
    axis_sizes = sizes(config)
    arch = _gpt_style.arch_config(config, axis_sizes)
    # GPT-2 scales the initial weights before each residual sum: a layer has two such sums.
    residual_std = arch.init_std / math.sqrt(2 * axis_sizes["layers"])
    arch = dataclasses.replace(
        arch,
        scale_attn_by_inverse_layer_idx=bool(config.get(INVERSE_LAYER_SCALE_FIELD)),
        leaf_init_stds=(("attn.o.weight", residual_std), ("mlp.down.weight", residual_std)),
    )
    if config.get("scale_attn_weights", True):
        return arch
    return dataclasses.replace(arch, attn_scale=1.0)


PARAMETERS = {
    **embedding("tokens", "vocab embed <- wte.weight: vocab embed"),
    **embedding("positions", "positions embed <- wpe.weight: positions embed"),
    **stack("layers", "h.{layers}", {
        **layer_norm("attn_norm", "embed <- ln_1.weight: embed"),
        # The parts are consecutive. With 2 heads of 4 elements, columns 0 to 7 are the queries of both
        # heads, 8 to 15 the keys, and 16 to 23 the values.
        **fused_qkv("attn.c_attn", "embed (qkv={} heads head_dim)"),
        **linear("attn.o", "embed heads head_dim <- attn.c_proj.weight: (heads head_dim) embed"),
        **layer_norm("mlp_norm", "embed <- ln_2.weight: embed"),
        **linear("mlp.up", "mlp embed <- mlp.c_fc.weight: embed mlp"),
        **linear("mlp.down", "embed mlp <- mlp.c_proj.weight: mlp embed"),
    }),
    **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
LEGACY_BUFFERS = _gpt_style.mask_buffers("h.{i}.attn")
LAYOUTS = {
    **hf_flax_layout(
        PARAMETERS,
        prefix="transformer.",
        allows_tied_head=True,
        # The Flax class computes the same scores with and without this field.
        ignored_fields=(INVERSE_LAYER_SCALE_FIELD,),
    ),
    # The class in Levanter has only stacked layers, and no head.
    "levanter": levanter_layouts(PARAMETERS, layers_module="blocks", has_head=False)["levanter"],
}
FAMILY = build_family(
    name="gpt2",
    prefix="transformer.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=True,
    dropped=LEGACY_BUFFERS,
    layouts=LAYOUTS,
    dropout_fields=DropoutFields(
        attention=("attn_pdrop", 0.1), residual=("resid_pdrop", 0.1), embedding=("embd_pdrop", 0.1)
    ),
)
