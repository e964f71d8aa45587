"""The features of attention that a model and a run need from a kernel. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from prepcli.core.errors import Key, text, usage_error
from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig
from prepcli.models.dropout_config import NO_DROPOUT, DropoutConfig
from prepcli.models.param_tree import KV_HEAD_DIMS, ParamLeaf, dim_extent
from prepcli.models.remat import SAVES_SCORES, RematPolicy


class AttentionFeature(StrEnum):
    """A feature of attention. The value is its name in messages and in the documentation."""

    CAUSAL = "causal masks"
    WINDOW = "sliding windows"
    MIXED_WINDOWS = "windows that differ between layers"
    CHUNKS = "chunks of positions"
    BIDIRECTIONAL = "attention without a causal mask"
    CROSS = "cross-attention"
    GROUPED_HEADS = "grouped query heads"
    KEY_PADDING = "padding of keys that differs between rows"
    SEGMENTS = "segment ids"
    SCORE_BIAS = "relative position bias"
    SOFTCAP = "softcap of scores"
    LAYER_SCALE = "score scale per layer"
    SINKS = "attention sinks"
    VALUE_WIDTH = "values of another width than keys"
    DROPOUT = "dropout of probabilities"
    FCM = "forgetful causal masking"
    POSITIONS = "positions other than 0 to T - 1"
    SPLIT_SEQUENCE = "sequences split over devices"
    SAVED_SCORES = "remat policies that save scores"


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """The requirements of a run on its attention kernel.

    Attributes:
        features: Features of the masks, the scores and the run.
        dtype: Dtype of queries, keys and values.
        head_dim: Width of a head.
    """

    features: frozenset[AttentionFeature]
    dtype: str
    head_dim: int


def required_attention_features(
    arch_config: ArchConfig, leaves: Mapping[str, ParamLeaf]
) -> frozenset[AttentionFeature]:
    """Return the features that the attention of a model needs for whole sequences in order.

    Args:
        arch_config: The choices of the layers.
        leaves: Parameters by path.
    """
    num_heads = dim_extent(leaves, "heads")
    # Families without grouped heads have only `heads`.
    has_groups = any(dim_extent(leaves, dim) not in (0, num_heads) for dim in KV_HEAD_DIMS)
    return frozenset(_arch_features(arch_config)) | (
        {AttentionFeature.GROUPED_HEADS} if has_groups else set()
    )


def _arch_features(arch_config: ArchConfig) -> Iterator[AttentionFeature]:
    """Yield the features that the layers of an architecture need from a kernel."""
    yield AttentionFeature.CAUSAL
    if any(window != FULL_ATTENTION for window in arch_config.sliding_windows):
        yield AttentionFeature.WINDOW
    if len({*arch_config.sliding_windows}) > 1:
        yield AttentionFeature.MIXED_WINDOWS
    if arch_config.chunked_layers:
        yield AttentionFeature.CHUNKS
    if arch_config.encoder is not None:
        yield from (
            AttentionFeature.BIDIRECTIONAL,
            AttentionFeature.CROSS,
            AttentionFeature.KEY_PADDING,
        )
        yield from _arch_features(arch_config.encoder)
    if arch_config.score_bias is not None:
        yield AttentionFeature.SCORE_BIAS
    if arch_config.attn_logit_softcap != NO_SOFTCAP:
        yield AttentionFeature.SOFTCAP
    has_other_keys = arch_config.latent_key_dim or arch_config.has_key_scores
    if has_other_keys or arch_config.has_differential_attention:
        yield AttentionFeature.VALUE_WIDTH
    if arch_config.has_attention_sinks:
        yield AttentionFeature.SINKS
    if arch_config.scale_attn_by_inverse_layer_idx:
        yield AttentionFeature.LAYER_SCALE


def check_mixer(arch_config: ArchConfig, features: frozenset[AttentionFeature]) -> None:
    """Check the features of a run against the recurrent mixer of a model.

    Raises:
        UsageError: The mixer needs whole sequences or every token, and the run has neither.
    """
    if arch_config.mixer is None:
        return
    if AttentionFeature.SPLIT_SEQUENCE in features:
        raise usage_error(
            "sequences split over sp are not supported for this model",
            "a recurrent layer needs the state of all earlier tokens of a row",
            "use a `mesh` without sp",
        )
    if AttentionFeature.FCM in features:
        raise usage_error(
            "forgetful causal masking is not supported for this model",
            "it hides keys of attention, and recurrent layers have none",
            text("remove {} from the recipe", Key("model.fcm_ratio")),
        )


def run_features(
    *,
    remat_policy: RematPolicy,
    num_sequence_shards: int,
    dropout: DropoutConfig = NO_DROPOUT,
    has_segments: bool = False,
) -> frozenset[AttentionFeature]:
    """Return the features that a run needs in addition to those of its model.

    Args:
        remat_policy: Rematerialization policy of the layers.
        num_sequence_shards: Number of shards of a sequence in attention.
        dropout: Rates of dropout and forgetful causal masking.
        has_segments: Whether documents share a sequence and do not attend to each other.
    """
    is_needed = {
        AttentionFeature.SEGMENTS: has_segments,
        AttentionFeature.SAVED_SCORES: remat_policy in SAVES_SCORES,
        AttentionFeature.SPLIT_SEQUENCE: num_sequence_shards > 1,
        AttentionFeature.DROPOUT: dropout.attention > 0,
        AttentionFeature.FCM: max(dropout.fcm_ratio) > 0,
    }
    return frozenset(feature for feature, needed in is_needed.items() if needed)
