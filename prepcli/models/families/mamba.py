"""Mamba: layers of one selective scan each, without attention and MLP."""

from __future__ import annotations

from prepcli.models.architecture import ArchConfig
from prepcli.models.families import _hybrid_style
from prepcli.models.mixer_config import Mixer
from prepcli.models.parameters import MAX_LAYERS, HFConfig, if_set, read_size
from prepcli.models.rows import unless_false


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of MambaConfig."""
    embed = read_size(config, "hidden_size", 768)
    expanded = embed * read_size(config, "expand", 2)
    return {
        "vocab": read_size(config, "vocab_size", 50280),
        "layers": read_size(config, "num_hidden_layers", 32, MAX_LAYERS),
        "embed": embed,
        **_hybrid_style.read_mamba_sizes(
            config,
            embed=embed,
            channels=read_size(config, "intermediate_size", expanded),
            state=("state_size", 16),
            kernel=("conv_kernel", 4),
            rank="time_step_rank",
        ),
    }


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    mixer = Mixer("mamba", initial_steps=_hybrid_style.read_initial_steps(config))
    return _hybrid_style.mixer_arch_config(config, sizes(config)["layers"], mixer)


FAMILY = _hybrid_style.build_mixer_family(
    name="mamba",
    sizes=sizes,
    arch_config=arch_config,
    mixer=_hybrid_style.mamba(
        "mixer", bias=if_set("use_bias"), conv_bias=unless_false("use_conv_bias")
    ),
    tied_by_default=True,
)
