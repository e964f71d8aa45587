"""Mamba-2: layers of one recurrent mixer each, without attention and MLP."""

from __future__ import annotations

import dataclasses

from trainer.models import rows
from trainer.models.architecture import (
    FULL_ATTENTION,
    ArchConfig,
    read_activation,
    read_positive,
    reject_unsupported_fields,
)
from trainer.models.families import _hybrid_style, _llama_style
from trainer.models.mixer_config import InitialSteps
from trainer.models.parameters import MAX_LAYERS, HFConfig, if_set, read_size
from trainer.models.rows import embedding, rms_norm, stack, unless_false


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Mamba2Config."""
    embed = read_size(config, "hidden_size", 4096)
    return {
        "vocab": read_size(config, "vocab_size", 32768),
        "layers": read_size(config, "num_hidden_layers", 64, MAX_LAYERS),
        "embed": embed,
        **_hybrid_style.read_mamba2_sizes(
            config,
            embed=embed * read_size(config, "expand", 2),
            heads=("num_heads", 128),
            head_dim=("head_dim", 64),
            groups=("n_groups", 8),
            state=("state_size", 128),
            kernel=("conv_kernel", 4),
        ),
    }


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config)
    layers = sizes(config)["layers"]
    steps = InitialSteps(
        minimum=read_positive(config, "time_step_min", 0.001),
        maximum=read_positive(config, "time_step_max", 0.1),
        floor=read_positive(config, "time_step_floor", 1e-4),
    )
    return ArchConfig(
        norm="rms",
        norm_eps=read_positive(config, "layer_norm_epsilon", 1e-5),
        activation=read_activation(config, "hidden_act", "silu"),
        has_gated_mlp=False,
        attn_scale=1.0,
        sliding_windows=(FULL_ATTENTION,) * layers,
        rope=None,
        max_positions=0,
        init_std=read_positive(config, "initializer_range", 0.1),
        mixer=dataclasses.replace(_hybrid_style.read_mamba2(config), initial_steps=steps),
        mixer_layers=tuple(range(layers)),
    )


FAMILY = rows.build_family(
    name="mamba2",
    prefix="backbone.",
    sizes=sizes,
    arch_config=arch_config,
    parameters={
        **embedding("tokens", "vocab embed <- embeddings.weight: vocab embed"),
        **stack(
            "layers",
            "layers.{layers}",
            {
                **rms_norm("attn_norm", "embed <- norm.weight: embed"),
                **_hybrid_style.mamba2(
                    "mixer", bias=if_set("use_bias"), conv_bias=unless_false("use_conv_bias")
                ),
            },
        ),
        **rms_norm("final_norm", "embed <- norm_f.weight: embed"),
        **_llama_style.HEAD,
    },
    tied_by_default=False,
    dropped={},
)
