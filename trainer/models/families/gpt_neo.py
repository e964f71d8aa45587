"""GPT-Neo: learned positions, global and local attention in turn, no scale and no bias on queries, keys and values."""

from __future__ import annotations

import contextlib
import dataclasses
from itertools import islice
from typing import Any

from trainer.models.architecture import Traits, only_knows, windows_of
from trainer.models.families import _gpt_style
from trainer.models.layouts import hf_flax
from trainer.models.parameters import MOST_LAYERS, Config, size
from trainer.models.rows import attention, embedding, family, layer_norm, linear, matrix, stack

NAMES = {"layers": "num_layers", "heads": "num_heads", "mlp": "intermediate_size"}


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GPTNeoConfig's defaults where a field is absent."""
    return _gpt_style.sizes(config, vocab=50257, positions=2048, embed=2048, layers=24, heads=16, names=NAMES)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, "attention_layers", "attention_types")
    window, found = size(config, "window_size", 256), sizes(config)
    windows = windows_of(_kinds(config), ("global", "local"), found["layers"], window, "attention_types")
    return dataclasses.replace(_gpt_style.traits(config, found), score_scale=1.0, windows=windows)


def _kinds(config: Config) -> Any:
    """Of each layer; `attention_layers` wins over `attention_types`, as in transformers."""
    pattern = config.get("attention_types") or [[["global", "local"], 12]]
    with contextlib.suppress(TypeError, ValueError):
        kinds = (kind for kinds, times in pattern if kinds for _ in range(times) for kind in kinds)
        return config.get("attention_layers") or list(islice(kinds, MOST_LAYERS + 1))
    return pattern


TABLE = {
    **embedding("tokens", "vocab embed <- wte.weight: vocab embed"),
    **embedding("positions", "positions embed <- wpe.weight: positions embed"),
    **stack("layers", "h.{layers}", {
        **layer_norm("attn_norm", "embed <- ln_1.weight: embed"),
        **attention("attn.attention.{}_proj", out="out", out_bias=""),
        **layer_norm("mlp_norm", "embed <- ln_2.weight: embed"),
        **linear("mlp.up", "mlp embed <- mlp.c_fc.weight: mlp embed"),
        **linear("mlp.down", "embed mlp <- mlp.c_proj.weight: embed mlp"),
    }),
    **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
MASKS, FLAX = _gpt_style.masks("h.{i}.attn.attention"), hf_flax(TABLE, "transformer.", ties=True)
FAMILY = family("gpt_neo", "transformer.", sizes, traits, TABLE, tied=True, dropped=MASKS, layouts=FLAX)
