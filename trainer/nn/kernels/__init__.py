"""Attention kernels by name. Each computes the attention of a query to its visible keys.

For a query q, visible keys k_s and values v_s of one head (arXiv:1706.03762, equation 1):

    score_s = softcap * tanh(scale * (q . k_s) / softcap) + bias_s
    p = dropout(softmax(score))
    output = sum_s p_s v_s

With a sink, the softmax has one more score, without a value: p_s = exp(score_s) / (exp(sink) + sum exp(score)). A head
can then attend to nothing (GPT-OSS, arXiv:2508.10925).

Softcap (arXiv:2408.00118), bias (arXiv:1910.10683) and dropout are optional. Query head h reads the
keys and values of head h // G, with G = H / K (grouped-query attention, arXiv:2305.13245).
`prepcli.models.attention_kernels` has the capabilities of the kernels.

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E width of queries and keys,
V width of values.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax import Array

from prepcli.models.architecture import ArchConfig
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels.accelerators import (
    AttentionKernel,
    attend_per_device,
    cudnn_attention,
    splash_attention,
)
from trainer.nn.kernels.blockwise import blockwise_attention
from trainer.nn.kernels.reference import check_call_features, reference_attention
from trainer.nn.kernels.ring import ring_attention
from trainer.nn.model_spec import AttentionOptions, name_activation

KERNELS: Mapping[str, AttentionKernel] = {
    "reference": reference_attention,
    "blockwise": blockwise_attention,
    "cudnn": cudnn_attention,
    "pallas-splash": splash_attention,
}


def attend(
    q: Array,
    kv: KV,
    *,
    arch_config: ArchConfig,
    mask: AttentionMask,
    options: AttentionOptions,
    sharding: ShardingContext,
) -> Array:
    """Compute attention with the kernel of a run, by the formula of this module.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys [B, S, K, E] and values [B, S, K, V]. K divides H.
        arch_config: `attn_scale` and `attn_logit_softcap`.
        mask: Visible keys, score bias and the layer's score scale.
        options: The kernel and its tiles.
        sharding: The device mesh and its rules.

    Returns:
        [B, T, H, V] in the dtype of the values.

    Raises:
        UsageError: The kernel does not support the mask or the scores.
    """
    check_call_features(options.spec, q, kv, arch_config=arch_config, mask=mask)
    if sharding.sequence_parallel_size > 1:
        return ring_attention(q, kv, arch_config, mask, options, sharding=sharding)
    kernel = KERNELS[options.kernel]
    if options.spec.runs_per_device:
        output = attend_per_device(
            kernel, q, kv, arch_config=arch_config, mask=mask, options=options, sharding=sharding
        )
        return name_activation(output, "attention_output")
    return kernel(q, kv, arch_config, mask, options)
