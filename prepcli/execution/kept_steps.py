"""The steps of a run that remain when old ones are removed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prepcli.formats.run_steps import lowest_loss, manifest_loss


@dataclass(frozen=True, slots=True)
class KeepRule:
    """The steps to keep.

    Attributes:
        newest: Number of steps to keep, the newest ones.
        milestones: Keep all multiples of this number; 0 for none.
        best: Keep the step with the lowest loss in its manifest.
    """

    newest: int | Literal["all"] = "all"
    milestones: int = 0
    best: bool = False


@dataclass(slots=True)
class StepLosses:
    """The losses that the manifests of steps have; each manifest is read once.

    Attributes:
        read_manifest: Reads the manifest of a step.
        losses: Losses of the steps read so far; infinite for a step without one.
    """

    read_manifest: Callable[[int], Mapping[str, Any]]
    losses: dict[int, float] = field(default_factory=dict)

    def best_step(self, steps: Sequence[int]) -> int | None:
        """Return the step with the lowest loss, the first of equal ones; None if no step has a loss."""
        for step in steps:
            if step not in self.losses:
                self.losses[step] = manifest_loss(self.read_manifest(step))
        return lowest_loss({step: self.losses[step] for step in steps})


def removable_steps(
    steps: Sequence[int], rule: KeepRule, losses: StepLosses, in_use: Collection[int] = ()
) -> list[int]:
    """Return the steps to remove.

    Args:
        steps: All steps, ascending.
        rule: The steps to keep.
        losses: Losses of the steps.
        in_use: Further steps to keep for now.
    """
    if rule.newest == "all":
        return []
    old = [step for step in steps[: -rule.newest] if not (rule.milestones and step % rule.milestones == 0)]
    best = losses.best_step(steps) if rule.best and old else None
    return [step for step in old if step != best and step not in in_use]
