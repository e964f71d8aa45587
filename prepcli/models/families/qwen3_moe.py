"""Qwen3-MoE: Qwen3 with a sparse MoE of many small experts."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    reject_unsupported_fields,
    uniform_windows,
)
from prepcli.models.families import _llama_style, _moe_style
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.moe_config import Router
from prepcli.models.orbax_layouts import maxtext_layouts, tunix_layout
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rows import Parameters
from prepcli.models.torchtitan_layouts import torchtitan_layout


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Qwen3MoeConfig."""
    axis_sizes = _llama_style.sizes(config, vocab=151936, embed=2048, layers=24, kv_heads=4)
    # transformers uses `num_local_experts` if a config has both names.
    experts = read_size(config, "num_local_experts", read_size(config, "num_experts", 128))
    return {
        **axis_sizes,
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "mlp": read_size(config, "moe_intermediate_size", 768),
        "dense_mlp": read_size(config, "intermediate_size", 6144),
        "experts": experts,
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    return _moe_style.read_dense_layers_by_step(config, read_size(config, "num_hidden_layers", 24))


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    moe_fields = (
        "sliding_window",
        "layer_types",
        "num_experts",
        "num_local_experts",
        "mlp_only_layers",
    )
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "use_qk_norm", *moe_fields)
    axis_sizes = sizes(config)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=32768),
        sliding_windows=uniform_windows(axis_sizes["layers"], window),
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=8
        ),
        dense_layers=dense_layers(config),
        router=Router(is_normalized=bool(config.get("norm_topk_prob", False))),
    )


def _experts() -> Parameters:
    """Return the parameters of an MoE layer. Files of Qwen3-VL-MoE have the fused tensors transposed."""
    gate_up = "experts mlp embed <- mlp.experts.gate_up_proj: experts embed (gate_up={} mlp)"
    transposed = {
        "mlp.gate.weight": gate_up.format(0),
        "mlp.up.weight": gate_up.format(1),
        "mlp.down.weight": "experts embed mlp <- mlp.experts.down_proj: experts mlp embed",
    }
    experts = dict(_moe_style.EXPERTS)
    for path, row in transposed.items():
        experts[path] = dataclasses.replace(experts[path], transposed=row)
    return experts


_FAMILY = _moe_style.build_family(
    name="qwen3_moe",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.QK_NORMS,
    },
    moe=_experts(),
    dense_layers=dense_layers,
)
# The trainers have no layers with a dense MLP in this family. An export of a model with some is refused.
FAMILY = dataclasses.replace(
    _FAMILY,
    layouts={
        **tunix_layout(_FAMILY.parameters, qk_norms=True, has_experts=True),
        **maxtext_layouts(_FAMILY.parameters, scales_queries=False, experts_module="moe_block"),
        **levanter_layouts(_FAMILY.parameters),
        **torchtitan_layout(_FAMILY.parameters, has_experts=True),
    },
)
