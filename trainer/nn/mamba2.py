"""Mamba-2 (arXiv:2405.21060). `Mixer` has its equations.

Axes: B rows of the batch, T tokens, G groups of heads with the same queries and keys, R heads of a group, N width of
queries and keys, P width of values, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, nn

from prepcli.models.mixer_config import Mixer
from trainer.nn.chunked_scan import Recurrence, chunked_scan
from trainer.nn.context import LayerContext
from trainer.nn.layer_weights import Projections
from trainer.nn.mixer_steps import convolve, document_starts, project, project_out
from trainer.nn.mlp import ACTIVATION_FUNCTIONS
from trainer.nn.norms import norm
from trainer.nn.recurrent_cache import STATE

# Axes of the heads of a group, and of their values.
GROUP_AXES = (-2, -1)


def mamba2(
    x: Array, weights: Projections, context: LayerContext, states: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Compute the Mamba-2 mixer of hidden states [B, T, D].

    Args:
        x: Hidden states [B, T, D].
        weights: Projections `q`, `k`, `v`, `z`, `dt` and `o`; the convolutions `q_conv`, `k_conv` and `v_conv`;
            `a_log`, `d` and `dt_bias` [G, R]; and optionally `norm`.
        context: Architecture, sharding and positions of the layer.
        states: Inputs of convolutions and the state of earlier tokens. Empty without a cache.

    Returns:
        [B, T, D], and the new states.
    """
    mixer = context.arch_config.mixer
    assert mixer is not None
    projected = project(x, weights, ("q", "k", "v", "z", "dt"), context)
    inputs = {name: projected[name] for name in ("q", "k", "v")}
    convolved, new_states = convolve(inputs, weights, context, states)
    activate = ACTIVATION_FUNCTIONS[mixer.activation or context.arch_config.activation]
    q, k, v = (activate(convolved[name]).astype(jnp.float32) for name in ("q", "k", "v"))
    dt = nn.softplus(projected["dt"].astype(jnp.float32) + weights["dt_bias"]["bias"])
    dt = jnp.clip(dt, *mixer.dt_limits)
    recurrence = Recurrence(
        q=q,
        k=k,
        v=v * dt[..., None],
        log_decay=-jnp.exp(weights["a_log"]["weight"].astype(jnp.float32)) * dt,
        beta=None,
        is_start=document_starts(context, x.shape[:2]),
    )
    output, new_states[STATE] = chunked_scan(recurrence, states.get(STATE))
    output += v * weights["d"]["weight"].astype(jnp.float32)[..., None]

    def gate(hidden: tuple[Array, Array], weights: Projections) -> Array:
        return _gate(*hidden, weights, context, mixer).astype(x.dtype)

    return project_out((output, projected["z"]), gate, weights, context), new_states


def _gate(
    output: Array, z: Array, weights: Projections, context: LayerContext, mixer: Mixer
) -> Array:
    """Multiply the output [B, T, G, R, P] by its gate, and normalize each group before or after that."""
    gate = nn.silu(z.astype(jnp.float32))
    if mixer.norm_place == "none":
        return output * gate
    plain_norm = dataclasses.replace(context.arch_config, norm="rms")
    if mixer.norm_place == "before_gate":
        return norm(output, weights["norm"], plain_norm, GROUP_AXES) * gate
    return norm(output * gate, weights["norm"], plain_norm, GROUP_AXES)
