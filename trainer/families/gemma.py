"""Gemma 1: LLaMA with scaled embeddings, norms that scale by 1 + weight, a tanh gelu, and a tied head."""

from __future__ import annotations

import dataclasses

from trainer import llama_like
from trainer.layouts import hf_flax
from trainer.table import Config
from trainer.traits import ROPE, Traits, only_knows

TANH = "gelu_pytorch_tanh"


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GemmaConfig's defaults where a field is absent."""
    return llama_like.sizes(config, vocab=256000, embed=3072, mlp=24576, layers=28, heads=16, kv_heads=16, head_dim=256)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, *ROPE, "attention_bias")
    found = sizes(config)
    if config.get("hidden_act") == "gelu":
        config = {**config, "hidden_act": TANH}  # what its first configs meant
    return dataclasses.replace(
        llama_like.traits(config, found, positions=8192, act=("hidden_act", TANH)),
        norm="rms_offset",
        embed_scale=found["embed"] ** 0.5,
    )


FAMILY = llama_like.family(
    name="gemma",
    sizes=sizes,
    traits=traits,
    tied=True,
    layer={
        **llama_like.NORMS,
        **llama_like.attention(bias="attention_bias", out_bias="attention_bias"),
        **llama_like.gated(),
    },
    layouts=lambda table: hf_flax(table, llama_like.PREFIX, norm="weight", ties=True),
)
