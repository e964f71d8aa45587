"""Calls of attention kernels by each device of a mesh, for its own rows and heads.

XLA cannot split the calls of kernels that it did not compile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax import Array
from jax.sharding import PartitionSpec

from prepcli.models.architecture import ArchConfig
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels.options import AttentionOptions

PASSED_FIELDS = {"q_segment_ids", "kv_segment_ids", "layer_score_scale", "window"}
# The kernels assume causal masks of whole sequences in order, and rotation is applied before them.
OTHER_FIELDS = {"q_positions", "kv_positions", "cos_sin", "is_causal"}

AttentionKernel = Callable[[Array, KV, ArchConfig, AttentionMask, AttentionOptions], Array]


def attend_per_device(
    kernel: AttentionKernel,
    q: Array,
    kv: KV,
    *,
    arch_config: ArchConfig,
    mask: AttentionMask,
    options: AttentionOptions,
    sharding: ShardingContext,
) -> Array:
    """Compute causal attention, each device for its own rows and heads.

    Args:
        kernel: A kernel for causal masks of whole sequences in order. It does not read positions.
        q: Queries [B, T, H, E].
        kv: Keys and values [B, T, K, E]. The mesh splits K as it splits H.
        arch_config: `attn_scale` and `attn_logit_softcap`.
        mask: Window, segments and the layer's score scale.
        options: Passed to the kernel.
        sharding: The device mesh and its rules.

    Returns:
        [B, T, H, E] in the dtype of the values.

    Raises:
        ValueError: The mask has a field that the devices would not get.
    """
    _check_fields(mask)

    def run(q: Array, kv: KV, segment_ids: Array | None, score_scale: Array | None) -> Array:
        local_mask = AttentionMask(
            q_segment_ids=segment_ids,
            kv_segment_ids=segment_ids,
            layer_score_scale=score_scale,
            window=mask.window,
        )
        return kernel(q, kv, arch_config, local_mask, options)

    arguments = (q, kv, mask.q_segment_ids, mask.layer_score_scale)
    if sharding.device_mesh is None:
        return run(*arguments)
    batch_axes, _, head_axes, _ = sharding.activation_axes(
        q.shape, "batch", "seq", "heads", "head_dim"
    )
    heads = PartitionSpec(batch_axes, None, head_axes)
    rows = PartitionSpec(batch_axes)
    in_specs = (heads, heads, rows, PartitionSpec())
    per_device = jax.shard_map(
        run, mesh=sharding.device_mesh, in_specs=in_specs, out_specs=heads, check_vma=False
    )
    return per_device(*arguments)


def _check_fields(mask: AttentionMask) -> None:
    """Check that all fields of a mask reach the devices. Raise ValueError if one does not."""
    for field in dataclasses.fields(mask):
        if (
            field.name not in PASSED_FIELDS | OTHER_FIELDS
            and getattr(mask, field.name) is not field.default
        ):
            raise ValueError(f"`{field.name}` of the mask is not passed to the devices")
