"""The gated short convolution of LFM2 (arXiv:2511.23404). `Mixer` has its equation.

Axes: B rows of the batch, T tokens, C channels, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax import Array

from trainer.nn.context import LayerContext
from trainer.nn.layer_weights import Projections
from trainer.nn.mixer_steps import convolve, project, project_out


def short_conv(
    x: Array, weights: Projections, context: LayerContext, states: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Compute (c * conv(b * v)) W_o of hidden states [B, T, D].

    Args:
        x: Hidden states [B, T, D].
        weights: Projections `b`, `c`, `v` and `o`, the convolution `v_conv`, and optionally the norm of `x`.
        context: Architecture, sharding and positions of the layer.
        states: Inputs of the convolution of earlier tokens. Empty without a cache.

    Returns:
        [B, T, D], and the new states.
    """
    projected = project(x, weights, ("b", "c", "v"), context)
    gated = {"v": projected["b"] * projected["v"]}
    convolved, new_states = convolve(gated, weights, context, states)
    hidden = (projected["c"], convolved["v"])
    return project_out(hidden, _multiply_by_gate, weights, context), new_states


def _multiply_by_gate(hidden: tuple[Array, Array], weights: Projections) -> Array:
    """Multiply the convolution by its gate, both [B, T, C]."""
    gate, convolved = hidden
    return gate * convolved
