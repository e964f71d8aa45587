"""The attention kernels by name: platforms and capabilities of each, and the choice of one for a run. Pure.

A model and a run need features of attention. A kernel is chosen by them. `trainer.nn.kernels` has the functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.models.activation_memory import NO_SCORES, SAVES_INPUT, SAVES_SCORES, RematPolicy
from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig
from prepcli.models.layer_config import NO_DROPOUT, DropoutConfig
from prepcli.models.param_tree import KV_HEAD_DIMS, ParamLeaf, dim_extent


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
    """The requirements of a run on its attention kernel."""

    features: frozenset[AttentionFeature]  # Features of the masks, the scores and the run.
    dtype: str  # Dtype of queries, keys and values.
    head_dim: int  # Width of a head.


def required_attention_features(
    arch_config: ArchConfig, leaves: Mapping[str, ParamLeaf]
) -> frozenset[AttentionFeature]:
    """Return the features that the attention of a model needs for whole sequences in order."""
    num_heads = dim_extent(leaves, "heads")
    # Families without grouped heads have only `heads`.
    has_groups = any(dim_extent(leaves, dim) not in (0, num_heads) for dim in KV_HEAD_DIMS)
    features = needed_features({AttentionFeature.GROUPED_HEADS: has_groups})
    encoder = arch_config.encoder
    if encoder is not None:
        features |= {
            AttentionFeature.BIDIRECTIONAL,
            AttentionFeature.CROSS,
            AttentionFeature.KEY_PADDING,
        }
    for stack in (arch_config, encoder):
        if stack is None:
            continue
        windows = set(stack.sliding_windows)
        has_wide_keys = stack.latent_key_dim or stack.has_key_scores
        is_needed = {
            AttentionFeature.CAUSAL: True,
            AttentionFeature.WINDOW: bool(windows - {FULL_ATTENTION}),
            AttentionFeature.MIXED_WINDOWS: len(windows) > 1,
            AttentionFeature.CHUNKS: bool(stack.chunked_layers),
            AttentionFeature.SCORE_BIAS: stack.score_bias is not None,
            AttentionFeature.SOFTCAP: stack.attn_logit_softcap != NO_SOFTCAP,
            AttentionFeature.VALUE_WIDTH: has_wide_keys or stack.has_differential_attention,
            AttentionFeature.SINKS: stack.has_attention_sinks,
            AttentionFeature.LAYER_SCALE: stack.scale_attn_by_inverse_layer_idx,
        }
        features |= needed_features(is_needed)
    return features


def needed_features(is_needed: Mapping[AttentionFeature, object]) -> frozenset[AttentionFeature]:
    """Return the features with a true value."""
    return frozenset(feature for feature, needed in is_needed.items() if needed)


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
    return needed_features(is_needed)


AUTO = "auto"
# Tokens up to which dense attention is preferred to blockwise attention.
# It is at least as fast as tiles of 512, the default of accelerators.
MAX_DENSE_LENGTH = 1024
# Tiles of 64, the default of CPUs, save little memory up to this length, and take longer to
# compile.
CPU_MAX_DENSE_LENGTH = 255
# Compute capability of the Hopper generation.
HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """The kind of the devices of a run."""

    platform: str  # `cpu`, `cuda`, `rocm` or `tpu`.
    # Compute capability of an NVIDIA GPU. None for other devices, or if it is unknown.
    compute_capability: tuple[int, int] | None = None


CPU = DeviceKind("cpu")
# For estimates: an accelerator without a specific kernel.
ANY_ACCELERATOR = DeviceKind("accelerator")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """The capabilities of an attention kernel."""

    name: str  # in recipes
    summary: str  # what it computes, for the documentation
    features: frozenset[AttentionFeature]
    platforms: tuple[str, ...] = ()  # that it runs on. Empty for all.
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    head_multiple: int = 1  # divisor of the head width
    max_head_dim: int | None = None  # None for no limit
    hopper_max_head_dim: int | None = None  # on GPUs of compute capability 9.0 or later
    # Whether `q_chunk_size` and `k_chunk_size` set the scores that exist at the same time
    has_tiles: bool = False
    # Whether each device calls it for its own rows and heads, because XLA cannot split it
    runs_per_device: bool = False

    def score_tile(self, q_chunk_size: int, k_chunk_size: int) -> tuple[int, int] | None:
        """Return the size of a tile of attention scores: the part of the score matrix that is in memory at once.

        Returns:
            Queries and keys of a tile. None if the whole matrix is in memory. `NO_SCORES` if the kernel keeps the
            scores on the chip.
        """
        # These kernels are one operation for XLA and keep scores on the chip.
        if self.runs_per_device:
            return NO_SCORES
        if self.has_tiles:
            return (q_chunk_size, k_chunk_size)
        return None


ACCELERATOR_FEATURES = frozenset(
    {
        *(
            AttentionFeature.CAUSAL,
            AttentionFeature.WINDOW,
            AttentionFeature.MIXED_WINDOWS,
            AttentionFeature.GROUPED_HEADS,
        ),
        *(AttentionFeature.LAYER_SCALE, AttentionFeature.SAVED_SCORES),
    }
)
KERNEL_SPECS: Mapping[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        KernelSpec(
            "reference",
            "the scores of all queries and keys at once",
            frozenset(AttentionFeature) - {AttentionFeature.SPLIT_SEQUENCE},
        ),
        KernelSpec(
            "blockwise",
            "tile by tile, with memory linear in the length",
            frozenset(AttentionFeature) - {AttentionFeature.SAVED_SCORES},
            has_tiles=True,
        ),
        KernelSpec(
            "cudnn",
            "flash attention of cuDNN",
            ACCELERATOR_FEATURES,
            platforms=("cuda",),
            dtypes=("bfloat16",),
            # The limits of jax's `fused_attention_stablehlo`.
            head_multiple=8,
            max_head_dim=128,
            hopper_max_head_dim=256,
            runs_per_device=True,
        ),
        KernelSpec(
            "pallas-splash",
            "splash attention, a Pallas kernel for TPUs",
            ACCELERATOR_FEATURES | {AttentionFeature.SOFTCAP, AttentionFeature.SEGMENTS},
            platforms=("tpu",),
            dtypes=("float32", "bfloat16"),
            runs_per_device=True,
        ),
    )
}
KERNEL_NAMES = tuple(KERNEL_SPECS)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The attention kernel of a run."""

    name: str  # One of `KERNEL_NAMES`.
    reason: str  # Why it was chosen.

    def __str__(self) -> str:
        return f"attention {self.name} ({self.reason})"


def rank_kernels(
    requested: str, needs: AttentionNeeds, *, device: DeviceKind, length: int
) -> tuple[KernelChoice, ...]:
    """Return the kernels that can compute the attention of a run, the best first.

    `auto` prefers the kernels made for the platform. If there is none, it prefers blockwise attention for sequences
    longer than MAX_DENSE_LENGTH tokens (CPU_MAX_DENSE_LENGTH on CPUs). The choice does not depend on the mesh, so
    that a run keeps its kernel if it resumes on another mesh. There is one choice if `requested` is a name. `length`
    is the number of tokens of the longest sequence.

    Raises:
        UsageError: The requested kernel is unknown or cannot compute the attention of the run, or
            no kernel can.
    """
    if requested != AUTO:
        spec = find_kernel(requested)
        if reasons := [*unmet_needs(spec, needs, device)]:
            raise unsupported_error(spec, reasons)
        return (KernelChoice(spec.name, "set by the recipe"),)
    # The kernels of other platforms are not in the list, so their reasons are not in the message.
    accelerated = [spec for spec in KERNEL_SPECS.values() if device.platform in spec.platforms]
    max_dense_length = CPU_MAX_DENSE_LENGTH if device.platform == CPU.platform else MAX_DENSE_LENGTH
    is_long = length > max_dense_length
    general = [
        KERNEL_SPECS[name]
        for name in (("blockwise", "reference") if is_long else ("reference", "blockwise"))
    ]
    length_reason = (
        f"sequences of {'more than' if is_long else 'up to'} {max_dense_length:,} tokens"
    )
    choices: list[KernelChoice] = []
    skipped = [] if accelerated else [f"no kernel for {device.platform}"]
    for spec in (*accelerated, *general):
        reasons = [f"{spec.name} {reason}" for reason in unmet_needs(spec, needs, device)]
        if not reasons:
            why = f"the kernel for {device.platform}" if spec.platforms else length_reason
            choices.append(KernelChoice(spec.name, "; ".join([f"{AUTO}: {why}", *skipped])))
        skipped += reasons
    if not choices:
        hint = 'use a `mesh` without sp, or `model.remat_policy = "nothing_saveable"`'
        raise usage_error("no kernel can compute this model's attention", "; ".join(skipped), hint)
    return tuple(choices)


def find_kernel(name: str) -> KernelSpec:
    """Return a kernel by name.

    Raises:
        UsageError: The name is unknown.
    """
    if name not in KERNEL_SPECS:
        what = f"unknown `model.attention_kernel` {name!r:.60}"
        raise usage_error(
            what,
            f"supported: {', '.join(KERNEL_NAMES)}",
            text("{}", Key("model.attention_kernel", "blockwise")),
        )
    return KERNEL_SPECS[name]


def unmet_needs(spec: KernelSpec, needs: AttentionNeeds, device: DeviceKind) -> Iterator[str]:
    """Yield a phrase for each requirement that a kernel does not meet."""
    if spec.platforms and device.platform not in spec.platforms:
        yield f"runs on {' and '.join(spec.platforms)}, not on {device.platform}"
    yield from missing_features(spec, needs.features)
    if needs.dtype not in spec.dtypes:
        yield f"does not support {needs.dtype}"
    limit = spec.max_head_dim
    if (device.compute_capability or (0, 0)) >= HOPPER:
        limit = spec.hopper_max_head_dim
    if needs.head_dim % spec.head_multiple:
        yield f"needs a head width that is a multiple of {spec.head_multiple}, not {needs.head_dim}"
    elif limit is not None and needs.head_dim > limit:
        yield f"supports heads of up to {limit} elements, not {needs.head_dim}"


def missing_features(spec: KernelSpec, features: frozenset[AttentionFeature]) -> Iterator[str]:
    """Yield a phrase for each feature that a kernel does not support."""
    yield from (
        f"does not support {feature}"
        for feature in AttentionFeature
        if feature in features - spec.features
    )


def check_saved_scores(policy: RematPolicy, kernel: str) -> None:
    """Raise UsageError if a rematerialization policy saves scores, and the kernel computes them in tiles.

    `auto` takes a kernel that fits the policy.
    """
    if (
        kernel != AUTO
        and policy in SAVES_SCORES
        and AttentionFeature.SAVED_SCORES not in find_kernel(kernel).features
    ):
        what = (
            f'`model.remat_policy` is {json.dumps(policy)}, and `model.attention_kernel` "{kernel}"'
        )
        hint = f'`model.remat_policy = "{SAVES_INPUT}"`'
        raise usage_error(what, "the policy saves the scores of all tiles", hint)


def check_features(spec: KernelSpec, features: frozenset[AttentionFeature]) -> None:
    """Raise UsageError if a kernel does not support a feature of a run."""
    if reasons := [*missing_features(spec, features)]:
        raise unsupported_error(spec, reasons)


def unsupported_error(spec: KernelSpec, reasons: Sequence[str]) -> PrepError:
    """Return the UsageError of a kernel that cannot compute the attention of a run."""
    what = f"attention kernel `{spec.name}` cannot compute this model's attention"
    return usage_error(
        what, f"it {'; it '.join(reasons)}", text("{}", Key("model.attention_kernel", AUTO))
    )
