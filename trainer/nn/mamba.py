"""Mamba (arXiv:2312.00752). `Mixer` has its equations.

Axes: B rows of the batch, T tokens, C channels, N width of queries and keys, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, nn

from prepcli.models.mixer_config import Mixer
from trainer.nn.context import LayerContext
from trainer.nn.layer_weights import Projections
from trainer.nn.linear import linear
from trainer.nn.mixer_steps import convolve, document_starts, over_chunks, project, project_out
from trainer.nn.mlp import ACTIVATION_FUNCTIONS
from trainer.nn.norms import norm
from trainer.nn.recurrent_cache import STATE
from trainer.nn.selective_scan import SelectiveInputs, selective_scan

# Projections of the output of the convolution. `dt_up` widens the output of `dt_down`.
SELECTIONS = ("q", "k", "dt_down")


def mamba(
    x: Array, weights: Projections, context: LayerContext, states: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Compute the Mamba mixer of hidden states [B, T, D].

    Args:
        x: Hidden states [B, T, D].
        weights: Projections `v`, `z` and `o` of hidden states, and `q`, `k`, `dt_down` and `dt_up` of channels. The
            convolution `v_conv`, `a_log` [C, N], `d` [C], and optionally the norms `q_norm`, `k_norm` and
            `dt_down_norm`.
        context: Architecture, sharding and positions of the layer.
        states: Inputs of the convolution and the state of earlier tokens. Empty without a cache.

    Returns:
        [B, T, D], and the new states.
    """
    mixer = context.arch_config.mixer
    assert mixer is not None
    projected = project(x, weights, ("v", "z"), context)
    convolved, new_states = convolve({"v": projected["v"]}, weights, context, states)
    v = _activate(convolved["v"], mixer, context)
    selected = _select(v, weights, context)
    inputs = SelectiveInputs(
        q=selected["q"],
        k=selected["k"],
        v=v,
        dt=selected["dt"],
        is_start=document_starts(context, x.shape[:2]),
    )
    rates = -jnp.exp(weights["a_log"]["weight"].astype(jnp.float32))
    output, new_states[STATE] = selective_scan(inputs, rates, states.get(STATE))
    output += v * weights["d"]["weight"].astype(jnp.float32)

    def gate(hidden: tuple[Array, Array], weights: Projections) -> Array:
        values, z = hidden
        return (values * nn.silu(z.astype(jnp.float32))).astype(x.dtype)

    return project_out((output, projected["z"]), gate, weights, context), new_states


def _activate(x: Array, mixer: Mixer, context: LayerContext) -> Array:
    """Apply the activation of the convolution to [B, T, C]."""
    return ACTIVATION_FUNCTIONS[mixer.activation or context.arch_config.activation](x)


def _select(v: Array, weights: Projections, context: LayerContext) -> dict[str, Array]:
    """Project channels [B, T, C] to queries and keys [B, T, N], and to steps dt, float32 [B, T, C]."""
    num_devices = context.sharding.num_devices

    def select_chunk(v: Array, weights: Projections, constants: None) -> dict[str, Array]:
        selected: dict[str, Array] = {}
        for name in SELECTIONS:
            output = linear(v, weights[name], num_devices=num_devices)
            if f"{name}_norm" in weights:
                output = norm(output, weights[f"{name}_norm"], context.arch_config)
            selected[name] = output
        steps = {name: leaf for name, leaf in weights["dt_up"].items() if name != "bias"}
        dt = linear(selected.pop("dt_down"), steps, num_devices=num_devices)
        # In bfloat16 the bias would round most steps to the same number.
        selected["dt"] = nn.softplus(dt.astype(jnp.float32) + weights["dt_up"]["bias"])
        return selected

    names = (*SELECTIONS, "dt_up", *(f"{name}_norm" for name in SELECTIONS))
    chosen = {name: weights[name] for name in names if name in weights}
    return over_chunks(select_chunk, v.shape[1], context)(v, chosen, None)
