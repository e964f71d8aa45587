"""Mixture-of-experts MLP with top-k routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, nn

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ArchConfig
from trainer.nn.mlp import mlp


def moe_mlp(x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, sharding: ShardingContext) -> Array:
    """Compute the weighted sum of each token's experts; no token is dropped.

    Every expert is computed for every token, one expert at a time (no sparse dispatch). Memory is that of one expert,
    in the backward pass too; time is that of all experts.

    Args:
        x: Hidden states [B, T, D].
        weights: `router`, and the experts' `up`, `gate` and `down` stacked over experts.
        arch_config: The choices of the layers.
        sharding: The device mesh and its rules.

    Returns:
        [B, T, D].
    """
    # [experts, B, T]
    weight_by_expert = jnp.moveaxis(router_weights(x, weights["router"]["weight"], arch_config), -1, 0)
    experts = {name: projection for name, projection in weights.items() if name != "router"}

    @jax.checkpoint
    def weighted_expert(expert: Mapping[str, Any], token_weights: Array) -> Array:
        return (mlp(x, expert, arch_config, sharding) * token_weights[..., None]).astype(x.dtype)

    def add_expert(total: Array, expert: tuple[Mapping[str, Any], Array]) -> tuple[Array, None]:
        return total + weighted_expert(*expert), None

    return lax.scan(add_expert, jnp.zeros_like(x), (experts, weight_by_expert))[0]


def router_weights(x: Array, router: Array, arch_config: ArchConfig) -> Array:
    """Compute each expert's weight for each token.

    Args:
        x: Hidden states [B, T, D].
        router: Router weight [experts, D].
        arch_config: `experts_per_token`, and `norm_topk_prob` to divide the weights of a token by their sum.

    Returns:
        float32 [B, T, experts]: the softmax over all experts, 0 except for the top-k experts.
    """
    scores = jnp.einsum("btd,nd->btn", x, router, preferred_element_type=jnp.float32)
    top_weights, top_experts = lax.top_k(nn.softmax(scores, axis=-1), arch_config.experts_per_token)
    if arch_config.norm_topk_prob:
        top_weights = top_weights / top_weights.sum(-1, keepdims=True)
    return (top_weights[..., None] * nn.one_hot(top_experts, router.shape[0])).sum(-2)
