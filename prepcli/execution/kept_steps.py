"""The steps of a run that remain when old ones are removed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prepcli.formats.run_steps import EvalLoss, best_steps, manifest_loss


@dataclass(frozen=True, slots=True)
class KeepRule:
    """The steps to keep.

    Attributes:
        newest: Number of steps to keep, the newest ones.
        milestones: Keep all multiples of this number; 0 for none.
        best: Keep the step with the lowest loss in its manifest, for each number of evaluated sequences.
    """

    newest: int | Literal["all"] = "all"
    milestones: int = 0
    best: bool = False


@dataclass(slots=True)
class StepLosses:
    """The losses that the manifests of steps have; each manifest is read once.

    Attributes:
        read_manifest: Reads the manifest of a step.
        losses: Losses of the steps read so far.
    """

    read_manifest: Callable[[int], Mapping[str, Any]]
    losses: dict[int, EvalLoss] = field(default_factory=dict)

    def best_steps(self, steps: Sequence[int]) -> dict[int | None, int]:
        """Return the step with the lowest loss for each number of evaluated sequences; see `run_steps.best_steps`."""
        for step in steps:
            if step not in self.losses:
                self.losses[step] = manifest_loss(self.read_manifest(step))
        return best_steps({step: self.losses[step] for step in steps})


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
    best = losses.best_steps(steps).values() if rule.best and old else ()
    return [step for step in old if step not in best and step not in in_use]
