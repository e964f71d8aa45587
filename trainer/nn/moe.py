"""Mixture-of-experts MLP with top-k routing and sparse dispatch (Mixtral, arXiv:2401.04088, section 2.1).

p = softmax(x W_router)                      over all experts
moe(x) = sum of p_e * expert_e(x)            over the k experts e of largest p, for each token

With `norm_topk_prob` the k weights are divided by their sum. For k = 2 and p = 0.5 0.3 0.2 they are 0.625 and 0.375.

Axes: B rows of the batch, T tokens, K experts of a token, D model width.
"""

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
from trainer.nn.expert_sharding import Experts, ExpertSharding, expert_sharding


def moe_mlp(
    x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, sharding: ShardingContext
) -> Array:
    """Compute the weighted sum of each token's experts. No token is dropped.

    An expert computes only the tokens that are routed to it. The backward pass computes hidden units again.

    Args:
        x: Hidden states [B, T, D].
        weights: `router`, and the experts' `up`, `gate` and `down` stacked over experts, without biases.
        arch_config: The choices of the layers.
        sharding: The device mesh and its rules.

    Returns:
        [B, T, D].
    """
    experts = {
        name: projection["weight"] for name, projection in weights.items() if name != "router"
    }
    shards = expert_sharding(x, experts, sharding)
    return _mix_experts(
        arch_config, shards, x, experts, route(x, weights["router"]["weight"], arch_config, shards)
    )


def route(x: Array, router: Array, arch_config: ArchConfig, shards: ExpertSharding) -> Routing:
    """Select the experts of each token: the top k of the softmax over all experts.

    Args:
        x: Hidden states [B, T, D].
        router: Router weight [experts, D].
        arch_config: `experts_per_token`, and `norm_topk_prob` to divide the weights of a token by their sum.
        shards: The mesh axes of tokens and experts. The compiler would gather the scores of all devices to sort them.
    """
    # [B, T, experts] in float32: rounding to bfloat16 could change the order of two experts.
    scores = jnp.einsum("btd,nd->btn", x, router, preferred_element_type=jnp.float32)
    probabilities = nn.softmax(scores, axis=-1)

    def select(probabilities: Array) -> Array:
        return lax.top_k(probabilities, arch_config.experts_per_token)[1]

    experts = shards.map_devices(select, shards.token_spec, shards.token_spec)(
        lax.stop_gradient(probabilities)
    )
    # p at the selected experts, [B, T, K]. The product with one-hot rows takes the place of a gather:
    # its gradient is a product too, and no scatter.
    weights = (probabilities[..., None, :] * nn.one_hot(experts, router.shape[0])).sum(-1)
    if arch_config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(weights, experts)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mix_experts(
    arch_config: ArchConfig, shards: ExpertSharding, x: Array, experts: Experts, routing: Routing
) -> Array:
    """Compute the weighted sum of each token's experts, [B, T, D]."""
    run = partial(run_experts, arch_config=arch_config, shards=shards)
    tokens = shards.token_spec
    return shards.map_devices(run, (tokens, shards.expert_specs, tokens), tokens)(
        x, experts, routing
    )


def _forward(
    arch_config: ArchConfig, shards: ExpertSharding, x: Array, experts: Experts, routing: Routing
) -> tuple[Array, tuple[Array, Experts, Routing]]:
    return _mix_experts(arch_config, shards, x, experts, routing), (x, experts, routing)


def _backward(
    arch_config: ArchConfig,
    shards: ExpertSharding,
    saved: tuple[Array, Experts, Routing],
    gradient: Array,
) -> tuple[Array, Experts, Routing]:
    run = partial(experts_gradients, arch_config=arch_config, shards=shards)
    tokens = shards.token_spec
    matrices = shards.expert_specs
    run = shards.map_devices(run, (tokens, matrices, tokens, tokens), (tokens, matrices, tokens))
    d_x, d_experts, d_weights = run(*saved, gradient)
    no_gradient: Any = None  # of indices
    return d_x, d_experts, Routing(d_weights, no_gradient)


_mix_experts.defvjp(_forward, _backward)
