"""Gemma 3, its text model: Gemma 2 with norms of queries and keys; layers with a window rotate otherwise."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer import llama_like
from trainer.errors import PrepError
from trainer.rope import Rope, read_rope
from trainer.table import Config, Family, size
from trainer.traits import KINDS, Traits, activation, cap, only_knows, positive, sliding_windows


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; Gemma3TextConfig's defaults where a field is absent."""
    return llama_like.sizes(config, vocab=262208, embed=2304, mlp=9216, layers=26, heads=8, kv_heads=4, head_dim=256)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    known = ("final_logit_softcapping", "rope_local_base_freq", "sliding_window_pattern", "query_pre_attn_scalar")
    only_knows(config, "attention_bias", "layer_types", "sliding_window", *known)
    found = sizes(config)
    every = size(config, "sliding_window_pattern", size(config, "_sliding_window_pattern", 6))
    window = config.get("sliding_window", 4096)
    return dataclasses.replace(
        llama_like.traits({**config, "rope_scaling": None, "rope_parameters": None}, found, positions=131072),
        norm="rms_offset",
        activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        residual="sandwich",
        embed_scale=found["embed"] ** 0.5,
        score_scale=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        windows=sliding_windows(config, found["layers"], window, lambda layer: (layer + 1) % every != 0),
        rope=_rope(config, "full_attention", "rope_theta", 1e6),
        local_rope=_rope(config, "sliding_attention", "rope_local_base_freq", 1e4),
        logit_cap=cap(config, "final_logit_softcapping", None),
    )


def _rope(config: Config, kind: str, theta: str, default: float) -> Rope:
    """The rotation of a kind of layer: in a dict for each since transformers 5; before, scaling was of full attention
    alone."""
    each, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    own: Any = each.get(kind) or {} if isinstance(each, dict) and {*each} <= {*KINDS} else None
    if not isinstance(own, dict) or not isinstance(scaling, dict):
        why = f"rope_parameters is {each!r:.60}, it has to have an object for each of {' and '.join(KINDS)}"
        raise PrepError("config.json makes no sense", f"{why}; rope_scaling is {scaling!r:.60}, an object of its own")
    merged = {**own, **scaling} if kind == "full_attention" else own
    merged = {"rope_theta": config.get(theta, default), "rope_parameters": merged}
    positions = size(config, "max_position_embeddings", 131072)
    return read_rope(merged, sizes(config)["head_dim"], positions)


FAMILY = Family(
    name="gemma3_text",
    prefix=llama_like.PREFIX,
    unprefixed=llama_like.UNPREFIXED,
    sizes=sizes,
    table={
        **llama_like.EMBEDDING,
        **llama_like.norms(llama_like.SANDWICH_NORMS),
        **llama_like.attention(bias="attention_bias", out_bias="attention_bias"),
        **llama_like.HEAD_NORMS,
        **llama_like.gated(),
        **llama_like.END,
    },
    dropped=llama_like.OLD_BUFFERS,
    tie=llama_like.tie(default=True),
    traits=traits,
)
