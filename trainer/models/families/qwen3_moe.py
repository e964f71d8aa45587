"""Qwen3-MoE: Qwen3 with a sparse MoE of many small experts."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    reject_unsupported_fields,
    uniform_windows,
)
from trainer.models.errors import invalid_config_error, unsupported_config_error
from trainer.models.families import _llama_style
from trainer.models.moe_config import Router
from trainer.models.parameters import HFConfig, if_set, read_size


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Qwen3MoeConfig.

    `intermediate_size` is not read: it belongs to dense layers, and prep does not support them
    here.
    """
    axis_sizes = _llama_style.sizes(config, vocab=151936, embed=2048, layers=24, kv_heads=4)
    _check_every_layer_has_experts(config, axis_sizes["layers"])
    # The alias overrides.
    experts = read_size(config, "num_local_experts", read_size(config, "num_experts", 128))
    return {
        **axis_sizes,
        "mlp": read_size(config, "moe_intermediate_size", 768),
        "experts": experts,
        "gate_up": 2,
    }


def _check_every_layer_has_experts(config: HFConfig, layers: int) -> None:
    """Raise PrepError if a layer has a dense MLP."""
    dense_layers = config.get("mlp_only_layers") or []
    step = read_size(config, "decoder_sparse_step", 1)
    if not isinstance(dense_layers, list):
        why = f"mlp_only_layers is {dense_layers!r:.60}, it must be a list of layers"
        raise invalid_config_error(why)
    # The condition of Qwen3MoeDecoderLayer. E.g. a step of 2 gives layers 1, 3 and 5 experts, and
    # layers 0, 2 and 4 a dense MLP.
    dense = [layer for layer in range(layers) if layer in dense_layers or (layer + 1) % step]
    if dense:
        field = "mlp_only_layers" if dense[0] in dense_layers else "decoder_sparse_step"
        why = f"by `{field}` layer {dense[0]} of {layers} has a dense MLP, which cannot be stacked with experts"
        what = "models with both dense and MoE layers are not supported"
        raise unsupported_config_error(what, why)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    moe_fields = (
        "sliding_window",
        "layer_types",
        "num_experts",
        "num_local_experts",
        "mlp_only_layers",
    )
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", *moe_fields)
    axis_sizes = sizes(config)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=32768),
        sliding_windows=uniform_windows(axis_sizes["layers"], window),
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=8
        ),
        router=Router(is_normalized=bool(config.get("norm_topk_prob", False))),
    )


FAMILY = _llama_style.build_family(
    name="qwen3_moe",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.QK_NORMS,
        **_llama_style.experts(
            gate="mlp.experts.{experts}.gate_proj.weight",
            up="mlp.experts.{experts}.up_proj.weight",
            down="mlp.experts.{experts}.down_proj.weight",
            router="mlp.gate.weight",
        ),
    },
)
