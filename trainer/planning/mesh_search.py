"""Search of the meshes of a number of devices on which a training step fits, the fastest first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prepcli.core.errors import PrepError
from prepcli.models.mesh import MESH_AXES, parse_mesh
from prepcli.models.rules import Rules, activation_rules
from trainer.planning.accelerators import Accelerator
from trainer.planning.model_shapes import PlannedModel
from trainer.planning.training_plan import KindEstimate, TrainingPlan, plan_training, with_overrides
from trainer.recipe import Recipe


@dataclass(frozen=True, slots=True)
class MeshOption:
    """A mesh on which the step fits, with its plan and its estimate."""

    plan: TrainingPlan
    estimate: KindEstimate


@dataclass(frozen=True, slots=True)
class MeshSearch:
    """The result of a search.

    Attributes:
        options: Meshes on which the step fits, the most tokens per second first.
        num_too_large: Meshes on which it does not fit.
        refusals: Number of meshes that do not divide the model or the batch, by the reason.
    """

    options: tuple[MeshOption, ...]
    num_too_large: int
    refusals: Counter[str]


def search_meshes(
    recipe: Recipe, model: PlannedModel, rules: Rules, *, kind: Accelerator, num_devices: int
) -> MeshSearch:
    """Plan a step on every mesh of a number of devices.

    Args:
        recipe: The recipe. Its mesh is not used.
        model: The model to train.
        rules: Partition rules.
        kind: The accelerators.
        num_devices: Number of devices.
    """
    options: list[MeshOption] = []
    refusals: Counter[str] = Counter()
    num_too_large = 0
    for mesh in _meshes_of(num_devices, rules):
        try:
            plan = plan_training(
                with_overrides(recipe, {"mesh": mesh}), model, rules, device=kind.device
            )
        # Meshes with the same first part of the message are counted together.
        except PrepError as error:
            refusals[error.what] += 1
            continue
        estimate = plan.estimate_on(kind)
        if estimate.fits:
            options.append(MeshOption(plan, estimate))
        else:
            num_too_large += 1
    options.sort(key=lambda option: (-option.estimate.tokens_per_s, option.plan.memory.peak))
    return MeshSearch(tuple(options), num_too_large, refusals)


def _meshes_of(num_devices: int, rules: Rules) -> Iterator[str]:
    """Yield the meshes of a number of devices. Meshes with sp are skipped if no rule splits tokens over sp."""
    splits_seq = any("sp" in choice for choice in activation_rules(rules)["seq"])
    # If no rule splits tokens over sp, its devices would repeat the same work.
    axes = MESH_AXES if splits_seq else MESH_AXES[:3]
    for sizes in _factorizations(num_devices, len(axes)):
        yield str(parse_mesh(",".join(f"{axis}:{size}" for axis, size in zip(axes, sizes))))


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` positive integers with the product `number`, e.g. (1, 4), (2, 2), (4, 1)."""
    if count == 1:
        yield (number,)
        return
    for divisor in (d for d in range(1, math.isqrt(number) + 1) if number % d == 0):
        # The set drops the second root of a square: 2 and 2 for 4.
        for first in sorted({divisor, number // divisor}):
            yield from ((first, *rest) for rest in _factorizations(number // first, count - 1))
