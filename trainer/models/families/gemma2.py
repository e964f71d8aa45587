"""Gemma 2: Gemma with norms around each part, bounded scores and logits, and a window in every other layer."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ROPE, Traits, cap, only_knows, positive, sliding_windows
from trainer.models.families import _llama_style
from trainer.models.parameters import Config


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; Gemma2Config's defaults where a field is absent."""
    return _llama_style.sizes(config, vocab=256000, embed=2304, mlp=9216, layers=26, heads=8, kv_heads=4, head_dim=256)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    only_knows(config, *ROPE, "attention_bias", "layer_types", "query_pre_attn_scalar", "sliding_window", *caps)
    found = sizes(config)
    return dataclasses.replace(
        _llama_style.traits(config, found, positions=8192, act=("hidden_activation", "gelu_pytorch_tanh")),
        norm="rms_offset",
        residual="sandwich",
        embed_scale=found["embed"] ** 0.5,
        score_scale=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        windows=sliding_windows(
            config, found["layers"], config.get("sliding_window", 4096), lambda layer: layer % 2 == 0
        ),
        score_cap=cap(config, "attn_logit_softcapping", 50.0),
        logit_cap=cap(config, "final_logit_softcapping", 30.0),
    )


FAMILY = _llama_style.family(
    name="gemma2",
    sizes=sizes,
    traits=traits,
    tied=True,
    layer={
        **_llama_style.SANDWICH_NORMS,
        **_llama_style.attention(bias="attention_bias", out_bias="attention_bias"),
        **_llama_style.gated(),
    },
)
