"""The inputs of each layer from its tokens (per-layer embeddings of Gemma 3n and Gemma 4).

Layer l has an embedding E_l of its own for each token t. With the input x of the first layer, of width D:

    input_l = (norm(x W_l / sqrt(D)) + sqrt(P) E_l[t]) / sqrt(2)

A token without a row in E has row 0. `trainer.nn.input_gate` adds the input to the residual stream. Source:
`project_per_layer_inputs` in `modeling_gemma4.py` of transformers.

Axes: L layers, B rows of the batch, T tokens, D model width, P width of the inputs, V rows of E.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from prepcli.models.param_tree import Tree
from trainer.distributed.sharding import UNSPLIT
from trainer.nn.embedding import lookup_indices
from trainer.nn.layer_weights import Projections
from trainer.nn.linear import linear
from trainer.nn.model_spec import ForwardConfig, ModelSpec
from trainer.nn.norms import norm
from trainer.nn.token_chunks import over_token_chunks


def layer_inputs(
    params: Tree, tokens: Array, x: Array, model: ModelSpec, forward_config: ForwardConfig
) -> Array | None:
    """Compute the inputs of all layers from their tokens.

    Args:
        params: Parameters in the dtype of the computation.
        tokens: int32 [B, T].
        x: Input [B, T, D] of the first layer.
        model: The model.
        forward_config: Execution options.

    Returns:
        [L, B, T, P]. None if layers have no such inputs.
    """
    arch_config = model.arch_config
    if not arch_config.has_layer_inputs:
        return None
    sharding = forward_config.sharding
    table = params["embed"]["layer_tokens"]
    _, num_rows, width = table.shape
    in_table = jnp.where(tokens < num_rows, tokens, 0)
    rows = lookup_indices(in_table, "embed.layer_tokens", model, sharding)
    # [L, V, P] -> [L, B, T, P] -> [B, T, L, P]
    embedded = jnp.moveaxis(jnp.take(table, rows, axis=1), 0, 2)
    # The factor is rounded to the dtype of the embeddings first, as in transformers.
    embedded = embedded * jnp.asarray(math.sqrt(width), embedded.dtype)

    def combine(inputs: list[Array], weights: Projections, constants: None) -> Array:
        x, embedded = inputs
        x = sharding.constrain(x, "batch", "seq", "embed")
        projected = linear(x, weights["projection"], num_devices=sharding.num_devices)
        projected = projected * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        projected = norm(projected, weights["norm"], arch_config)
        return (projected + embedded) * jnp.asarray(math.sqrt(0.5), x.dtype)

    combined = over_token_chunks(
        combine,
        x.shape[1],
        forward_config.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )([x, embedded], params["layer_inputs"], None)
    combined = sharding.constrain(combined, "batch", "seq", UNSPLIT, UNSPLIT)
    return jnp.moveaxis(combined, 2, 0)
