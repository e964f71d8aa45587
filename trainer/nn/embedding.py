"""The input of the first layer, from embeddings of tokens and of learned positions, and the inputs of each layer.

Axes: L layers, B rows of the batch, T tokens, D model width, P width of the inputs of layers, V rows of E.
"""

from __future__ import annotations

import math
from itertools import chain

import jax.numpy as jnp
from jax import Array

from prepcli.models.param_tree import Tree
from trainer.distributed.sharding import UNSPLIT, ShardingContext, order_tokens
from trainer.nn.attention_mask import sinusoidal_positions
from trainer.nn.block import shard_residual
from trainer.nn.model_spec import ForwardConfig, ModelSpec
from trainer.nn.projections import Projections, linear, norm
from trainer.nn.token_chunks import over_token_chunks


def embed_tokens(
    params: Tree,
    tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    positions: Array | None = None,
) -> Array:
    """Embed tokens [B, T] as the input [B, T, D] of the first layer.

    Args:
        params: Parameters in the dtype of the computation.
        tokens: int32 [B, T].
        model: The model.
        forward_config: Execution options.
        positions: int32 [B, T], for learned or sinusoidal positions. None means the `zigzag_order` of the mesh.

    Returns:
        Token embeddings, plus learned position embeddings if the model has them. Normalized if it has `embed_norm`.
    """
    arch_config = model.arch_config
    x = jnp.take(
        params["embed"]["tokens"],
        lookup_indices(tokens, "embed.tokens", model, forward_config.sharding),
        axis=0,
    )
    if arch_config.embed_scale != 1.0:
        # Round the scale to the dtype of `x` first, as transformers does for Gemma.
        x = x * jnp.asarray(arch_config.embed_scale, x.dtype)
    x = project_width(x, params, "project_in", forward_config=forward_config)
    if arch_config.has_learned_positions:
        offset = arch_config.position_offset
        table = params["embed"]["positions"]
        if positions is None:
            x = x + order_tokens(table[offset : offset + tokens.shape[1]], forward_config.sharding)
        else:
            rows = lookup_indices(positions, "embed.positions", model, forward_config.sharding)
            x = x + table[offset + rows]
    if arch_config.has_sinusoidal_positions:
        if positions is None:
            positions = order_tokens(jnp.arange(tokens.shape[1]), forward_config.sharding)
        table = sinusoidal_positions(positions + arch_config.position_offset, x.shape[-1])
        x = x + table.astype(x.dtype)
    if "embed_norm" in params or arch_config.has_plain_embed_norm:
        x = norm(x, params.get("embed_norm", {}), arch_config)
    return shard_residual(x, forward_config.sharding)


def lookup_indices(indices: Array, path: str, model: ModelSpec, sharding: ShardingContext) -> Array:
    """Return the indices of a table lookup in a sharding that XLA can compile.

    XLA (jax 0.10.2) cannot compile the lookup if one mesh axis splits both the tokens and the table. The indices are
    then gathered along T.

    Args:
        indices: [B, T] row numbers of the table.
        path: Path of the table in the parameter tree.
        model: The model.
        sharding: Mesh and rules.
    """
    table_axes = chain(*sharding.computed_axes(model.leaves[path]))
    seq_axes = sharding.activation_axes(indices.shape, "batch", "seq")[1]
    if {*seq_axes} & {*table_axes}:
        return sharding.constrain(indices, "batch", UNSPLIT)
    return indices


def project_width(x: Array, params: Tree, name: str, *, forward_config: ForwardConfig) -> Array:
    """Project between the embedding width and the layer width, if the two differ."""
    if name not in params:
        return x
    return linear(x, params[name], num_devices=forward_config.sharding.num_devices)


# The inputs of each layer from its tokens (per-layer embeddings of Gemma 3n and Gemma 4).
#
# Layer l has an embedding E_l of its own for each token t. With the input x of the first layer, of width D:
#
#     input_l = (norm(x W_l / sqrt(D)) + sqrt(P) E_l[t]) / sqrt(2)
#
# A token without a row in E has row 0. `trainer.nn.block` adds the input to the residual stream. Source:
# `project_per_layer_inputs` in `modeling_gemma4.py` of transformers.


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
