"""Mixtral: Mistral with a few large experts in each layer."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ROPE, Traits, only_knows, positive, same_window
from trainer.models.families import _llama_style
from trainer.models.parameters import Config, size


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; MixtralConfig's defaults where a field is absent."""
    experts = size(config, "num_experts", size(config, "num_local_experts", 8))  # of both the alias wins
    return {**_llama_style.sizes(config, mlp=14336, kv_heads=8), "experts": experts, "gate_up": 2}


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, *ROPE, "sliding_window", "layer_types", "num_local_experts", "num_experts")
    found = sizes(config)
    return dataclasses.replace(
        _llama_style.traits(config, found, positions=131072, theta=1e6),
        norm_eps=positive(config, "rms_norm_eps", 1e-5),
        windows=same_window(found["layers"], config.get("sliding_window")),
        experts_per_token=_llama_style.experts_per_token(config, found["experts"], default=2),
    )


FAMILY = _llama_style.family(
    name="mixtral",
    sizes=sizes,
    traits=traits,
    tied=False,
    layer={
        **_llama_style.NORMS,
        **_llama_style.attention(),
        **_llama_style.experts(
            gate="block_sparse_moe.experts.{experts}.w1.weight",
            up="block_sparse_moe.experts.{experts}.w3.weight",
            down="block_sparse_moe.experts.{experts}.w2.weight",
            router="block_sparse_moe.gate.weight",
        ),
    },
)
