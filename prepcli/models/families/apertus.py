"""Apertus: LLaMA with norms of queries and keys, and an MLP of two matrices with xIELU."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import unsupported_config_error
from prepcli.core.json_values import JsonObject
from prepcli.models.architecture import ROPE_FIELDS, XIELU, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, Parameter, if_set, read_size
from prepcli.models.rope_config import Rope, read_rope
from prepcli.models.rows import matrix

MAX_POSITIONS = 65536
ROPE_THETA = 12e6
BIAS = if_set("attention_bias")
ROPE_PARAMETERS: JsonObject = {
    "rope_type": "llama3",
    "rope_theta": ROPE_THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of ApertusConfig."""
    return _llama_style.sizes(config, vocab=131072, mlp=14336)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias")
    activation = config.get("hidden_act", XIELU)
    if activation != XIELU:
        why = f"hidden_act of config.json; supported: {XIELU}"
        raise unsupported_config_error(f"activation `{activation!s:.60}` is not supported", why)
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            MAX_POSITIONS,
            rope=_read_rope(config, axis_sizes["head_dim"]),
            activation=XIELU,
            norm_eps=("rms_norm_eps", 1e-5),
        ),
        has_gated_mlp=False,
    )


def _read_rope(config: HFConfig, head_dim: int) -> Rope:
    """Read the rotary embedding. A config without a scaling has the one of ApertusConfig."""
    max_positions = read_size(config, "max_position_embeddings", MAX_POSITIONS)
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": ROPE_PARAMETERS}
    return read_rope(config, head_dim, max_positions=max_positions, default_theta=ROPE_THETA)


FAMILY = _llama_style.build_family(
    name="apertus",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.rms_norms(attn_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
        **_llama_style.attention(bias=BIAS, out_bias=BIAS),
        **_llama_style.QK_NORMS,
        **_llama_style.plain_mlp(),
        **matrix("mlp.xielu_alpha_p", " <- mlp.act_fn.alpha_p: 1"),
        **matrix("mlp.xielu_alpha_n", " <- mlp.act_fn.alpha_n: 1"),
        "mlp.xielu_beta.scale": Parameter(" <- mlp.act_fn.beta:"),
        "mlp.xielu_eps.scale": Parameter(" <- mlp.act_fn.eps:"),
    },
)
