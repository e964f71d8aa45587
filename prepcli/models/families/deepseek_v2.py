"""DeepSeek-V2: latent attention, first dense layers, and experts chosen by softmax scores."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import unsupported_config_error
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _deepseek_style, _llama_style, _moe_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import HFConfig, read_size

GREEDY = "greedy"
IN_GROUPS = "group_limited_greedy"


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of DeepseekV2Config."""
    axis_sizes = _llama_style.sizes(config, vocab=102400)
    expert_width = read_size(config, "moe_intermediate_size", 1407)
    return {
        **axis_sizes,
        **_deepseek_style.latent_sizes(config, axis_sizes),
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "mlp": expert_width,
        "dense_mlp": axis_sizes["mlp"],
        "shared_mlp": expert_width * read_size(config, "n_shared_experts", 2),
        "experts": read_size(config, "n_routed_experts", 64),
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    return _deepseek_style.first_dense_layers(config, layers=32, default=0)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, *_deepseek_style.LATENT_FIELDS, *_deepseek_style.MOE_FIELDS
    )
    axis_sizes = sizes(config)
    # DeepseekV2Config has no default. DeepSeek-V2 has 6.
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=6
    )
    router = _read_router(config)
    router.check_experts(axis_sizes["experts"], experts_per_token)
    return dataclasses.replace(
        _deepseek_style.latent_arch_config(
            config, axis_sizes, max_positions=2048, is_interleaved=True
        ),
        experts_per_token=experts_per_token,
        router=router,
        dense_layers=dense_layers(config),
    )


def _read_router(config: HFConfig) -> Router:
    """Return the router. Raise PrepError if it normalizes weights or has another method."""
    method = config.get("topk_method", GREEDY)
    if method not in (GREEDY, IN_GROUPS):
        why = f"topk_method of config.json; supported: {GREEDY}, {IN_GROUPS}"
        raise unsupported_config_error(
            f"router method {method!r:.60} is not supported for this family", why
        )
    if config.get("norm_topk_prob"):
        # DeepSeek's own code divides the weights by their sum, and transformers does not.
        why = "config.json has true, which implementations of DeepSeek-V2 treat differently"
        raise unsupported_config_error("`norm_topk_prob` is not supported for this family", why)
    router = Router(is_normalized=False, scale=read_positive(config, "routed_scaling_factor", 1.0))
    if method == GREEDY:
        return router
    return dataclasses.replace(
        router,
        num_groups=read_size(config, "n_group", 1),
        groups_per_token=read_size(config, "topk_group", 1),
    )


FAMILY = _moe_style.build_family(
    name="deepseek_v2",
    sizes=sizes,
    arch_config=arch_config,
    layer={**_llama_style.PRE_NORMS, **_deepseek_style.latent_attention()},
    moe={**_moe_style.EXPERTS, **_moe_style.shared_experts("mlp.shared_experts")},
    dense_layers=dense_layers,
)
