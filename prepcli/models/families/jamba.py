"""Jamba: Mamba in most layers, attention without rotation in some, and experts in every second layer."""

from __future__ import annotations

import dataclasses

from prepcli.algebra.axis_map import ATTENTION_LAYERS, DENSE_LAYERS, MIXER_LAYERS, SPARSE_LAYERS
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import ArchConfig, reject_unsupported_fields
from prepcli.models.families import _grouped_style, _hybrid_style, _llama_style
from prepcli.models.families._grouped_style import LayerGroup
from prepcli.models.mixer_config import Mixer
from prepcli.models.moe_config import Router
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rows import Parameters, matrix, rms_norm, unless_false

MAX_POSITIONS = 262_144


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of JambaConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=65536, embed=4096, mlp=14336, layers=32, heads=32, kv_heads=8
    )
    embed = axis_sizes["embed"]
    return {
        **axis_sizes,
        **_hybrid_style.read_mamba_sizes(
            config,
            embed=embed,
            channels=embed * read_size(config, "mamba_expand", 2),
            state=("mamba_d_state", 16),
            kernel=("mamba_d_conv", 4),
            rank="mamba_dt_rank",
        ),
        "experts": _read_num_experts(config),
        "gate_up": 2,
    }


def _read_num_experts(config: HFConfig) -> int:
    """Return the number of experts, 1 if all MLPs are dense. `num_local_experts` takes precedence."""
    return read_size(config, "num_local_experts", read_size(config, "num_experts", 16))


def attention_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with attention."""
    return _periodic_layers(config, "attn_layer", period=8, offset=4)


def mixer_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with Mamba."""
    return _other_layers(config, attention_layers(config))


def sparse_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with experts."""
    layers = _periodic_layers(config, "expert_layer", period=2, offset=1)
    if _read_num_experts(config) == 1:
        return ()
    return layers


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    return _other_layers(config, sparse_layers(config))


def _periodic_layers(config: HFConfig, field: str, *, period: int, offset: int) -> tuple[int, ...]:
    """Return the numbers of the layers at an offset in each period.

    Args:
        config: Content of a config.json.
        field: Start of the names of both fields.
        period: Default of the period.
        offset: Default of the offset.

    Raises:
        PrepError: The offset is not an integer from 0 to the period, exclusive.
    """
    period = read_size(config, f"{field}_period", period)
    first = config.get(f"{field}_offset", offset)
    if type(first) is not int or not 0 <= first < period:
        why = f"{field}_offset is {first!r:.60}, it must be an integer from 0 to {period - 1}"
        raise invalid_config_error(why)
    return tuple(range(_num_layers(config)))[first::period]


def _other_layers(config: HFConfig, layers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(layer for layer in range(_num_layers(config)) if layer not in layers)


def _num_layers(config: HFConfig) -> int:
    return read_size(config, "num_hidden_layers", 32)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, "num_experts", "num_local_experts")
    axis_sizes = sizes(config)
    sparse = sparse_layers(config)
    if len(sparse) == axis_sizes["layers"]:
        raise unsupported_config_error(
            "models without a dense MLP are not supported", "all layers have experts"
        )
    if not mixer_layers(config):
        raise unsupported_config_error(
            "models without Mamba are not supported", "all layers have attention"
        )
    experts_per_token = 0
    if sparse:
        experts_per_token = _llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=2
        )
    arch = _llama_style.arch_config(config, axis_sizes, max_positions=MAX_POSITIONS)
    return dataclasses.replace(
        arch,
        rope=None,
        mixer=Mixer("mamba"),
        mixer_layers=mixer_layers(config),
        experts_per_token=experts_per_token,
        router=Router(is_normalized=False),
        dense_layers=dense_layers(config) if sparse else (),
    )


def _dense_mlp() -> Parameters:
    """Return the parameters of a dense MLP. It is as wide as an expert."""
    row = "{0} <- feed_forward.{1}_proj.weight: {0}"
    return {
        **matrix("mlp.gate", row.format("mlp embed", "gate")),
        **matrix("mlp.up", row.format("mlp embed", "up")),
        **matrix("mlp.down", row.format("embed mlp", "down")),
    }


def _experts() -> Parameters:
    """Return the parameters of an MoE layer. The alternates are the fused tensors of transformers 5."""
    module = "feed_forward.experts"
    wide = f"experts mlp embed <- {module}.{{{{experts}}}}.{{}}_proj.weight: mlp embed"
    narrow = f"experts embed mlp <- {module}.{{experts}}.down_proj.weight: embed mlp"
    fused = f"experts mlp embed <- {module}.gate_up_proj: experts (gate_up={{}} mlp) embed"
    down = f"experts embed mlp <- {module}.down_proj: experts embed mlp"
    return {
        **matrix("mlp.router", "experts embed <- feed_forward.router.weight: experts embed"),
        **matrix("mlp.gate", wide.format("gate"), alternate=fused.format(0)),
        **matrix("mlp.up", wide.format("up"), alternate=fused.format(1)),
        **matrix("mlp.down", narrow, alternate=down),
    }


MIXER: Parameters = {
    **_hybrid_style.mamba(
        "mamba", bias=if_set("mamba_proj_bias"), conv_bias=unless_false("mamba_conv_bias")
    ),
    **rms_norm("mixer.q_norm", "mixer_state <- mamba.c_layernorm.weight: mixer_state"),
    **rms_norm("mixer.k_norm", "mixer_state <- mamba.b_layernorm.weight: mixer_state"),
    **rms_norm("mixer.dt_down_norm", "dt_rank <- mamba.dt_layernorm.weight: dt_rank"),
}

FAMILY = _grouped_style.build_family(
    name="jamba",
    sizes=sizes,
    arch_config=arch_config,
    layer=_llama_style.rms_norms(attn_norm="input_layernorm", mlp_norm="pre_ff_layernorm"),
    groups={
        ATTENTION_LAYERS: LayerGroup(_llama_style.attention(), attention_layers, may_be_all=False),
        MIXER_LAYERS: LayerGroup(MIXER, mixer_layers),
        DENSE_LAYERS: LayerGroup(_dense_mlp(), dense_layers),
        SPARSE_LAYERS: LayerGroup(_experts(), sparse_layers, may_be_all=False),
    },
    final_norm=_llama_style.rms_norms(final_norm="final_layernorm"),
)
