"""Qwen3's mixtures: as Qwen3, with many small experts in each layer."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields, uniform_windows
from trainer.models.errors import PrepError
from trainer.models.families import _llama_style
from trainer.models.parameters import HFConfig, read_size


def sizes(config: HFConfig) -> dict[str, int]:
    """Atom -> extent; Qwen3MoeConfig's defaults where a field is absent. `intermediate_size` is of layers without
    experts, which are refused."""
    found = _llama_style.sizes(config, vocab=151936, embed=2048, layers=24, kv_heads=4)
    _check_every_layer_has_experts(config, found["layers"])
    return {
        **found,
        "mlp": read_size(config, "moe_intermediate_size", 768),
        "experts": read_size(
            config, "num_local_experts", read_size(config, "num_experts", 128)
        ),  # of both the alias wins
        "gate_up": 2,
    }


def _check_every_layer_has_experts(config: HFConfig, layers: int) -> None:
    """Raise PrepError if a layer has one feed-forward part instead of experts."""
    plain, step = config.get("mlp_only_layers") or [], read_size(config, "decoder_sparse_step", 1)
    if not isinstance(plain, list):
        raise PrepError("config.json makes no sense", f"mlp_only_layers is {plain!r:.60}, not a list of layers")
    dense = [layer for layer in range(layers) if layer in plain or (layer + 1) % step]
    if dense:
        field = "mlp_only_layers" if dense[0] in plain else "decoder_sparse_step"
        why = f"by `{field}` layer {dense[0]} of {layers} has none: layers of two kinds cannot be stacked"
        raise PrepError("layers with and without experts in one model are not supported", why)


def arch_config(config: HFConfig) -> ArchConfig:
    """What its layers compute; PrepError where the config asks for something else."""
    known = ("sliding_window", "layer_types", "num_experts", "num_local_experts", "mlp_only_layers")
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", *known)
    found = sizes(config)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return dataclasses.replace(
        _llama_style.arch_config(config, found, max_positions=32768),
        sliding_windows=uniform_windows(found["layers"], window),
        experts_per_token=_llama_style.read_experts_per_token(config, found["experts"], default=8),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
    )


FAMILY = _llama_style.build_family(
    name="qwen3_moe",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias="attention_bias", out_bias="attention_bias"),
        **_llama_style.QK_NORMS,
        **_llama_style.experts(
            gate="mlp.experts.{experts}.gate_proj.weight",
            up="mlp.experts.{experts}.up_proj.weight",
            down="mlp.experts.{experts}.down_proj.weight",
            router="mlp.gate.weight",
        ),
    },
)
