"""Gemma 1: LLaMA with scaled embeddings, norms that scale by 1 + weight, a tanh gelu, and a tied head."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ROPE, Traits, only_knows
from trainer.models.families import _llama_style
from trainer.models.layouts import hf_flax
from trainer.models.parameters import Config

TANH = "gelu_pytorch_tanh"


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GemmaConfig's defaults where a field is absent."""
    return _llama_style.sizes(
        config, vocab=256000, embed=3072, mlp=24576, layers=28, heads=16, kv_heads=16, head_dim=256
    )


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, *ROPE, "attention_bias")
    found = sizes(config)
    if config.get("hidden_act") == "gelu":
        config = {**config, "hidden_act": TANH}  # what its first configs meant
    return dataclasses.replace(
        _llama_style.traits(config, found, positions=8192, act=("hidden_act", TANH)),
        norm="rms_offset",
        embed_scale=found["embed"] ** 0.5,
    )


FAMILY = _llama_style.family(
    name="gemma",
    sizes=sizes,
    traits=traits,
    tied=True,
    layer={
        **_llama_style.NORMS,
        **_llama_style.attention(bias="attention_bias", out_bias="attention_bias"),
        **_llama_style.gated(),
    },
    layouts=lambda table: hf_flax(table, _llama_style.PREFIX, norm="weight", ties=True),
)
