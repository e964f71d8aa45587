"""The logical shards of `train.reduction = "exact"`: their number, and checks of what depends on it."""

from __future__ import annotations

import math

from prepcli.core.errors import Key, text, usage_error
from prepcli.models.activation_memory import OFFLOAD_NONE
from prepcli.models.architecture import ArchConfig
from prepcli.models.mesh import Mesh, format_sizes
from prepcli.models.partition import num_batch_shards
from prepcli.models.rules import Rules, activation_rules
from trainer.recipe import BatchShape, Recipe

KEY = "train.reduction"
SHARDS_KEY = "train.reduction_shards"
DEFAULT_SHARDS = 8
# Kernels that are bit-identical for equal shapes in every compiled program.
KERNELS = ("reference", "blockwise")
# Optimizers that update each element by itself: they sum nothing over a parameter.
ELEMENTWISE_OPTIMIZERS = ("adamw", "lion", "sgd")
USE_FAST = text("{}", Key(KEY, "fast", is_override=True))


def reduction_shards(recipe: Recipe, shape: BatchShape, *, mesh: Mesh, rules: Rules) -> int:
    """Return the number of logical shards of a batch, or 0 if `train.reduction` is fast.

    Args:
        recipe: The recipe.
        shape: The shape of its batches on the mesh.
        mesh: The mesh without axes of size -1.
        rules: Partition rules.

    Raises:
        UsageError: The batch, the mesh or another option does not allow an exact reduction.
    """
    if recipe.train.reduction != "exact":
        return 0
    _check_options(recipe)
    _check_mesh(mesh, rules)
    # The gradient of a step is a balanced binary tree over the logical shards, so that each device
    # sums a whole subtree. That needs a power of two which every mesh of the run divides.
    num_shards = recipe.train.reduction_shards or math.gcd(shape.size, DEFAULT_SHARDS)
    # The gcd with a power of two is the largest such power that divides the batch, e.g. 8 for 24.
    if not _is_power_of_two(num_shards) or shape.size % num_shards:
        why = f"it has to be a power of two that divides the batch of {shape.size}"
        raise usage_error(
            f"`{SHARDS_KEY}` is {num_shards}", why, _shards_hint(math.gcd(shape.size, 1 << 31))
        )
    num_computed = num_batch_shards(mesh, rules) * shape.accumulate
    if num_shards % num_computed:
        what = f"`{KEY}` is exact, and the batch has {num_shards} logical shards"
        why = f"{num_batch_shards(mesh, rules)} replicas x `batch.accumulate` {shape.accumulate} = {num_computed}"
        # The smallest number of shards that the replicas and micro-batches divide, if it is valid.
        better = math.lcm(num_shards, num_computed)
        is_possible = _is_power_of_two(better) and shape.size % better == 0
        if is_possible:
            hint = _shards_hint(better)
        else:
            hint = "make replicas x `batch.accumulate` a power of two"
        raise usage_error(what, f"{why}, which does not divide them", hint)
    return num_shards


def rows_per_device(shape: BatchShape, num_shards: int, *, num_replicas: int) -> int:
    """Return the sequences computed by a device at the same time.

    Args:
        shape: The shape of a batch.
        num_shards: Its logical shards, or 0 if `train.reduction` is fast.
        num_replicas: Devices that split a micro-batch.
    """
    if num_shards:
        return shape.size // num_shards
    return shape.micro_batch_size // num_replicas


def check_exact_model(arch_config: ArchConfig, kernel: str) -> None:
    """Check that results of a model and its attention kernel are known to be equal in every program.

    Raises:
        UsageError: They are not.
    """
    if arch_config.encoder is not None:
        raise usage_error(
            f"`{KEY}` is exact, and the model has an encoder",
            "both together are not supported",
            USE_FAST,
        )
    if kernel not in KERNELS:
        why = f"`{KEY}` is exact, and gradients of {kernel} are not known to be equal in every program"
        raise usage_error(
            f"`model.attention_kernel` is {kernel}",
            why,
            text("{}", Key("model.attention_kernel", "blockwise", is_override=True)),
        )


def _check_options(recipe: Recipe) -> None:
    """Raise UsageError if another option of the recipe does not allow an exact reduction."""
    if recipe.model.offload != OFFLOAD_NONE:
        what = f"`{KEY}` is exact, and `model.offload` is {recipe.model.offload}"
        raise usage_error(
            what,
            "both together are not supported",
            text("{} or {}", Key("model.offload", "none", is_override=True), USE_FAST),
        )
    if recipe.optimizer.type not in ELEMENTWISE_OPTIMIZERS:
        what = f"`{KEY}` is exact, and `optimizer.type` is {recipe.optimizer.type}"
        why = f"it sums over parameters in the order of the mesh; {', '.join(ELEMENTWISE_OPTIMIZERS)} do not"
        raise usage_error(
            what, why, text("{} or {}", Key("optimizer.type", "adamw", is_override=True), USE_FAST)
        )


def _check_mesh(mesh: Mesh, rules: Rules) -> None:
    """Raise UsageError if a mesh axis splits anything but the batch."""
    # `parse_rule` rejects several choices for the batch, so the first one is the only one.
    batch_axes = activation_rules(rules)["batch"][0]
    others = tuple(axis for axis in mesh.names if axis not in batch_axes and mesh.size(axis) > 1)
    if others:
        what = f"`{KEY}` is exact, and the mesh has {format_sizes(mesh, others)}"
        why = f"results are exact for {' and '.join(batch_axes)} only: other axes split sums that XLA orders"
        raise usage_error(
            what, why, text("use a mesh of {} only, or {}", " and ".join(batch_axes), USE_FAST)
        )


def _is_power_of_two(number: int) -> bool:
    # A power of two has one bit, e.g. 8 & 7 = 0b1000 & 0b0111 = 0.
    return number & (number - 1) == 0


def _shards_hint(num_shards: int) -> str:
    return text("{}", Key(SHARDS_KEY, num_shards, is_override=True))
