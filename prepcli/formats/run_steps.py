"""Steps of a training run: the folders named by a step number in a run's folder.

Folders of an object store are only prefixes of names, so a step exists there if its manifest does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from prepcli.core.errors import Command, Option, PrepError, text
from prepcli.formats.manifest import MANIFEST_FILE, NO_MANIFEST, STATE_ITEM, read_manifest
from prepcli.planning.item_storage import METADATA_FILE
from prepcli.planning.manifest_fields import Manifest
from prepcli.stores.files import unreadable_error
from prepcli.stores.paths import AnyPath, PathT

# Files of each run, from its first start on.
RECIPE_FILE = "recipe.toml"
ENVIRONMENT_FILE = "environment.json"
STEP_NAME = re.compile("0|[1-9][0-9]{0,17}")
LISTED_MANIFEST = re.compile(f"({STEP_NAME.pattern})/{re.escape(MANIFEST_FILE)}")


def step_folder(run: PathT, step: int) -> PathT:
    """Return the folder of a step's checkpoint."""
    return run / str(step)


def saved_steps(run: AnyPath) -> list[int]:
    """Return the steps with complete checkpoints, ascending. An empty list if the run does not exist."""
    try:
        children = [child.name for child in run.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable_error(run, error) from error
    steps: list[int] = []
    for name in filter(STEP_NAME.fullmatch, children):
        has_item = (run / name / STATE_ITEM / METADATA_FILE).is_file()
        if has_item and (run / name / MANIFEST_FILE).is_file():
            steps.append(int(name))
    return sorted(steps)


def is_begun_run(names: Collection[str]) -> bool:
    """Return whether a folder or prefix with these names is a training run. It may have no step yet."""
    return RECIPE_FILE in names and ENVIRONMENT_FILE in names


def no_step_error(run: str) -> PrepError:
    """Return the error for a run without a checkpoint."""
    hint = text("{} continues it", Command("train", "RECIPE", Option("out", run)))
    why = "a run is a checkpoint from its first saved step on"
    return PrepError(f"no step of the run {run} is saved yet", why, hint)


# Name of a metric, number of evaluated sequences, and stride: only values of equal groups are compared.
ScoreGroup = tuple[str, int | None, int | None]


@dataclass(frozen=True, slots=True)
class StepScore:
    """The evaluation of a step that selects the best step, as its manifest has it.

    Attributes:
        cost: The value of the metric, negated if the highest one is the best. Infinite without an evaluation.
        group: The metric and the evaluated sequences.
    """

    cost: float
    group: ScoreGroup


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


def best_step(run: AnyPath) -> int | None:
    """Return the best step of a run. None if no step has an evaluation.

    Only the steps with the metric and the sequences of the newest evaluation are compared.
    """
    scores = {
        step: manifest_score(read_manifest(step_folder(run, step)) or NO_MANIFEST)
        for step in saved_steps(run)
    }
    # A loss of 100 sequences and one of 1,000 are not comparable: `eval.limit` may have changed.
    newest = max((step for step, score in scores.items() if score.cost < math.inf), default=None)
    if newest is None:
        return None
    return best_steps(scores)[scores[newest].group]


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


def listed_steps(paths: Iterable[str]) -> list[int]:
    """Return the steps with a manifest among the paths of a run's files, ascending."""
    matches = (LISTED_MANIFEST.fullmatch(path) for path in paths)
    return sorted(int(match[1]) for match in matches if match)


def listed_step(path: str) -> int | None:
    """Return the step of a path in a run. None if it is a file of the run itself."""
    name, slash, _ = path.partition("/")
    if slash and STEP_NAME.fullmatch(name):
        return int(name)
    return None
