"""Qwen3-Next: gated delta nets and gated attention, with experts in place of most MLPs."""

from __future__ import annotations

import dataclasses

from prepcli.algebra.axis_map import ATTENTION_LAYERS, DENSE_LAYERS, MIXER_LAYERS, SPARSE_LAYERS
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _grouped_style, _llama_style, _moe_style, _qwen_hybrid_style
from prepcli.models.families._grouped_style import LayerGroup
from prepcli.models.families._hybrid_style import FULL, LINEAR, layers_of_type
from prepcli.models.moe_config import Router
from prepcli.models.parameters import HFConfig, read_size


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Qwen3NextConfig."""
    axis_sizes = _llama_style.sizes(
        config,
        vocab=151936,
        embed=2048,
        mlp=5632,
        layers=48,
        heads=16,
        kv_heads=2,
        head_dim=256,
    )
    return {
        **axis_sizes,
        **_qwen_hybrid_style.mixer_sizes(config),
        "mlp": read_size(config, "moe_intermediate_size", 512),
        "dense_mlp": axis_sizes["mlp"],
        "shared_mlp": read_size(config, "shared_expert_intermediate_size", 512),
        "experts": read_size(config, "num_experts", 512),
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    return _moe_style.read_dense_layers_by_step(config, _num_layers(config))


def sparse_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with experts."""
    dense = dense_layers(config)
    return tuple(layer for layer in range(_num_layers(config)) if layer not in dense)


def _num_layers(config: HFConfig) -> int:
    return read_size(config, "num_hidden_layers", 48)


def linear_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a gated delta net."""
    return layers_of_type(_qwen_hybrid_style.layer_types(config, 48), LINEAR)


def attention_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with attention."""
    return layers_of_type(_qwen_hybrid_style.layer_types(config, 48), FULL)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    moe_fields = ("num_experts", "mlp_only_layers")
    reject_unsupported_fields(config, *ROPE_FIELDS, *_qwen_hybrid_style.FIELDS, *moe_fields)
    axis_sizes = sizes(config)
    dense = dense_layers(config)
    _moe_style.layer_sizes(axis_sizes["layers"], dense)
    return dataclasses.replace(
        _qwen_hybrid_style.arch_config(config, axis_sizes, linear_layers(config)),
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=10
        ),
        router=Router(is_normalized=bool(config.get("norm_topk_prob", True))),
        dense_layers=dense,
    )


FAMILY = _grouped_style.build_family(
    name="qwen3_next",
    sizes=sizes,
    arch_config=arch_config,
    layer=_llama_style.PRE_NORMS,
    groups={
        ATTENTION_LAYERS: LayerGroup(_qwen_hybrid_style.gated_attention(), attention_layers),
        MIXER_LAYERS: LayerGroup(
            _qwen_hybrid_style.gated_delta(_qwen_hybrid_style.FUSED_PROJECTIONS), linear_layers
        ),
        DENSE_LAYERS: LayerGroup(_moe_style.DENSE_MLP, dense_layers, may_be_all=False),
        SPARSE_LAYERS: LayerGroup(_moe_style.GATED_SHARED_EXPERTS, sparse_layers),
    },
)
