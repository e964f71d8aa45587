"""GPT-2: learned positions, biases everywhere; its matrices are stored [in, out], queries, keys and values as one."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import Traits, only_knows
from trainer.models.families import _gpt_style
from trainer.models.layouts import hf_flax
from trainer.models.parameters import Config
from trainer.models.rows import embedding, family, fused_qkv, layer_norm, linear, matrix, stack

BY_DEPTH = "scale_attn_by_inverse_layer_idx"


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GPT2Config's defaults where a field is absent."""
    return _gpt_style.sizes(config, vocab=50257, positions=1024, embed=768, layers=12, heads=12)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else.

    `reorder_and_upcast_attn` asks for scores in float32, which they always are here.
    """
    only_knows(config, BY_DEPTH)
    found = dataclasses.replace(_gpt_style.traits(config, sizes(config)), scores_by_depth=bool(config.get(BY_DEPTH)))
    return found if config.get("scale_attn_weights", True) else dataclasses.replace(found, score_scale=1.0)


TABLE = {
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
MASKS, FLAX = _gpt_style.masks("h.{i}.attn"), hf_flax(TABLE, "transformer.", ties=True, unread=(BY_DEPTH,))
FAMILY = family("gpt2", "transformer.", sizes, traits, TABLE, tied=True, dropped=MASKS, layouts=FLAX)
