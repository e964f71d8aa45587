"""GPT-2: learned positions, biases everywhere; its matrices are stored [in, out], queries, keys and values as one."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ArchConfig, reject_unsupported_fields
from trainer.models.families import _gpt_style
from trainer.models.layouts import hf_flax_layout
from trainer.models.parameters import HFConfig
from trainer.models.rows import build_family, embedding, fused_qkv, layer_norm, linear, matrix, stack

INVERSE_LAYER_SCALE_FIELD = "scale_attn_by_inverse_layer_idx"


def sizes(config: HFConfig) -> dict[str, int]:
    """Atom -> extent; GPT2Config's defaults where a field is absent."""
    return _gpt_style.sizes(config, vocab=50257, positions=1024, embed=768, layers=12, heads=12)


def arch_config(config: HFConfig) -> ArchConfig:
    """What its layers compute; PrepError where the config asks for something else.

    `reorder_and_upcast_attn` asks for scores in float32, which they always are here.
    """
    reject_unsupported_fields(config, INVERSE_LAYER_SCALE_FIELD)
    found = dataclasses.replace(
        _gpt_style.arch_config(config, sizes(config)),
        scale_attn_by_inverse_layer_idx=bool(config.get(INVERSE_LAYER_SCALE_FIELD)),
    )
    return found if config.get("scale_attn_weights", True) else dataclasses.replace(found, attn_scale=1.0)


PARAMETERS = {
    **embedding("tokens", "vocab embed <- wte.weight: vocab embed"),
    **embedding("positions", "positions embed <- wpe.weight: positions embed"),
    **stack("layers", "h.{layers}", {
        **layer_norm("attn_norm", "embed <- ln_1.weight: embed"),
        **fused_qkv("attn.c_attn", "embed (qkv={} heads head_dim)"),
        **linear("attn.o", "embed heads head_dim <- attn.c_proj.weight: (heads head_dim) embed"),
        **layer_norm("mlp_norm", "embed <- ln_2.weight: embed"),
        **linear("mlp.up", "mlp embed <- mlp.c_fc.weight: embed mlp"),
        **linear("mlp.down", "embed mlp <- mlp.c_proj.weight: mlp embed"),
    }),
    **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
LEGACY_BUFFERS, LAYOUTS = (
    _gpt_style.mask_buffers("h.{i}.attn"),
    hf_flax_layout(PARAMETERS, "transformer.", allows_tied_head=True, ignored_fields=(INVERSE_LAYER_SCALE_FIELD,)),
)
FAMILY = build_family(
    "gpt2",
    "transformer.",
    sizes,
    arch_config,
    PARAMETERS,
    tied_by_default=True,
    dropped=LEGACY_BUFFERS,
    layouts=LAYOUTS,
)
