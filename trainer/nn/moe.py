"""Mixture-of-experts MLP with top-k routing and sparse dispatch (Mixtral, arXiv:2401.04088, section 2.1).

moe(x) = sum of w_e * expert_e(x) + g * shared(x)    over the k experts e of a token

`trainer.nn.router` computes the experts and their weights w. The shared experts (arXiv:2401.06066, section 3.2)
compute every token, as one MLP. Their gate g is 1 or sigmoid(x W_shared_gate) (Qwen2-MoE).

Axes: B rows of the batch, T tokens, N experts, K experts of a token, D model width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, nn

from prepcli.models.architecture import ArchConfig
from prepcli.models.param_tree import flatten_tree
from trainer.distributed.sharding import ShardingContext
from trainer.nn.expert_blocks import Routing, experts_gradients, run_experts
from trainer.nn.expert_sharding import Experts, ExpertSharding, expert_sharding
from trainer.nn.layer_weights import MoeWeights
from trainer.nn.linear import linear
from trainer.nn.mlp import mlp
from trainer.nn.router import route

EXPERT_PROJECTIONS = ("gate", "up", "down")
DOWN_BIAS = "down.bias"


def moe_mlp(
    x: Array,
    weights: MoeWeights,
    arch_config: ArchConfig,
    sharding: ShardingContext,
    *,
    router_input: Array | None = None,
) -> Array:
    """Compute the weighted sum of each token's experts. No token is dropped.

    An expert computes only the tokens that are routed to it. The backward pass computes hidden units again.

    Args:
        x: Hidden states [B, T, D].
        weights: `router`, the experts' `up`, `down` and, if they are gated, `gate`, stacked over experts. Optionally
            `shared` with the MLP of the shared experts, and `shared_gate`.
        arch_config: The choices of the layers.
        sharding: The device mesh and its rules.
        router_input: [B, T, D], the input of the router. None means `x`.

    Returns:
        [B, T, D].
    """
    experts = flatten_tree({name: weights[name] for name in EXPERT_PROJECTIONS if name in weights})
    down_bias = experts.pop(DOWN_BIAS, None)
    shards = expert_sharding(x, experts, sharding)
    if router_input is None:
        router_input = x
    routing = route(router_input, weights["router"], arch_config, shards)
    output: Array = _mix_experts(arch_config, shards, x, experts, routing)
    if down_bias is not None:
        output = output + _mix_biases(routing, down_bias).astype(x.dtype)
    if "shared" in weights:
        shared = mlp(x, weights["shared"], arch_config=arch_config, sharding=sharding)
        gate = weights.get("shared_gate")
        if gate is not None:
            scores = linear(x, gate, num_devices=sharding.num_devices)
            shared = nn.sigmoid(scores)[..., None] * shared
        output = output + shared
    return output


def _mix_biases(routing: Routing, biases: Array) -> Array:
    """Compute the weighted sum of the output biases [N, D] of each token's experts, float32 [B, T, D]."""
    # A bias in the blocks of an expert would be added once per shard of its hidden units.
    # [B, T, K] -> [B, T, N], 0 for experts of other tokens
    one_hot = nn.one_hot(routing.experts, len(biases))
    weights = (routing.weights[..., None] * one_hot).sum(-2)
    return jnp.einsum("btn,nd->btd", weights, biases, preferred_element_type=jnp.float32)


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
    # The indices of experts have no gradient.
    no_gradient: Any = None
    return d_x, d_experts, Routing(d_weights, no_gradient)


_mix_experts.defvjp(_forward, _backward)
