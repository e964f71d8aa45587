"""Attention kernels of accelerators: flash attention of cuDNN, and JAX's Pallas kernel of splash attention for TPUs.

XLA cannot split the calls of kernels that it did not compile. Each device of a mesh therefore calls them for its own
rows and heads.

Axes: B rows of the batch, T tokens, H query heads, K key and value heads, E head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from prepcli.models.architecture import FULL_ATTENTION, ArchConfig
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.model_spec import AttentionOptions
from trainer.nn.token_chunks import pad_tokens

# Calls of attention kernels by each device of a mesh, for its own rows and heads.
#
# XLA cannot split the calls of kernels that it did not compile.

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


# Flash attention of cuDNN, for NVIDIA GPUs.


def cudnn_attention(
    q: Array, kv: KV, arch_config: ArchConfig, mask: AttentionMask, options: AttentionOptions
) -> Array:
    """Compute causal attention of whole sequences in bfloat16 with cuDNN.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys and values [B, T, K, E]. K divides H.
        arch_config: `attn_scale`.
        mask: Window and the layer's score scale.
        options: Unused: cuDNN chooses its tiles.

    Returns:
        [B, T, H, E] in the dtype of the values.
    """
    if mask.layer_score_scale is not None:
        q = (q * mask.layer_score_scale).astype(q.dtype)
    return jax.nn.dot_product_attention(
        q,
        kv.keys,
        kv.values,
        scale=arch_config.attn_scale,
        is_causal=True,
        local_window_size=None if mask.window == FULL_ATTENTION else (mask.window - 1, 0),
        implementation="cudnn",
    )


# Splash attention: JAX's Pallas kernel of flash attention for TPUs, which skips blocks without visible keys.

# The length of a sequence must be a multiple of the kernel's block size.
LENGTH_MULTIPLE = 128
PADDING_SEGMENT = -1


def splash_attention(
    q: Array,
    kv: KV,
    arch_config: ArchConfig,
    mask: AttentionMask,
    options: AttentionOptions,
    *,
    interpret: bool = False,
) -> Array:
    """Compute causal attention of whole sequences.

    Sequences are padded to whole blocks: padding follows all tokens, so that no token sees it. The kernel has no
    argument for the score scale, so queries are multiplied by it.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys and values [B, T, K, E]. K divides H.
        arch_config: `attn_scale` and `attn_logit_softcap`.
        mask: Window, segments and the layer's score scale.
        options: Unused: the kernel has its own tiles.
        interpret: Whether to run the kernel's operations one by one on any device, for tests.

    Returns:
        [B, T, H, E] in the dtype of the values.
    """
    # The import loads Pallas, which other kernels do not need.
    from trainer.nn.kernels.splash_kernel import make_row_kernel

    num_tokens = q.shape[1]
    padding = -num_tokens % LENGTH_MULTIPLE
    scale = arch_config.attn_scale
    if mask.layer_score_scale is not None:
        scale = scale * mask.layer_score_scale
    scaled_q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    # [B, T, H, E] -> [B, H, T, E], as the kernel reads them
    rows_q = jnp.swapaxes(pad_tokens(scaled_q, padding), 1, 2)
    rows_k = jnp.swapaxes(pad_tokens(kv.keys, padding), 1, 2)
    rows_v = jnp.swapaxes(pad_tokens(kv.values, padding), 1, 2)
    segment_ids = mask.q_segment_ids
    if segment_ids is not None:
        segment_ids = pad_tokens(segment_ids, padding, PADDING_SEGMENT)
    kernel = make_row_kernel(
        num_tokens + padding,
        num_heads=q.shape[2],
        window=mask.window,
        softcap=arch_config.attn_logit_softcap,
        interpret=interpret,
    )
    output = jax.vmap(kernel)(rows_q, rows_k, rows_v, segment_ids)
    return jnp.swapaxes(output, 1, 2)[:, :num_tokens].astype(kv.values.dtype)
