"""Steps of a training run: the folders named by a step number in a run's folder.

Folders of an object store are only prefixes of names, so a step exists there if its manifest does.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prepcli.errors import Command, Option, PrepError, text
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    NO_MANIFEST,
    STATE_ITEM,
    Manifest,
    read_manifest,
)
from prepcli.formats.orbax import METADATA_FILE
from prepcli.formats.untrusted import unreadable_error

# Keys of a step's manifest.
EVAL_LOSS = "eval_loss"
EVAL_SEQUENCES = "eval_sequences"
# Files of each run, from its first start on.
RECIPE_FILE = "recipe.toml"
ENVIRONMENT_FILE = "environment.json"
STEP_NAME = re.compile("0|[1-9][0-9]{0,17}")
LISTED_MANIFEST = re.compile(f"({STEP_NAME.pattern})/{re.escape(MANIFEST_FILE)}")


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / str(step)


def saved_steps(run: Path) -> list[int]:
    """Return the steps with complete checkpoints, ascending. An empty list if the run does not exist."""
    try:
        names = [name for name in os.listdir(run) if STEP_NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable_error(run, error) from error
    return sorted(int(name) for name in names if _is_step(run / name))


def is_begun_run(names: Collection[str]) -> bool:
    """Return whether a folder or prefix with these names is a training run. It may have no step yet."""
    return RECIPE_FILE in names and ENVIRONMENT_FILE in names


def no_step_error(run: str) -> PrepError:
    """Return the error for a run without a checkpoint."""
    hint = text("{} continues it", Command("train", "RECIPE", Option("out", run)))
    why = "a run is a checkpoint from its first saved step on"
    return PrepError(f"no step of the run {run} is saved yet", why, hint)


def _is_step(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file() and (folder / STATE_ITEM / METADATA_FILE).is_file()


@dataclass(frozen=True, slots=True)
class EvalLoss:
    """Loss of a step's evaluation, as its manifest has it.

    Attributes:
        value: Mean loss of a token. Infinite without an evaluation.
        sequences: Number of sequences of the evaluation. None if it is not recorded.
    """

    value: float
    sequences: int | None


def manifest_loss(manifest: Manifest) -> EvalLoss:
    """Return the loss of a step's manifest."""
    loss = manifest.fields.get(EVAL_LOSS)
    sequences = manifest.fields.get(EVAL_SEQUENCES)
    if isinstance(loss, int | float) and math.isfinite(loss):
        value = float(loss)
    else:
        value = math.inf
    return EvalLoss(value, sequences if isinstance(sequences, int) else None)


def best_step(run: Path) -> int | None:
    """Return the step of a run with the lowest loss. None if no step has one.

    Losses over different numbers of sequences are not compared: only steps evaluated on as many sequences as the newest
    one count.
    """
    losses = {
        step: manifest_loss(read_manifest(step_folder(run, step)) or NO_MANIFEST)
        for step in saved_steps(run)
    }
    # A loss of 100 sequences and one of 1,000 are not comparable: `eval.limit` may have changed.
    newest = max((step for step, loss in losses.items() if math.isfinite(loss.value)), default=None)
    if newest is None:
        return None
    return best_steps(losses)[losses[newest].sequences]


def best_steps(losses: Mapping[int, EvalLoss]) -> dict[int | None, int]:
    """Return the step with the lowest loss, the first of equal ones, for each number of evaluated sequences."""
    best: dict[int | None, int] = {}
    for step, loss in sorted(losses.items()):
        if loss.sequences in best:
            lowest = losses[best[loss.sequences]].value
        else:
            lowest = math.inf
        if loss.value < lowest:
            best[loss.sequences] = step
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
