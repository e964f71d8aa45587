"""The gated per-layer embedding of Gemma 3n and Gemma 4: an input of each layer beside the residual stream.

update = norm(W_out (activation(W_gate x) * per_layer_embedding))

Axes: B rows of the batch, T tokens, D model width, P width of the per-layer embedding.
"""

from __future__ import annotations

from jax import Array

from trainer.distributed.sharding import UNSPLIT
from trainer.nn.context import LayerContext
from trainer.nn.layer_weights import Projections
from trainer.nn.linear import linear
from trainer.nn.mlp import ACTIVATION_FUNCTIONS
from trainer.nn.norms import norm
from trainer.nn.token_chunks import over_token_chunks


def input_update(x: Array, weights: Projections, context: LayerContext) -> Array:
    """Compute the update [B, T, D] of the residual stream from the per-layer embeddings of the tokens.

    Args:
        x: Residual stream [B, T, D].
        weights: Projections `gate` [P, D] and `output` [D, P], and the norm `output_norm`.
        context: Architecture and sharding of the layer. `layer_input` has the per-layer embeddings [B, T, P].
    """
    arch_config = context.arch_config
    sharding = context.sharding
    activate = ACTIVATION_FUNCTIONS[arch_config.activation]

    def run_chunk(inputs: list[Array], weights: Projections, constants: None) -> Array:
        x, layer_input = inputs
        x = sharding.constrain(x, "batch", "seq", "embed")
        layer_input = sharding.constrain(layer_input, "batch", "seq", UNSPLIT)
        gate = linear(x, weights["gate"], num_devices=sharding.num_devices)
        hidden = activate(gate) * layer_input
        update = linear(hidden, weights["output"], num_devices=sharding.num_devices)
        return norm(update, weights["output_norm"], arch_config)

    assert context.layer_input is not None
    run_tokens = over_token_chunks(
        run_chunk,
        x.shape[1],
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )
    return run_tokens([x, context.layer_input], weights, None)
