"""The features that one call of an attention kernel uses, and their check against the kernel's capabilities.

A kernel is chosen by the features of its model. This check also covers masks from other callers, so that no
kernel ignores a part of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator

from jax import Array

from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig
from prepcli.models.attention_kernels import KernelSpec, missing_features, unsupported_error
from prepcli.models.attention_needs import AttentionFeature
from trainer.nn.attention_mask import KV, AttentionMask


def check_call_features(
    spec: KernelSpec, q: Array, kv: KV, *, arch_config: ArchConfig, mask: AttentionMask
) -> None:
    """Check that a kernel supports all features of a call.

    Raises:
        UsageError: It does not support one of them.
    """
    features = frozenset(_call_features(q, kv, arch_config=arch_config, mask=mask))
    if reasons := [*missing_features(spec, features)]:
        raise unsupported_error(spec, reasons)


def _call_features(
    q: Array, kv: KV, *, arch_config: ArchConfig, mask: AttentionMask
) -> Iterator[AttentionFeature]:
    """Yield what a call of attention requires of a kernel, such as a window or dropout.

    Positions of queries and keys count as equal if their shapes are equal, because traced values are unknown.
    """
    is_causal = mask.is_causal and mask.q_positions is not None and mask.kv_positions is not None
    yield AttentionFeature.CAUSAL if is_causal else AttentionFeature.BIDIRECTIONAL
    if is_causal and mask.window != FULL_ATTENTION:
        yield AttentionFeature.WINDOW
    if is_causal and _has_unequal_positions(mask):
        yield AttentionFeature.POSITIONS
    if q.shape[2] != kv.keys.shape[2]:
        yield AttentionFeature.GROUPED_HEADS
    if mask.kv_valid is not None:
        yield AttentionFeature.KEY_PADDING
    if mask.q_segment_ids is not None and mask.kv_segment_ids is not None:
        yield AttentionFeature.SEGMENTS
    if mask.dropout is not None:
        yield AttentionFeature.DROPOUT
    if mask.bias is not None:
        yield AttentionFeature.SCORE_BIAS
    if q.shape[-1] != kv.values.shape[-1]:
        yield AttentionFeature.VALUE_WIDTH
    if mask.sinks is not None:
        yield AttentionFeature.SINKS
    if mask.layer_score_scale is not None:
        yield AttentionFeature.LAYER_SCALE
    if arch_config.attn_logit_softcap != NO_SOFTCAP:
        yield AttentionFeature.SOFTCAP


def _has_unequal_positions(mask: AttentionMask) -> bool:
    """Return whether positions differ between rows of the batch, or between queries and keys."""
    assert mask.q_positions is not None
    assert mask.kv_positions is not None
    return mask.q_positions.ndim != 1 or mask.q_positions.shape != mask.kv_positions.shape
