"""The steps that recurrent mixers share: projections in chunks of tokens, and convolutions.

Axes: B rows of the batch, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from trainer.nn.attention_steps import INPUT_NORM
from trainer.nn.causal_conv import causal_conv
from trainer.nn.context import LayerContext
from trainer.nn.layer_weights import Projections
from trainer.nn.linear import linear, scale_by
from trainer.nn.norms import norm
from trainer.nn.token_chunks import TokenFunction, over_token_chunks

# End of the key of a convolution in the weights of a mixer.
CONV = "_conv"


def project(
    x: Array, weights: Projections, names: Sequence[str], context: LayerContext
) -> dict[str, Array]:
    """Normalize hidden states [B, T, D], and project them, in chunks of tokens. `Mixer` has the factors.

    Args:
        x: Hidden states [B, T, D].
        weights: Projections by name, and optionally INPUT_NORM, the norm of `x`.
        names: The projections to compute. A name without weights is skipped.
        context: Architecture and sharding of the layer.

    Returns:
        [B, T, ...] by name.
    """
    sharding = context.sharding
    mixer = context.arch_config.mixer
    assert mixer is not None
    factors = dict(mixer.projection_scales)

    def project_chunk(x: Array, weights: Projections, constants: None) -> dict[str, Array]:
        if INPUT_NORM in weights:
            x = norm(x, weights[INPUT_NORM], context.arch_config)
        x = scale_by(x, mixer.input_scale)
        x = sharding.constrain(x, "batch", "seq", "embed")
        projected: dict[str, Array] = {}
        for name in names:
            if name in weights:
                output = linear(x, weights[name], num_devices=sharding.num_devices)
                projected[name] = scale_by(output, factors.get(name, 1.0))
        return projected

    selected = {name: weights[name] for name in (*names, INPUT_NORM) if name in weights}
    return over_chunks(project_chunk, x.shape[1], context)(x, selected, None)


def project_out(
    hidden: Any, combine: Callable[[Any, Any], Array], weights: Any, context: LayerContext
) -> Array:
    """Combine the results of a mixer, and project them to [B, T, D], in chunks of tokens.

    Args:
        hidden: Tree of arrays [B, T, ...].
        combine: Computes the input [B, T, ...] of the output projection from `hidden` and the weights, each token
            by itself.
        weights: Weights of the mixer, with the output projection `o`.
        context: Architecture and sharding of the layer.
    """

    def project_chunk(hidden: Any, weights: Any, constants: None) -> Array:
        combined = combine(hidden, weights)
        return linear(combined, weights["o"], num_devices=context.sharding.num_devices)

    selected = {name: weights[name] for name in ("o", "norm") if name in weights}
    num_tokens = jax.tree.leaves(hidden)[0].shape[1]
    return over_chunks(project_chunk, num_tokens, context)(hidden, selected, None)


def document_starts(context: LayerContext, shape: tuple[int, ...]) -> Array:
    """Return a bool mask [B, T] of the first tokens of documents."""
    if context.document_positions is None:
        return jnp.zeros(shape, bool)
    return context.document_positions == 0


def over_chunks(function: TokenFunction, num_tokens: int, context: LayerContext) -> TokenFunction:
    """Return a function that applies `function` to chunks of `ffn_chunk_size` tokens."""
    return over_token_chunks(
        function,
        num_tokens,
        context.ffn_chunk_size,
        num_shards=context.sharding.sequence_parallel_size,
    )


def convolve(
    inputs: Mapping[str, Array],
    weights: Projections,
    context: LayerContext,
    states: Mapping[str, Array],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Convolve each input with the convolution of its name.

    Args:
        inputs: [B, T, channels] by name. For "v" the weights have the convolution "v_conv".
        weights: Weights of the mixer.
        context: Positions of the tokens.
        states: Inputs of earlier tokens, by the name of the convolution. Empty without a cache.

    Returns:
        The outputs by the names of the inputs, and the new states.
    """
    # The backward pass shifts the input again: a copy of it per tap takes more memory than time.
    run_conv = jax.checkpoint(causal_conv, prevent_cse=False)
    outputs: dict[str, Array] = {}
    new_states: dict[str, Array] = {}
    for name, x in inputs.items():
        conv = name + CONV
        outputs[name], new_states[conv] = run_conv(
            x, weights[conv], states.get(conv), context.document_positions
        )
    return outputs, new_states
