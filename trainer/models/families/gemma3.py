"""Gemma 3, its text model: Gemma 2 with norms of queries and keys; layers with a window rotate otherwise."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer.models.architecture import KINDS, ROPE, Traits, cap, only_knows, positive, sliding_windows
from trainer.models.families import _llama_style
from trainer.models.parameters import Config, size
from trainer.models.rope_config import Rope, read_rope_of

ACT = ("hidden_activation", "gelu_pytorch_tanh")


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; Gemma3TextConfig's defaults where a field is absent."""
    return _llama_style.sizes(config, vocab=262208, embed=2304, mlp=9216, layers=26, heads=8, kv_heads=4, head_dim=256)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    known = ("final_logit_softcapping", "rope_local_base_freq", "sliding_window_pattern", "query_pre_attn_scalar")
    only_knows(config, *ROPE, "attention_bias", "layer_types", "sliding_window", *known)
    found = sizes(config)
    every = size(config, "sliding_window_pattern", 6)  # not `_sliding_window_pattern`, which nothing reads
    window = config.get("sliding_window", 4096)
    return dataclasses.replace(
        _llama_style.traits(
            config, found, 131072, rope=_rope(config, KINDS[0], config.get("rope_theta", 1e6)), act=ACT
        ),
        norm="rms_offset",
        residual="sandwich",
        embed_scale=found["embed"] ** 0.5,
        score_scale=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        windows=sliding_windows(config, found["layers"], window, lambda layer: (layer + 1) % every != 0),
        local_rope=_rope(config, KINDS[1], config.get("rope_local_base_freq", 1e4)),
        logit_cap=cap(config, "final_logit_softcapping", None),
    )


def _rope(config: Config, kind: str, theta: Any) -> Rope:
    positions = size(config, "max_position_embeddings", 131072)
    return read_rope_of(config, kind, KINDS, theta, sizes(config)["head_dim"], positions)


FAMILY = _llama_style.family(
    name="gemma3_text",
    sizes=sizes,
    traits=traits,
    tied=True,
    layer={
        **_llama_style.SANDWICH_NORMS,
        **_llama_style.attention(bias="attention_bias", out_bias="attention_bias"),
        **_llama_style.HEAD_NORMS,
        **_llama_style.gated(),
    },
)
