"""A feed-forward part of many experts, of which each token has a few."""

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
    """[B, T, D] -> [B, T, D]: the sum of a token's experts by their shares; no token is dropped.

    Experts compute one after the other for all tokens, so memory is that of one of them, and again in the backward
    pass; time is that of all of them.
    """
    shares = jnp.moveaxis(router_weights(x, weights["router"]["weight"], arch_config), -1, 0)
    experts = {name: own for name, own in weights.items() if name != "router"}

    @jax.checkpoint
    def part(own: Mapping[str, Any], share: Array) -> Array:
        return (mlp(x, own, arch_config, sharding) * share[..., None]).astype(x.dtype)

    def add(total: Array, expert: tuple[Mapping[str, Any], Array]) -> tuple[Array, None]:
        return total + part(*expert), None

    return lax.scan(add, jnp.zeros_like(x), (experts, shares))[0]


def router_weights(x: Array, router: Array, arch_config: ArchConfig) -> Array:
    """[B, T, D] by [experts, D] -> float32 [B, T, experts]: softmax over all, kept where it is largest."""
    scores = jnp.einsum("btd,nd->btn", x, router, preferred_element_type=jnp.float32)
    found, which = lax.top_k(nn.softmax(scores, axis=-1), arch_config.experts_per_token)
    if arch_config.norm_topk_prob:
        found = found / found.sum(-1, keepdims=True)
    return (found[..., None] * nn.one_hot(which, router.shape[0])).sum(-2)
