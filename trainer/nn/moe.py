"""Mixture-of-experts MLP with top-k routing and sparse dispatch (Mixtral, arXiv:2401.04088, section 2.1).

moe(x) = sum of w_e * expert_e(x) + g * shared(x)    over the k experts e of a token

The router computes the experts and their weights w. `Router` has its equations. The shared experts (arXiv:2401.06066,
section 3.2) compute every token, as one MLP. Their gate g is 1 or sigmoid(x W_shared_gate) (Qwen2-MoE).

Axes: B rows of the batch, T tokens, N experts, G groups of experts, K experts of a token, D model width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, nn

from prepcli.models.architecture import ArchConfig
from prepcli.models.layer_config import Router
from prepcli.models.param_tree import flatten_tree
from trainer.distributed.sharding import ShardingContext
from trainer.nn.experts import (
    Experts,
    ExpertSharding,
    Routing,
    expert_sharding,
    experts_gradients,
    run_experts,
)
from trainer.nn.mlp import mlp
from trainer.nn.projections import MoeWeights, RouterWeights, linear, plain_rms_norm


def route(
    x: Array, weights: RouterWeights, arch_config: ArchConfig, shards: ExpertSharding
) -> Routing:
    """Select the experts of each token.

    Args:
        x: Hidden states [B, T, D].
        weights: `weight` [N, D], and optionally `bias` [N], `correction.bias` [N], `input_scale` [D] of the norm and
            `expert_scale` [N].
        arch_config: `experts_per_token` and `router`.
        shards: The mesh axes of tokens and experts. The compiler would gather the scores of all devices to sort them.
    """
    router = arch_config.router
    input_scale = weights.get("input_scale")
    if router.has_own_norm and input_scale is not None:
        x = plain_rms_norm(x, arch_config.norm_eps) * input_scale["weight"]
        x = x * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
    # [B, T, N] in float32: rounding to bfloat16 could change the order of two experts.
    logits = jnp.einsum("btd,nd->btn", x, weights["weight"], preferred_element_type=jnp.float32)
    if "bias" in weights:
        logits = logits + weights["bias"]
    sorts_logits = router.num_groups == 1 and "correction" not in weights
    if router.scores == "sparse_mixer":
        scores = logits
    elif router.scores == "sigmoid":
        scores = nn.sigmoid(logits)
    else:
        scores = nn.softmax(logits, axis=-1)
    # The logits have the order of the scores. In float32 the sigmoids of 18 and 25 are both 1.
    choice = lax.stop_gradient(logits if sorts_logits else scores)
    if "correction" in weights:
        # No gradient: training changes the correction by the loads of the experts, or not at all.
        choice = choice + lax.stop_gradient(weights["correction"]["bias"]).astype(jnp.float32)
    select = partial(_select_experts, router=router, top_k=arch_config.experts_per_token)
    experts = shards.map_devices(select, shards.token_spec, shards.token_spec)(choice)
    if router.scores == "sparse_mixer":
        return Routing(_sparse_mixer(logits, experts, router), experts)
    # s at the selected experts, [B, T, K]. The product with one-hot rows takes the place of a gather:
    # its gradient is a product too, and no scatter.
    one_hot = nn.one_hot(experts, scores.shape[-1])
    selected = (scores[..., None, :] * one_hot).sum(-1)
    expert_weights = _normalize_weights(selected, router) * router.scale
    if "expert_scale" in weights:
        expert_weights = expert_weights * (weights["expert_scale"]["weight"] * one_hot).sum(-1)
    return Routing(expert_weights, experts)


def _sparse_mixer(logits: Array, experts: Array, router: Router) -> Array:
    """Return the weights [B, T, K] of SparseMixer, without random choices."""
    # [B, T, K, N]: the selected expert, and the experts before it
    selected = nn.one_hot(experts, logits.shape[-1])
    is_taken = jnp.cumsum(selected, axis=-2) - selected > 0
    logits = logits[..., None, :]
    best = (logits * selected).sum(-1, keepdims=True)
    is_worse = (best - logits) / jnp.maximum(jnp.abs(logits), best) > router.mixing_range
    probabilities = nn.softmax(jnp.where(is_taken | is_worse, -jnp.inf, logits), axis=-1)
    return (probabilities * selected).sum(-1)


def _select_experts(choice: Array, *, router: Router, top_k: int) -> Array:
    """Return the `top_k` experts with the largest scores `choice` for each token, int32 [B, T, K]."""
    # If the router has groups of experts, only experts of the token's best groups are selected.
    if router.num_groups > 1:
        choice = _hide_other_groups(choice, router)
    return lax.top_k(choice, top_k)[1]


def _hide_other_groups(choice: Array, router: Router) -> Array:
    """Replace the scores `choice` [B, T, N] by -inf for experts outside of a token's best groups."""
    # E.g. N = 6, G = 3 and one group per token: the choices 1 5 | 4 3 | 2 2 have the group scores
    # 5 4 2 by "maximum", so the first group stays, and 6 7 4 by "top_two", so the second one stays.
    grouped = choice.reshape(*choice.shape[:-1], router.num_groups, -1)
    if router.group_score == "top_two":
        group_scores = lax.top_k(grouped, 2)[0].sum(-1)
    else:
        group_scores = grouped.max(-1)
    best = lax.top_k(group_scores, router.groups_per_token)[1]
    is_best = nn.one_hot(best, router.num_groups).sum(-2) > 0
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _normalize_weights(weights: Array, router: Router) -> Array:
    """Divide the weights [B, T, K] of each token by their sum, if the router does."""
    if not router.is_normalized:
        return weights
    total = weights.sum(-1, keepdims=True) + router.weight_sum_offset
    if router.min_weight_sum > 0:
        total = jnp.maximum(total, router.min_weight_sum)
    return weights / total


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
