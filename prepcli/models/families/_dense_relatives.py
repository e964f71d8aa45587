"""Choices and rows of dense families that families with experts share. No I/O, no jax."""

from __future__ import annotations

from functools import partial

from prepcli.models.declaration import Choices, Sizes
from prepcli.models.families import exaone4, granite, granite_swa, hunyuan_v1_dense
from prepcli.models.parameters import HFConfig, read_size
from prepcli.models.rope_config import Rope, read_rope
from prepcli.models.rows import Parameters

SINKS: Parameters = granite_swa.SINKS


def _granite(field: str, config: HFConfig, sizes: Sizes) -> object:
    return getattr(granite.scaled_arch_config(config, sizes), field)


GRANITE_FACTORS: Choices = {
    field: partial(_granite, field)
    for field in ("attn_scale", "embed_scale", "residual_scale", "lm_head_input_scale")
}


def windows_and_sinks(max_positions: int) -> Choices:
    """Return the choices of Granite with windows: sinks, and a rotary base for each type of layer."""

    def read(field: str, config: HFConfig, sizes: Sizes) -> object:
        plain = granite.scaled_arch_config(config, sizes)
        arch = granite_swa.with_windows_and_sinks(plain, config, sizes, max_positions)
        return getattr(arch, field)

    fields = ("rope", "local_rope", "layers_without_rope", "sliding_windows", "has_attention_sinks")
    return {field: partial(read, field) for field in fields}


def read_static_rope(config: HFConfig, sizes: Sizes, max_positions: int = 2048) -> Rope:
    """Return the rotary embedding of Hunyuan, with a base of frequencies in place of `alpha`."""
    return read_rope(
        hunyuan_v1_dense.with_static_rope(config, sizes["head_dim"]),
        sizes["head_dim"],
        max_positions=read_size(config, "max_position_embeddings", max_positions),
    )


EXAONE4_WINDOWS: Choices = {
    "sliding_windows": lambda config, sizes: (
        exaone4.windowed_arch_config(config, sizes).sliding_windows
    ),
    "layers_without_rope": lambda config, sizes: (
        exaone4.windowed_arch_config(config, sizes).layers_without_rope
    ),
}
