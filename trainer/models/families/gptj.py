"""GPT-J: attention and feed-forward side by side under one norm, rotary positions of neighbours, a head with a bias."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import Traits, only_knows
from trainer.models.families import _gpt_style
from trainer.models.layouts import hf_flax
from trainer.models.parameters import Config, size
from trainer.models.rope_config import Rope, turning
from trainer.models.rows import attention, embedding, family, layer_norm, linear, stack


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GPTJConfig's defaults where a field is absent."""
    return _gpt_style.sizes(config, vocab=50400, positions=2048, embed=4096, layers=28, heads=16)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config)
    found = sizes(config)
    rotary_dim = turning(size(config, "rotary_dim", 64), found["head_dim"], "rotary_dim")
    return dataclasses.replace(
        _gpt_style.traits(config, found),
        residual="parallel_one_norm",
        rope=Rope(rotary_dim, 10_000.0, found["positions"]),
        rotary_pairs="neighbours",
    )


TABLE = {
    **embedding("tokens", "vocab embed <- wte.weight: vocab embed"),
    **stack("layers", "h.{layers}", {
        **layer_norm("attn_norm", "embed <- ln_1.weight: embed"),
        **attention("attn.{}_proj", out="out"),
        **linear("mlp.up", "mlp embed <- mlp.fc_in.weight: mlp embed"),
        **linear("mlp.down", "embed mlp <- mlp.fc_out.weight: embed mlp"),
    }),
    **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
    **linear("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
MASKS, FLAX = _gpt_style.masks("h.{i}.attn"), hf_flax(TABLE, "transformer.")
FAMILY = family("gptj", "transformer.", sizes, traits, TABLE, tied=False, dropped=MASKS, layouts=FLAX)
