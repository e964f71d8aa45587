"""Recurrent mixers: a sublayer in which tokens read earlier tokens, in addition to attention or in its place.

`prepcli.models.mixer_config.Mixer` has the equations of the mixers.

Axes: B rows of the batch, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax import Array

from trainer.nn.activation_names import name_activation
from trainer.nn.attention_steps import INPUT_NORM
from trainer.nn.context import LayerContext
from trainer.nn.gated_delta import gated_delta
from trainer.nn.kv_cache import KVCache
from trainer.nn.layer_weights import Leaves, Projections
from trainer.nn.linear import scale_by
from trainer.nn.mamba import mamba
from trainer.nn.mamba2 import mamba2
from trainer.nn.short_conv import short_conv

# (hidden states [B, T, D], weights, context, states of the layer) -> output [B, T, D], new states
MixerFunction = Callable[
    [Array, Projections, LayerContext, Mapping[str, Array]],
    tuple[Array, dict[str, Array]],
]
MIXERS: Mapping[str, MixerFunction] = {
    "short_conv": short_conv,
    "gated_delta": gated_delta,
    "mamba2": mamba2,
    "mamba": mamba,
}


def recurrent_mixer(
    x: Array,
    weights: Projections,
    context: LayerContext,
    *,
    input_norm: Leaves | None = None,
) -> tuple[Array, KVCache | None]:
    """Compute the recurrent mixer of a layer.

    Args:
        x: Hidden states [B, T, D].
        weights: Weights of the mixer.
        context: Architecture, sharding and cache of the layer.
        input_norm: Weights of the norm of `x`. None skips the norm.

    Returns:
        The output [B, T, D], and the cache with the new tokens.
    """
    mixer = context.arch_config.mixer
    assert mixer is not None
    if input_norm is not None:
        weights = {**weights, INPUT_NORM: input_norm}
    cache = context.kv_cache
    states: Mapping[str, Array] = {}
    if cache is not None:
        assert cache.recurrent is not None
        states = cache.recurrent.read()
    output, new_states = MIXERS[mixer.kind](x, weights, context, states)
    if cache is not None:
        cache = cache.write_states(new_states, context.sharding)
    return name_activation(scale_by(output, mixer.output_scale), "o"), cache
