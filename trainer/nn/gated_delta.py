"""The gated delta net (arXiv:2412.06464), as in Qwen3-Next. `Mixer` has its equations.

Axes: B rows of the batch, T tokens, G groups of heads with the same queries and keys, R heads of a group, N width of
queries and keys, P width of values, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax, nn

from trainer.nn.chunked_scan import Recurrence, chunked_scan
from trainer.nn.context import LayerContext
from trainer.nn.layer_weights import Projections
from trainer.nn.mixer_steps import convolve, document_starts, project, project_out
from trainer.nn.mlp import ACTIVATION_FUNCTIONS
from trainer.nn.norms import norm
from trainer.nn.recurrent_cache import STATE

PROJECTIONS = ("q", "k", "v", "z", "qkvz", "beta", "dt")
# Added to the squared length of queries and keys, as in `l2norm` of transformers.
LENGTH_EPS = 1e-6


def gated_delta(
    x: Array, weights: Projections, context: LayerContext, states: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Compute the gated delta net of hidden states [B, T, D].

    Args:
        x: Hidden states [B, T, D].
        weights: Projections `q`, `k`, `v` and `z`, or all of them as parts of `qkvz`; `beta`, `dt` and `o`; the
            convolutions `q_conv`, `k_conv` and `v_conv`; `a_log` and `dt_bias` [G, R]; and `norm`.
        context: Architecture, sharding and positions of the layer.
        states: Inputs of convolutions and the state of earlier tokens. Empty without a cache.

    Returns:
        [B, T, D], and the new states.
    """
    projected = project(x, weights, PROJECTIONS, context)
    if "qkvz" in projected:
        projected |= _split_groups(projected["qkvz"], weights)
    inputs = {name: projected[name] for name in ("q", "k", "v")}
    convolved, new_states = convolve(inputs, weights, context, states)
    activate = ACTIVATION_FUNCTIONS[context.arch_config.activation]
    q, k, v = (activate(convolved[name]) for name in ("q", "k", "v"))
    dt = projected["dt"].astype(jnp.float32) + weights["dt_bias"]["bias"]
    recurrence = Recurrence(
        q=_normalize(q) * q.shape[-1] ** -0.5,
        k=_normalize(k),
        v=v,
        log_decay=-jnp.exp(weights["a_log"]["weight"].astype(jnp.float32)) * nn.softplus(dt),
        beta=nn.sigmoid(projected["beta"]),
        is_start=document_starts(context, x.shape[:2]),
    )
    output, new_states[STATE] = chunked_scan(recurrence, states.get(STATE))
    plain_norm = dataclasses.replace(context.arch_config, norm="rms")

    def gate(hidden: tuple[Array, Array], weights: Projections) -> Array:
        values, z = hidden
        normed = norm(values, weights["norm"], plain_norm)
        return (normed * nn.silu(z.astype(jnp.float32))).astype(values.dtype)

    hidden = (output.astype(x.dtype), projected["z"])
    return project_out(hidden, gate, weights, context), new_states


def _split_groups(fused: Array, weights: Projections) -> dict[str, Array]:
    """Split [B, T, G, 2 N + 2 R P] into queries and keys [B, T, G, N], and values and gates [B, T, G, R, P]."""
    key_dim = weights["k_conv"]["weight"].shape[1]
    heads, value_dim = weights["v_conv"]["weight"].shape[1:3]
    ends = (key_dim, 2 * key_dim, 2 * key_dim + heads * value_dim)
    q, k, v, z = jnp.split(fused, ends, axis=-1)
    shape = (*fused.shape[:3], heads, value_dim)
    return {"q": q, "k": k, "v": v.reshape(shape), "z": z.reshape(shape)}


def _normalize(x: Array) -> Array:
    """Divide queries or keys [B, T, G, N] by their length, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + LENGTH_EPS)
