"""Evaluations of the steps of a run, in their manifests or in the log, and the best step by them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prepcli.formats.manifest import (
    METRICS_FILE,
    NO_MANIFEST,
    read_manifest,
    saved_steps,
    step_folder,
)
from prepcli.planning.manifest_fields import Manifest
from prepcli.stores.files import read_complete_lines, unreadable_error

# Name of a metric, number of evaluated sequences, and stride: only values of equal groups are compared.
ScoreGroup = tuple[str, int | None, int | None]


@dataclass(frozen=True, slots=True)
class StepScore:
    """The evaluation of a step that selects the best step, as its manifest or the log of its run has it.

    Attributes:
        cost: The value of the metric, negated if the highest one is the best. Infinite without an evaluation.
        group: The metric and the evaluated sequences.
    """

    cost: float
    group: ScoreGroup

    def completed(self, metric: str, logged_cost: float) -> StepScore:
        """Return the score of a step whose evaluation only the log has: a signal had stopped it before the save.

        The log does not say of how many sequences the value is. It counts for the sequences of the manifest.
        """
        _, sequences, stride = self.group
        # Only runs that record evaluations record the number of their sequences.
        if math.isfinite(self.cost) or not math.isfinite(logged_cost) or sequences is None:
            return self
        return StepScore(logged_cost, (metric, sequences, stride))


def manifest_score(manifest: Manifest) -> StepScore:
    """Return the evaluation in a step's manifest: of its loss, or of another metric."""
    name = "eval_loss"
    cost = manifest.eval_loss
    if metric := manifest.eval_metric:
        name = metric["name"]
        cost = metric["value"]
        if metric["best_is"] == "highest":
            cost = -cost
    if cost is None or not math.isfinite(cost):
        cost = math.inf
    return StepScore(cost, score_group(name, manifest))


def score_group(metric: str, manifest: Manifest) -> ScoreGroup:
    """Return the group of a metric's values in the manifests of steps."""
    return metric, manifest.eval_sequences, manifest.eval_stride


def best_step(run: Path) -> int | None:
    """Return the best step of a run. None if no step has an evaluation.

    Only the steps with the metric and the sequences of the newest evaluation are compared.
    """
    manifests = {
        step: read_manifest(step_folder(run, step)) or NO_MANIFEST for step in saved_steps(run)
    }
    scores = {step: manifest_score(manifest) for step, manifest in manifests.items()}
    metric = {"name": "eval_loss", "best_is": "lowest"}
    if scored := _scored_steps(scores):
        metric = manifests[max(scored)].eval_metric or metric
    elif not any(map(_selects_loss, manifests.values())):
        return None
    costs = logged_costs(run / METRICS_FILE, metric["name"], metric["best_is"])
    scores = {
        step: score.completed(metric["name"], costs.get(step, math.inf))
        for step, score in scores.items()
    }
    # A loss of 100 sequences and one of 1,000 are not comparable: `eval.limit` may have changed. The newest evaluation
    # may be one that only the log has.
    scored = _scored_steps(scores)
    if not scored:
        return None
    return best_steps(scores)[scores[max(scored)].group]


def _selects_loss(manifest: Manifest) -> bool:
    """Return whether the recipe of a step selects the best one by its loss."""
    # Conversions of models read no recipe, and the import takes 3 ms.
    import tomllib

    try:
        recipe = tomllib.loads(manifest.recipe)
        return recipe["checkpoint"].get("best", "eval_loss") == "eval_loss"
    except (tomllib.TOMLDecodeError, KeyError, AttributeError):
        return False


def _scored_steps(scores: Mapping[int, StepScore]) -> list[int]:
    return [step for step, score in scores.items() if math.isfinite(score.cost)]


def logged_costs(log: Path, metric: str, best_is: str) -> dict[int, float]:
    """Return the costs of the evaluations in the log of a run, by step. Empty without a log.

    Args:
        log: The file of metrics.
        metric: Name of the metric.
        best_is: Whether its `lowest` or its `highest` value is the best one.

    Raises:
        PrepError: The log cannot be read.
    """
    costs: dict[int, float] = {}
    try:
        for line in read_complete_lines(log):
            # Most lines are of training steps.
            if f'"{metric}"'.encode() not in line:
                continue
            try:
                values = json.loads(line)
                step, value = int(values["step"]), float(values[metric])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
            costs[step] = -value if best_is == "highest" else value
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable_error(log, error) from error
    return costs


def best_steps(scores: Mapping[int, StepScore]) -> dict[ScoreGroup, int]:
    """Return the step with the lowest cost, the first of equal ones, for each group."""
    best: dict[ScoreGroup, int] = {}
    for step, score in sorted(scores.items()):
        lowest = math.inf
        if score.group in best:
            lowest = scores[best[score.group]].cost
        if score.cost < lowest:
            best[score.group] = step
    return best
