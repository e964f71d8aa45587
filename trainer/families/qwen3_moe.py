"""Qwen3's mixtures: as Qwen3, with many small experts in each layer."""

from __future__ import annotations

import dataclasses

from trainer import llama_like
from trainer.errors import PrepError
from trainer.table import Config, size
from trainer.traits import ROPE, Traits, only_knows, sliding_windows


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; Qwen3MoeConfig's defaults where a field is absent. `intermediate_size` is of layers without
    experts, which are refused."""
    found = llama_like.sizes(config, vocab=151936, embed=2048, layers=24, kv_heads=4)
    return {
        **found,
        "mlp": size(config, "moe_intermediate_size", 768),
        "experts": size(config, "num_experts", size(config, "num_local_experts", 128)),
        "gate_up": 2,
    }


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, *ROPE, "attention_bias", "sliding_window", "num_experts", "num_local_experts")
    if size(config, "decoder_sparse_step", 1) != 1:
        step = config["decoder_sparse_step"]
        raise PrepError("`decoder_sparse_step` is not known", f"it is {step}; prep has experts in every layer")
    found = sizes(config)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return dataclasses.replace(
        llama_like.traits(config, found, positions=32768),
        windows=sliding_windows(config, found["layers"], window, lambda layer: True),
        experts_per_token=llama_like.experts_per_token(config, found["experts"], default=8),
        experts_sum_to_one=bool(config.get("norm_topk_prob", False)),
    )


FAMILY = llama_like.family(
    name="qwen3_moe",
    sizes=sizes,
    traits=traits,
    tied=False,
    layer={
        **llama_like.NORMS,
        **llama_like.attention(bias="attention_bias", out_bias="attention_bias"),
        **llama_like.HEAD_NORMS,
        **llama_like.experts(
            gate="mlp.experts.{experts}.gate_proj.weight",
            up="mlp.experts.{experts}.up_proj.weight",
            down="mlp.experts.{experts}.down_proj.weight",
            router="mlp.gate.weight",
        ),
    },
)
