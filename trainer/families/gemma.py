"""Gemma 1: LLaMA with scaled embeddings, norms that scale by 1 + weight, a tanh gelu, and a tied head."""

from __future__ import annotations

import dataclasses

from trainer import llama_like
from trainer.table import Config, Family
from trainer.traits import Traits, activation, only_knows


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GemmaConfig's defaults where a field is absent."""
    return llama_like.sizes(config, vocab=256000, embed=3072, mlp=24576, layers=28, heads=16, kv_heads=16, head_dim=256)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, "attention_bias")
    found = sizes(config)
    named = activation(config, "hidden_act", "gelu_pytorch_tanh")
    return dataclasses.replace(
        llama_like.traits(config, found, positions=8192),
        norm="rms_offset",
        activation="gelu_pytorch_tanh" if named == "gelu" else named,  # what its first configs meant
        embed_scale=found["embed"] ** 0.5,
    )


FAMILY = Family(
    name="gemma",
    prefix=llama_like.PREFIX,
    unprefixed=llama_like.UNPREFIXED,
    sizes=sizes,
    table={
        **llama_like.EMBEDDING,
        **llama_like.NORMS,
        **llama_like.attention(bias="attention_bias", out_bias="attention_bias"),
        **llama_like.gated(),
        **llama_like.END,
    },
    dropped=llama_like.OLD_BUFFERS,
    tie=llama_like.tie(default=True),
    traits=traits,
)
