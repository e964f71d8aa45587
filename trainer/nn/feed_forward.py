"""The feed-forward part of a layer: the MLP, or the experts of an MoE layer, after an optional norm.

down(activation(up(x))), or down(activation(gate(x)) * up(x)) if it is gated (arXiv:2002.05202).

Axes: B rows of the batch, T tokens, D model width, F hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from jax import Array

from trainer.nn.activation_names import name_activation
from trainer.nn.context import LayerContext
from trainer.nn.layer_weights import Leaves, MoeWeights, Projections
from trainer.nn.mlp import INPUT_NORM, chunk_input, mlp
from trainer.nn.moe import moe_mlp
from trainer.nn.token_chunks import over_token_chunks


def feed_forward(
    x: Array,
    weights: Projections | MoeWeights,
    context: LayerContext,
    *,
    input_norm: Leaves | None = None,
) -> Array:
    """Compute the MLP or the experts of [B, T, D] in chunks of `context.ffn_chunk_size` tokens.

    Args:
        x: Input [B, T, D].
        weights: Projections `up`, `down` and, if it is gated, `gate`. Experts have a `router` too.
        context: Architecture and sharding of the layer.
        input_norm: Weights of the norm of `x`. None skips the norm.

    Returns:
        [B, T, D].
    """
    arch_config = context.arch_config
    sharding = context.sharding

    def run_experts(x: Array, weights: MoeWeights, constants: None) -> Array:
        normed = chunk_input(x, weights, arch_config, sharding)
        router_input = x if arch_config.router.has_own_norm else normed
        return moe_mlp(normed, weights, arch_config, sharding, router_input=router_input)

    # A model with experts may have dense layers too.
    if "router" in weights:
        run_chunk = run_experts
    else:
        run_chunk = partial(mlp, arch_config=arch_config, sharding=sharding)
    chunk_weights: Mapping[str, object] = weights
    if input_norm is not None:
        chunk_weights = {**weights, INPUT_NORM: input_norm}
    run_tokens = over_token_chunks(
        run_chunk,
        x.shape[1],
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )
    output = run_tokens(x, chunk_weights, None)
    return name_activation(output, "mlp_output")
