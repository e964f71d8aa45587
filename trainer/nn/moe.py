"""Mixture-of-experts MLP with top-k routing and sparse dispatch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, nn

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ArchConfig
from trainer.nn.expert_blocks import Routing, experts_gradients, run_experts
from trainer.nn.expert_sharding import Experts, expert_sharding


def moe_mlp(x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, sharding: ShardingContext) -> Array:
    """Compute the weighted sum of each token's experts; no token is dropped.

    An expert computes only the tokens that are routed to it. The backward pass computes hidden units again.

    Args:
        x: Hidden states [B, T, D].
        weights: `router`, and the experts' `up`, `gate` and `down` stacked over experts, without biases.
        arch_config: The choices of the layers.
        sharding: The device mesh and its rules.

    Returns:
        [B, T, D].
    """
    routing = route(x, weights["router"]["weight"], arch_config)
    experts = {name: projection["weight"] for name, projection in weights.items() if name != "router"}
    return _mix_experts(arch_config, sharding, x, experts, routing)


def route(x: Array, router: Array, arch_config: ArchConfig) -> Routing:
    """Select the experts of each token: the top k of the softmax over all experts.

    Args:
        x: Hidden states [B, T, D].
        router: Router weight [experts, D].
        arch_config: `experts_per_token`, and `norm_topk_prob` to divide the weights of a token by their sum.
    """
    scores = jnp.einsum("btd,nd->btn", x, router, preferred_element_type=jnp.float32)
    top_weights, top_experts = lax.top_k(nn.softmax(scores, axis=-1), arch_config.experts_per_token)
    if arch_config.norm_topk_prob:
        top_weights = top_weights / top_weights.sum(-1, keepdims=True)
    return Routing(top_weights, top_experts)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mix_experts(
    arch_config: ArchConfig, sharding: ShardingContext, x: Array, experts: Experts, routing: Routing
) -> Array:
    """Compute the weighted sum of each token's experts, [B, T, D]."""
    shards = expert_sharding(x, experts, sharding)
    run = partial(run_experts, arch_config=arch_config, shards=shards)
    return shards.map_devices(run, returns_gradients=False)(x, experts, routing)


def _forward(
    arch_config: ArchConfig, sharding: ShardingContext, x: Array, experts: Experts, routing: Routing
) -> tuple[Array, tuple[Array, Experts, Routing]]:
    return _mix_experts(arch_config, sharding, x, experts, routing), (x, experts, routing)


def _backward(
    arch_config: ArchConfig, sharding: ShardingContext, saved: tuple[Array, Experts, Routing], gradient: Array
) -> tuple[Array, Experts, Routing]:
    x, experts, routing = saved
    shards = expert_sharding(x, experts, sharding)
    run = partial(experts_gradients, arch_config=arch_config, shards=shards)
    d_x, d_experts, d_weights = shards.map_devices(run, returns_gradients=True)(x, experts, routing, gradient)
    return d_x, d_experts, Routing(d_weights, None)  # type: ignore[arg-type]


_mix_experts.defvjp(_forward, _backward)
