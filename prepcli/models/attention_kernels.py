"""The attention kernels by name: platforms and capabilities of each, and the choice of one for a run. Pure.

`trainer.nn.kernels` has the functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.models.attention_needs import AttentionFeature, AttentionNeeds
from prepcli.models.memory_inputs import NO_SCORES
from prepcli.models.remat import SAVES_INPUT, SAVES_SCORES, RematPolicy

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
    """The kind of the devices of a run.

    Attributes:
        platform: `cpu`, `cuda`, `rocm` or `tpu`.
        compute_capability: Compute capability of an NVIDIA GPU. None for other devices, or if it is
            unknown.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None


CPU = DeviceKind("cpu")
# For estimates: an accelerator without a specific kernel.
ANY_ACCELERATOR = DeviceKind("accelerator")


@dataclass(frozen=True, slots=True)
class HeadDims:
    """The head widths that a kernel supports.

    Attributes:
        multiple_of: Divisor of the width.
        maximum: Largest width, or None for no limit.
        hopper_maximum: Largest width on GPUs of compute capability 9.0 or later.
    """

    multiple_of: int = 1
    maximum: int | None = None
    hopper_maximum: int | None = None

    def maximum_on(self, device: DeviceKind) -> int | None:
        """Return the largest head width that a device supports, or None for no limit."""
        if (device.compute_capability or (0, 0)) >= HOPPER:
            return self.hopper_maximum
        return self.maximum


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """The capabilities of an attention kernel.

    Attributes:
        name: Name in recipes.
        summary: What it computes, for the documentation.
        features: Supported features.
        platforms: Platforms that it runs on. Empty for all.
        dtypes: Supported dtypes.
        head_dims: Supported head widths.
        has_tiles: Whether `q_chunk_size` and `k_chunk_size` set the scores that exist at the same
            time.
        runs_per_device: Whether each device calls it for its own rows and heads, because XLA cannot
            split it.
    """

    name: str
    summary: str
    features: frozenset[AttentionFeature]
    platforms: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    head_dims: HeadDims = HeadDims()
    has_tiles: bool = False
    runs_per_device: bool = False

    def score_tile(self, q_chunk_size: int, k_chunk_size: int) -> tuple[int, int] | None:
        """Return the size of a tile of attention scores: the part of the score matrix that is in memory at once.

        Args:
            q_chunk_size: Queries of a tile.
            k_chunk_size: Keys of a tile.

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
            head_dims=HeadDims(8, maximum=128, hopper_maximum=256),
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
    """The attention kernel of a run.

    Attributes:
        name: One of `KERNEL_NAMES`.
        reason: Why it was chosen.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"attention {self.name} ({self.reason})"


def rank_kernels(
    requested: str, needs: AttentionNeeds, *, device: DeviceKind, length: int
) -> tuple[KernelChoice, ...]:
    """Return the kernels that can compute the attention of a run, the best first.

    `auto` prefers the kernels made for the platform. If there is none, it prefers blockwise
    attention for sequences longer than MAX_DENSE_LENGTH tokens (CPU_MAX_DENSE_LENGTH on CPUs). The
    choice does not depend on the mesh, so that a run keeps its kernel if it resumes on another mesh.

    Args:
        requested: A name, or `auto`.
        needs: Requirements of the run.
        device: Kind of the run's devices.
        length: Tokens of the longest sequence.

    Returns:
        The choices. One if a name is requested.

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
    limit = spec.head_dims.maximum_on(device)
    if needs.head_dim % spec.head_dims.multiple_of:
        yield f"needs a head width that is a multiple of {spec.head_dims.multiple_of}, not {needs.head_dim}"
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

    Args:
        policy: `model.remat_policy`.
        kernel: `model.attention_kernel`. `auto` takes a kernel that fits the policy.
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


def check_split_sequence(spec: KernelSpec, num_shards: int) -> None:
    """Raise UsageError if the mesh splits sequences, and the kernel needs whole ones."""
    check_features(spec, frozenset({AttentionFeature.SPLIT_SEQUENCE} if num_shards > 1 else ()))


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
