"""The record of a training run in its folder: metrics, samples, recipe, environment and checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.errors import PrepError
from prepcli.formats.run_steps import RECIPE_FILE, saved_steps, step_folder
from trainer.files.json_values import load_json
from trainer.recipe.formatting import to_toml
from trainer.recipe.toml_values import parse_toml
from trainer.training.metrics import METRICS_FILE, read_metrics

ENVIRONMENT_FILE = "environment.json"
SAMPLES_FILE = "samples.jsonl"
RECORD_FILES = frozenset({RECIPE_FILE, METRICS_FILE, SAMPLES_FILE, ENVIRONMENT_FILE})
MAX_NUMBER = 1e300  # larger integers are not floats, and axes cannot show them

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint of a run.

    Attributes:
        step: Its step.
        nbytes: Size of its files.
    """

    step: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedSample:
    """A text that a run generated after a step from a prompt of its recipe."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as its files describe it.

    Attributes:
        name: Its path or URL.
        title: The last part of it.
        lines: Metrics, in the order of steps.
        recipe: Value of each recipe key as TOML.
        environment: Machine, data and versions of the last start; empty for a run of an earlier prep.
        checkpoints: The saved steps.
        samples: Texts that it generated, in the order of steps.
    """

    name: str
    title: str
    lines: tuple[Mapping[str, Any], ...]
    recipe: Mapping[str, str]
    environment: Mapping[str, Any]
    checkpoints: tuple[SavedStep, ...]
    samples: tuple[SavedSample, ...] = ()

    @property
    def last_step(self) -> int:
        """The last step with metrics, or the last saved one."""
        steps = [line["step"] for line in self.lines[-1:]] + [saved.step for saved in self.checkpoints[-1:]]
        return max(steps, default=0)

    @property
    def steps(self) -> int | None:
        """The step at which the run ends; None if it is not known."""
        steps = self.environment.get("steps")
        return steps if isinstance(steps, int) and is_number(steps) else None

    def points(self, name: str) -> list[Point]:
        """Return (step, value) of each line with a finite number of this name."""
        return [(line["step"], line[name]) for line in self.lines if is_number(line.get(name))]

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table of the environment; empty if it is absent."""
        table = self.environment.get(name)
        return table if isinstance(table, dict) else {}

    def last(self, name: str) -> float | None:
        """Return the last value of a name; None if there is none."""
        points = self.points(name)
        return points[-1][1] if points else None


def is_number(value: object) -> bool:
    """Return whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def read_run(path: Path) -> RunRecord:
    """Read the record of a run.

    Args:
        path: Folder of the run.

    Raises:
        PrepError: The folder is not a run, or a file in it cannot be read.
    """
    recipe_path = path / RECIPE_FILE
    if not recipe_path.is_file():
        raise not_a_run_error(str(path), exists=path.is_dir())
    return RunRecord(
        str(path),
        title=path.resolve().name,
        lines=tuple(line for line in read_metrics(path / METRICS_FILE) if is_number(line["step"])),
        recipe=dict(_flatten(_read_toml(recipe_path))),
        environment=_read_environment(path / ENVIRONMENT_FILE),
        checkpoints=tuple(SavedStep(step, folder_nbytes(step_folder(path, step))) for step in saved_steps(path)),
        samples=tuple(_read_samples(path / SAMPLES_FILE)),
    )


def _read_samples(path: Path) -> Iterator[SavedSample]:
    """Yield the samples of a file; lines without a prompt and a text are skipped."""
    for line in read_metrics(path):
        prompt, text = line.get("prompt"), line.get("text")
        if isinstance(prompt, str) and isinstance(text, str):
            yield SavedSample(line["step"], prompt, text)


def not_a_run_error(name: str, *, exists: bool) -> PrepError:
    """Return the error for a folder or URL without a run."""
    what = f"{name} is not a run" if exists else f"{name} does not exist"
    return PrepError(what, f"the folder of a training run has a {RECIPE_FILE}", "`prep report runs/NAME`")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text("utf-8"))
    except OSError as error:
        raise PrepError(f"cannot read {path}", error.strerror or str(error)) from error
    except ValueError as error:
        raise PrepError(f"{path} is not TOML", str(error)) from error


def _flatten(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield dotted key and value of each key of a recipe."""
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", to_toml(item)) for key, item in value.items())
        else:
            yield name, to_toml(value)


def _read_environment(path: Path) -> dict[str, Any]:
    try:
        environment = load_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise PrepError(f"cannot read {path}", error.strerror or str(error)) from error
    except ValueError as error:
        raise PrepError(f"{path} is not JSON", str(error)) from error
    return environment if isinstance(environment, dict) else {}


def folder_nbytes(folder: Path) -> int:
    """Return the size of the files of a step; a running job may remove them meanwhile."""
    nbytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                nbytes += os.stat(os.path.join(parent, name)).st_size
    return nbytes
