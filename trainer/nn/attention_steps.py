"""The steps that follow the projections in all forms of attention: the kernel and the output projection.

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E width of queries and keys, V width
of values, D model width, R rotated elements of a head.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, nn

from trainer.distributed.sharding import ShardingContext
from trainer.nn.activation_names import name_activation
from trainer.nn.attention_mask import KV
from trainer.nn.context import LayerContext
from trainer.nn.differential_attention import PAIR_FACTORS, pair_factors, subtract_pairs
from trainer.nn.dropout import DropoutSite
from trainer.nn.kernels import attend
from trainer.nn.layer_weights import Projections
from trainer.nn.linear import linear
from trainer.nn.norms import norm
from trainer.nn.position_encoding import CosSin
from trainer.nn.token_chunks import over_token_chunks

# Key in the weights of a chunk: the norm of the input, not of queries or keys.
INPUT_NORM = "input"
# Key of the norm of the input of the output projection.
OUTPUT_NORM = "o_norm"


def attend_and_project(
    q: Array,
    kv: KV,
    weights: Projections,
    context: LayerContext,
    *,
    gate: Array | None = None,
    dropout_site: DropoutSite = DropoutSite.ATTENTION,
) -> Array:
    """Compute attention and its output projection.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys [B, S, K, E] and values [B, S, K, V].
        weights: Output projection `o`, the optional norm `o_norm` of its input (BitNet), optional `sinks`, and the
            optional vectors of differential attention.
        context: Mask, sharding, kernel and dropout.
        gate: [B, T, H, V], the output of attention is multiplied by its sigmoid. None means no gate.
        dropout_site: Site of the dropout of probabilities.

    Returns:
        [B, T, D].
    """
    sharding = context.sharding
    q, kv = _name_kernel_inputs(q, _repeat_kv(q, kv, sharding))
    mask = context.mask.with_chunk_segments(len(q))
    if context.dropout is not None:
        dropout = context.dropout.attention(dropout_site, q.shape[2])
        mask = dataclasses.replace(mask, dropout=dropout)
    if "sinks" in weights:
        mask = dataclasses.replace(mask, sinks=weights["sinks"]["bias"])
    mixed = attend(
        q,
        kv,
        arch_config=context.arch_config,
        mask=mask,
        options=context.attention_options,
        sharding=sharding,
    )
    mixed = sharding.constrain(mixed, "batch", "seq", "heads", "head_dim")

    def project_out(inputs: list[Array], weights: Projections, constants: None) -> Array:
        mixed, *gates = inputs
        for gate in gates:
            mixed = mixed * nn.sigmoid(gate)
        if PAIR_FACTORS in weights:
            mixed = subtract_pairs(mixed, weights[PAIR_FACTORS], context.arch_config.norm_eps)
        if OUTPUT_NORM in weights:
            # Over the elements of all heads of a token.
            mixed = norm(mixed, weights[OUTPUT_NORM], context.arch_config, axes=(-2, -1))
        return linear(mixed, weights["o"], num_devices=sharding.num_devices)

    output_weights = {name: weights[name] for name in ("o", OUTPUT_NORM) if name in weights}
    if context.initial_lambda is not None:
        output_weights[PAIR_FACTORS] = pair_factors(weights, context.initial_lambda, mixed.dtype)
    inputs = [mixed] if gate is None else [mixed, gate]
    # [B, T, H, V] -> [B, T, D]
    output = over_token_chunks(
        project_out,
        mixed.shape[1],
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )(inputs, output_weights, None)
    return name_activation(output, "o")


def rotary_tables(context: LayerContext) -> CosSin | None:
    """Return the rotation of queries and keys with an axis of rows, [1 or B, T, ...]. None if there is none."""
    cos_sin = context.mask.cos_sin
    if cos_sin is None or cos_sin.cosine.ndim == 3:
        return cos_sin
    return jax.tree.map(lambda table: table[None], cos_sin)


def _name_kernel_inputs(q: Array, kv: KV) -> tuple[Array, KV]:
    """Name queries, keys and values, so that a rematerialization policy can save them."""
    q = name_activation(q, "q")
    return q, KV(name_activation(kv.keys, "k"), name_activation(kv.values, "v"))


def _repeat_kv(q: Array, kv: KV, sharding: ShardingContext) -> KV:
    """Repeat keys and values [B, S, K, E] to [B, S, H, E] if the mesh splits H into more shards than K.

    Each device then computes its own query heads without communication.
    """
    num_heads = q.shape[2]
    num_kv_heads = kv.keys.shape[2]
    if sharding.num_shards("heads", num_heads) == sharding.num_shards("kv_heads", num_kv_heads):
        return kv

    def repeat(array: Array) -> Array:
        repeated = jnp.repeat(array, num_heads // num_kv_heads, axis=2)
        return sharding.constrain(repeated, "batch", "seq", "heads", "head_dim")

    return KV(repeat(kv.keys), repeat(kv.values))
