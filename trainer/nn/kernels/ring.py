"""Ring attention: blockwise attention over tokens that the mesh splits (arXiv:2310.01889).

Queries stay on their device. Keys and values visit all devices of the axes that split tokens, one hop at a time, with
their labels, so that any order of the tokens is exact. Each device merges the outputs of its queries over the shards of
keys by their log-sum-exp. In the backward pass the gradients of keys and values move with them, and
one more hop returns them to their device. No hop waits for the attention to the current shard, so
that the two may overlap.

Example with 3 devices and shards 0, 1, 2 of keys. A device sends to the next one, so it holds
earlier shards in later steps:

    step       0    1    2
    device 0   0    2    1
    device 1   1    0    2
    device 2   2    1    0

In the backward pass the gradient of shard 2 is on device 2 in step 0, on device 0 in step 1 and on
device 1 in step 2. The last hop takes it to device 2. `trainer.distributed.sharding` has the
tokens of each shard.

Axes as in `blockwise`. In functions of one device B, T, S and K count its rows, tokens and heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from prepcli.models.activation_memory import RING_BLOCKS, chunk_length
from prepcli.models.architecture import ArchConfig
from prepcli.models.mesh import MeshAxes
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.dropout import RandomKey
from trainer.nn.kernels.blockwise import (
    LOWEST,
    AttentionInputs,
    Constants,
    Labels,
    Residuals,
    TileConfig,
    attend_in_tiles,
    backward,
    forward,
    gradient_dots,
    has_visible,
    sink_gradient,
    tile_config,
)
from trainer.nn.model_spec import AttentionOptions, name_activation


@dataclass(frozen=True, slots=True)
class _Ring:
    """The devices of a call: the mesh, and the axes that split rows, tokens and heads."""

    device_mesh: jax.sharding.Mesh
    row_axes: MeshAxes
    token_axes: MeshAxes
    head_axes: MeshAxes

    @property
    def num_shards(self) -> int:
        """Number of shards of the tokens of a row."""
        return math.prod(self.device_mesh.shape[axis] for axis in self.token_axes)

    def specs(self, constants: Constants) -> Residuals:
        """Return the shardings of the inputs and outputs of the forward pass."""
        # Specs in the place of arrays, as `shard_map` takes them
        tokens: Any = PartitionSpec(self.row_axes, self.token_axes, self.head_axes)
        table: Any = PartitionSpec(None, self.head_axes)
        sinks: Any = PartitionSpec(self.head_axes)
        inputs = AttentionInputs(tokens, tokens, tokens, table, sinks)

        def label_spec(label: Array) -> PartitionSpec:
            return PartitionSpec(self.row_axes if label.shape[0] > 1 else None, self.token_axes)

        q_labels, kv_labels = jax.tree.map(label_spec, (constants.q_labels, constants.kv_labels))
        scale: Any = PartitionSpec()
        rows: Any = PartitionSpec(self.row_axes)
        heads: Any = PartitionSpec(self.head_axes)
        dropout_specs = constants.dropout and dataclasses.replace(
            constants.dropout, row_keys=RandomKey(rows, rows), head_ids=heads
        )
        labels = Constants(q_labels, kv_labels, scale, dropout_specs)
        return Residuals(inputs, labels, output=tokens, log_normalizer=tokens)

    def map_devices(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Return `function` with each device's shards as its arguments and results."""
        return jax.shard_map(
            function, mesh=self.device_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def hop(self, tree: Any) -> Any:
        """Send arrays to the next device of the ring, and receive the arrays of the previous one."""
        pairs = [(shard, (shard + 1) % self.num_shards) for shard in range(self.num_shards)]
        return jax.tree.map(lambda array: lax.ppermute(array, self.token_axes, pairs), tree)

    def sum_shards(self, x: Array) -> Array:
        """Add arrays over all devices with other tokens."""
        return lax.psum(x, self.row_axes + self.token_axes)


class _Shard(NamedTuple):
    """Keys [B, S, K, E] and values [B, S, K, V] of one device, with their labels."""

    k: Array
    v: Array
    labels: Labels


class _PartialOutput(NamedTuple):
    """Attention to the keys so far: output [B, T, K, G, V] and log-sum-exp of scores [B, T, K, G], float32."""

    output: Array
    log_normalizer: Array


def ring_attention(
    q: Array,
    kv: KV,
    arch_config: ArchConfig,
    mask: AttentionMask,
    options: AttentionOptions,
    *,
    sharding: ShardingContext,
) -> Array:
    """Compute softmax(q k^T * scale) v of queries and keys that the mesh splits along tokens.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys [B, S, K, E] and values [B, S, K, V]. K divides H, and the mesh splits both alike.
        arch_config: `attn_scale` and `attn_logit_softcap`.
        mask: Visible keys, score bias, sinks, dropout and the layer's score scale.
        options: Sizes of tiles. Larger tiles than a block of `zigzag_order` would have keys that no query sees.
        sharding: The device mesh and its rules. Its number of token shards divides T and S.

    Returns:
        [B, T, H, V] in the dtype of the values. The output of a query without visible keys is 0.
    """
    assert sharding.device_mesh is not None
    row_axes, token_axes, head_axes, _ = sharding.activation_axes(
        kv.keys.shape, "batch", "seq", "heads", "head_dim"
    )
    ring = _Ring(sharding.device_mesh, row_axes, token_axes, head_axes)
    num_blocks = RING_BLOCKS * ring.num_shards
    config = tile_config(
        arch_config,
        mask,
        q_size=chunk_length(options.q_chunk_size, q.shape[1] // num_blocks),
        kv_size=chunk_length(options.k_chunk_size, kv.keys.shape[1] // num_blocks),
    )
    config = dataclasses.replace(config, sharding=ShardingContext(), is_partial=True)
    return attend_in_tiles(
        partial(_attend, config, ring), q, kv, mask, config, num_shards=ring.num_shards
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    config: TileConfig, ring: _Ring, inputs: AttentionInputs, constants: Constants
) -> Array:
    """Compute the output [B, T, K, G, V]. Each shard has whole tiles."""
    return _forward(config, ring, inputs, constants)[0]


def _forward(
    config: TileConfig, ring: _Ring, inputs: AttentionInputs, constants: Constants
) -> tuple[Array, Residuals]:
    specs = ring.specs(constants)
    run = ring.map_devices(
        partial(_local_forward, config, ring),
        (specs.inputs, specs.constants),
        (specs.output, specs.log_normalizer),
    )
    arrays = run(inputs, constants)
    output, log_normalizer = (name_activation(array, "attention_output") for array in arrays)
    return output, Residuals(inputs, constants, output, log_normalizer)


def _local_forward(
    config: TileConfig, ring: _Ring, inputs: AttentionInputs, constants: Constants
) -> tuple[Array, Array]:
    """Compute the output and the log-sum-exp of the queries of one device."""
    # The barrier has the same reason as in `blockwise.forward`: XLA must not compute the masks of all tiles at once.
    q, labels = lax.optimization_barrier((inputs.q, constants))

    def attend(so_far: _PartialOutput, shard: _Shard) -> _PartialOutput:
        def merge(so_far: _PartialOutput) -> _PartialOutput:
            shard_labels = labels._replace(kv_labels=shard.labels)
            # Without sinks: `so_far` starts with them, once for all shards.
            shard_inputs = AttentionInputs(q, shard.k, shard.v, inputs.bias_table, sinks=None)
            _, saved = forward(config, shard_inputs, shard_labels)
            # The attention to the union of two sets of keys. With Z = exp(L), the sum of the exponentials of the
            # scores of a set:
            #
            #     Z = Z_a + Z_b,  O = (Z_a O_a + Z_b O_b) / Z = exp(L_a - L) O_a + exp(L_b - L) O_b
            log_normalizer = jnp.logaddexp(so_far.log_normalizer, saved.log_normalizer)
            output = jnp.float32(0)
            for part in (so_far, saved):
                output = (
                    output + part.output * jnp.exp(part.log_normalizer - log_normalizer)[..., None]
                )
            return _PartialOutput(output, log_normalizer)

        is_visible = has_visible(config, labels.q_labels, shard.labels)
        return lax.cond(is_visible, merge, lambda same: same, so_far)

    def step(
        carry: tuple[_PartialOutput, _Shard], _: None
    ) -> tuple[tuple[_PartialOutput, _Shard], None]:
        so_far, shard = carry
        return (attend(so_far, shard), ring.hop(shard)), None

    log_normalizer = jnp.full(q.shape[:-1], LOWEST, jnp.float32)
    if inputs.sinks is not None:
        log_normalizer = jnp.broadcast_to(inputs.sinks.astype(jnp.float32), q.shape[:-1])
    v = inputs.v
    nothing = _PartialOutput(jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32), log_normalizer)
    carry = (nothing, _Shard(inputs.k, v, labels.kv_labels))
    # n - 1 hops bring all n shards to each device. The last shard is not sent on.
    (so_far, last_shard), _ = lax.scan(step, carry, length=ring.num_shards - 1)
    output, log_normalizer = attend(so_far, last_shard)
    return output.astype(v.dtype), log_normalizer


def _backward(
    config: TileConfig, ring: _Ring, saved: Residuals, output_gradient: Array
) -> tuple[AttentionInputs, None]:
    specs = ring.specs(saved.constants)
    run = ring.map_devices(
        partial(_local_backward, config, ring), (specs, specs.output), specs.inputs
    )
    return run(saved, output_gradient), None


def _local_backward(
    config: TileConfig, ring: _Ring, saved: Residuals, output_gradient: Array
) -> AttentionInputs:
    """Compute the gradients of the queries, keys and values of one device, of the bias table and of the sinks."""
    output_gradient, labels = lax.optimization_barrier((output_gradient, saved.constants))
    # The sinks are no input of a single shard. Their gradient follows at the end.
    inputs = saved.inputs._replace(sinks=None)
    zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), inputs)

    def shard_gradients(shard: _Shard) -> AttentionInputs:
        def compute() -> AttentionInputs:
            constants = labels._replace(kv_labels=shard.labels)
            shard_inputs = inputs._replace(k=shard.k, v=shard.v)
            of_shard = saved._replace(inputs=shard_inputs, constants=constants)
            gradients, _ = backward(config, of_shard, output_gradient)
            return gradients

        is_visible = has_visible(config, labels.q_labels, shard.labels)
        return lax.cond(is_visible, compute, lambda: zeros)

    def add(so_far: AttentionInputs, shard: _Shard) -> AttentionInputs:
        # The gradients follow their shard: after the hop they belong to the current shard.
        d_k, d_v = ring.hop((so_far.k, so_far.v))
        return jax.tree.map(jnp.add, so_far._replace(k=d_k, v=d_v), shard_gradients(shard))

    def step(
        carry: tuple[AttentionInputs, _Shard], _: None
    ) -> tuple[tuple[AttentionInputs, _Shard], None]:
        so_far, shard = carry
        return (add(so_far, shard), ring.hop(shard)), None

    carry = (zeros, _Shard(inputs.k, inputs.v, labels.kv_labels))
    (so_far, last_shard), _ = lax.scan(step, carry, length=ring.num_shards - 1)
    gradients = add(so_far, last_shard)
    # After n - 1 hops the gradients are one device before the device of their shard.
    d_k, d_v = ring.hop((gradients.k, gradients.v))
    d_table = None if gradients.bias_table is None else ring.sum_shards(gradients.bias_table)
    d_sinks = sink_gradient(saved, gradient_dots(saved, output_gradient))
    if d_sinks is not None:
        d_sinks = ring.sum_shards(d_sinks)
    gradients = AttentionInputs(gradients.q, d_k, d_v, d_table, d_sinks)
    return jax.tree.map(lambda d, like: d.astype(like.dtype), gradients, saved.inputs)


_attend.defvjp(_forward, _backward)
