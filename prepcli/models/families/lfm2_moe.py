"""LFM2-MoE: LFM2 with experts in all layers but the first ones, chosen by corrected sigmoid scores."""

from __future__ import annotations

import dataclasses

from prepcli.algebra.axis_map import ATTENTION_LAYERS, DENSE_LAYERS, MIXER_LAYERS, SPARSE_LAYERS
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _grouped_style, _llama_style, _moe_style, lfm2
from prepcli.models.families._grouped_style import LayerGroup
from prepcli.models.moe_config import Router
from prepcli.models.parameters import HFConfig, read_count, read_size
from prepcli.models.rows import Parameters, linear, matrix, unless_false

# Added to the sum of the weights of a token, in `Lfm2MoeTopKRouter` of transformers.
WEIGHT_SUM_OFFSET = 1e-6


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Lfm2MoeConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=65536, embed=2048, mlp=7168, layers=32, heads=32, kv_heads=8
    )
    return {
        **axis_sizes,
        **lfm2.conv_sizes(config, axis_sizes["embed"]),
        "mlp": read_size(config, "moe_intermediate_size", 1792),
        "dense_mlp": axis_sizes["mlp"],
        "experts": read_size(config, "num_experts", 32),
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP: the first `num_dense_layers`."""
    count = read_count(config, "num_dense_layers", 2)
    return tuple(range(min(count, read_size(config, "num_hidden_layers", 32))))


def sparse_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with experts."""
    num_dense = len(dense_layers(config))
    return tuple(range(num_dense, read_size(config, "num_hidden_layers", 32)))


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, "layer_types", "num_experts", "routed_scaling_factor"
    )
    axis_sizes = sizes(config)
    dense = dense_layers(config)
    _moe_style.layer_sizes(axis_sizes["layers"], dense)
    scale = 1.0
    if config.get("routed_scaling_factor", 1.0) is not None:
        scale = read_positive(config, "routed_scaling_factor", 1.0)
    return dataclasses.replace(
        lfm2.conv_arch_config(config, axis_sizes),
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=4
        ),
        router=Router(
            scores="sigmoid",
            is_normalized=bool(config.get("norm_topk_prob", True)),
            scale=scale,
            weight_sum_offset=WEIGHT_SUM_OFFSET,
        ),
        dense_layers=dense,
    )


def _experts() -> Parameters:
    """Return the parameters of an MoE layer. The alternates are the fused tensors of transformers 5."""
    expert = "feed_forward.experts.{experts}"
    fused = "experts mlp embed <- feed_forward.experts.gate_up_proj: experts (gate_up={} mlp) embed"
    down = "experts embed mlp <- feed_forward.experts.down_proj: experts embed mlp"
    wide = "experts mlp embed <- {}.{}.weight: mlp embed"
    narrow = "experts embed mlp <- {}.{}.weight: embed mlp"
    return {
        **matrix("mlp.router", "experts embed <- feed_forward.gate.weight: experts embed"),
        "mlp.router.correction.bias": dataclasses.replace(
            _moe_style.correction("feed_forward.expert_bias: experts"),
            condition=unless_false("use_expert_bias"),
        ),
        **matrix("mlp.gate", wide.format(expert, "w1"), alternate=fused.format(0)),
        **matrix("mlp.up", wide.format(expert, "w3"), alternate=fused.format(1)),
        **matrix("mlp.down", narrow.format(expert, "w2"), alternate=down),
    }


DENSE_MLP: Parameters = {
    **linear("mlp.gate", "dense_mlp embed <- feed_forward.w1.weight: dense_mlp embed", None),
    **linear("mlp.up", "dense_mlp embed <- feed_forward.w3.weight: dense_mlp embed", None),
    **linear("mlp.down", "embed dense_mlp <- feed_forward.w2.weight: embed dense_mlp", None),
}

FAMILY = _grouped_style.build_family(
    name="lfm2_moe",
    sizes=sizes,
    arch_config=arch_config,
    layer=lfm2.NORMS,
    groups={
        ATTENTION_LAYERS: lfm2.GROUPS[ATTENTION_LAYERS],
        MIXER_LAYERS: lfm2.GROUPS[MIXER_LAYERS],
        DENSE_LAYERS: LayerGroup(DENSE_MLP, dense_layers, may_be_all=False),
        SPARSE_LAYERS: LayerGroup(_experts(), sparse_layers),
    },
    final_norm=lfm2.FINAL_NORM,
    tied_by_default=True,
)
