"""The choice of a run's attention kernel, with a numeric check before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prepcli.core.errors import Key, PrepError, text
from prepcli.models.attention_kernels import AUTO, DeviceKind, KernelChoice, rank_kernels
from prepcli.models.attention_needs import AttentionNeeds
from prepcli.models.dropout_config import NO_DROPOUT, DropoutConfig
from trainer.distributed.mesh_devices import device_kind
from trainer.distributed.sharding import ShardingContext
from trainer.nn.kernels.probe import find_mismatch
from trainer.planning.step_inputs import Shapes, attention_needs, longest_sequence
from trainer.recipe import Recipe

# The reference kernel is the standard of the comparison, so it is never compared with itself.
UNCHECKED = "reference"


def choose_kernel(
    recipe: Recipe,
    model: Shapes,
    sharding: ShardingContext,
    *,
    warn: Callable[[str], None],
    dropout: DropoutConfig = NO_DROPOUT,
) -> KernelChoice:
    """Choose the attention kernel of a run, and compare it with the reference kernel on a small random case.

    Args:
        recipe: The recipe.
        model: The model to train.
        sharding: The mesh of devices and its rules.
        warn: Called with a message for each kernel that `auto` skips because it failed the comparison.
        dropout: Rates of dropout and forgetful causal masking.

    Returns:
        The kernel, and the reason for it.

    Raises:
        UsageError: The recipe names a kernel that cannot compute the model's attention on these devices.
        PrepError: The recipe names a kernel that failed the comparison.
    """
    device = device_kind(sharding)
    needs, choices = _ranked_kernels(recipe, model, sharding, device=device, dropout=dropout)
    return first_correct(
        choices, needs, device, is_auto=recipe.model.attention_kernel == AUTO, warn=warn
    )


def preferred_kernel(
    recipe: Recipe,
    model: Shapes,
    sharding: ShardingContext,
    *,
    device: DeviceKind,
    dropout: DropoutConfig = NO_DROPOUT,
) -> KernelChoice:
    """Return the kernel that `choose_kernel` compares first, for devices that only compile.

    Args:
        recipe: The recipe.
        model: The model to train.
        sharding: The mesh of devices and its rules.
        device: Kind of the devices to plan for.
        dropout: Rates of dropout and forgetful causal masking.

    Raises:
        UsageError: No kernel, or not the one that the recipe names, can compute the model's attention on these devices.
    """
    return _ranked_kernels(recipe, model, sharding, device=device, dropout=dropout)[1][0]


def _ranked_kernels(
    recipe: Recipe,
    model: Shapes,
    sharding: ShardingContext,
    *,
    device: DeviceKind,
    dropout: DropoutConfig,
) -> tuple[AttentionNeeds, tuple[KernelChoice, ...]]:
    """Return the needs of attention, and the kernels from best to worst."""
    needs = attention_needs(recipe, model, sharding.mesh, sharding.rules, dropout)
    requested = recipe.model.attention_kernel
    length = longest_sequence(recipe)
    return needs, rank_kernels(requested, needs, device=device, length=length)


def first_correct(
    choices: Sequence[KernelChoice],
    needs: AttentionNeeds,
    device: DeviceKind,
    *,
    is_auto: bool,
    warn: Callable[[str], None],
) -> KernelChoice:
    """Return the first kernel with the results of the reference kernel.

    Args:
        choices: Kernels in order of preference, at least one.
        needs: Requirements of the run.
        device: Kind of the devices.
        is_auto: Whether to go on to the next kernel after a failure.
        warn: Called with a message for each failure of `auto`.

    Raises:
        PrepError: The requested kernel failed, or all kernels.
    """
    failures: list[str] = []
    for choice in choices:
        failure = ""
        if choice.name != UNCHECKED:
            failure = find_mismatch(choice.name, needs, device)
        if not failure:
            return KernelChoice(choice.name, "; ".join([choice.reason, *failures]))
        what = f"attention kernel `{choice.name}` failed its numeric check"
        if not is_auto:
            raise PrepError(what, failure, text("{}", Key("model.attention_kernel", AUTO)))
        warn(f"{what}: {failure}")
        failures.append(f"{choice.name} failed its numeric check")
    raise PrepError(
        "all attention kernels failed their numeric check",
        "; ".join(failures),
        "use a `mesh` without sp",
    )
