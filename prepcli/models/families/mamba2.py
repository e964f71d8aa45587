"""Mamba-2: layers of one recurrent mixer each, without attention and MLP."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ArchConfig
from prepcli.models.families import _hybrid_style
from prepcli.models.parameters import MAX_LAYERS, HFConfig, if_set, read_size
from prepcli.models.rows import unless_false


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
    steps = _hybrid_style.read_initial_steps(config)
    mixer = dataclasses.replace(_hybrid_style.read_mamba2(config), initial_steps=steps)
    return _hybrid_style.mixer_arch_config(config, sizes(config)["layers"], mixer)


FAMILY = _hybrid_style.build_mixer_family(
    name="mamba2",
    sizes=sizes,
    arch_config=arch_config,
    mixer=_hybrid_style.mamba2(
        "mixer",
        bias=if_set("use_bias"),
        out_bias=if_set("use_bias"),
        conv_bias=unless_false("use_conv_bias"),
    ),
    tied_by_default=False,
)
