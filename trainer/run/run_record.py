"""The record of a training run in its folder: metrics, samples, recipe, environment and checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.core.errors import Command, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonObject, load_json
from prepcli.formats.run_steps import ENVIRONMENT_FILE, RECIPE_FILE, saved_steps, step_folder
from prepcli.inspection.run_metrics import EvenSample, RunMetrics, is_number
from prepcli.stores.reading import read_regular_file
from trainer.recipe.formatting import to_toml
from trainer.recipe.toml_values import TomlTable, parse_toml
from trainer.training.metrics import METRICS_FILE, MetricsFile

SAMPLES_FILE = "samples.jsonl"
RECORD_FILES = frozenset({RECIPE_FILE, METRICS_FILE, SAMPLES_FILE, ENVIRONMENT_FILE})
# Limits of the texts on a page
MAX_PROMPTS = 256
MAX_TEXTS = 64  # generated texts per prompt, without the last one
MAX_TEXT_NCHARS = 10_000
RECIPE_HINT = "copy the recipe that the run began with to it"
ENVIRONMENT_HINT = "remove it: the next start of the run writes it again"


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
    """A generated text of a run: its step, and the prompt from the recipe."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as its files describe it.

    Attributes:
        name: Its path or URL.
        title: The last part of it.
        metrics: Its metrics.
        recipe: Value of each recipe key as TOML.
        environment: Machine, data and versions of the last start, empty for a run of an earlier
            prep.
        checkpoints: The saved steps.
        samples: Generated texts in the order of steps. If a prompt has too many texts, only evenly spaced ones and the
            last one.
        sample_counts: Number of all texts by prompt.
        notes: Messages about parts of the files that were not read.
    """

    name: str
    title: str
    metrics: RunMetrics
    recipe: Mapping[str, str]
    environment: JsonObject
    checkpoints: tuple[SavedStep, ...]
    samples: tuple[SavedSample, ...]
    sample_counts: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def last_step(self) -> int:
        """The last step with metrics, or the last saved one."""
        # Metrics may be ahead of the last save. A run without a log line has only the save.
        steps = [saved.step for saved in self.checkpoints[-1:]]
        return max(
            steps + ([] if self.metrics.last_step is None else [self.metrics.last_step]), default=0
        )

    @property
    def steps(self) -> int | None:
        """The last step of the complete run, or None if it is unknown."""
        steps = self.environment.get("steps")
        # `isinstance(True, int)` is true in Python, and `is_number` excludes it.
        if isinstance(steps, int) and is_number(steps):
            return steps
        return None

    def table(self, name: str) -> JsonObject:
        """Return a table of the environment, empty if it is absent."""
        table = self.environment.get(name)
        if isinstance(table, dict):
            return table
        return {}


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
    metrics_file = MetricsFile(path / METRICS_FILE)
    metrics = RunMetrics.of(metrics_file)
    samples_file = MetricsFile(path / SAMPLES_FILE)
    samples, sample_counts = _read_samples(samples_file)
    skipped = {METRICS_FILE: metrics_file.num_skipped, SAMPLES_FILE: samples_file.num_skipped}
    return RunRecord(
        str(path),
        title=path.resolve().name,
        metrics=metrics,
        recipe=dict(_flatten_tables(_read_toml(recipe_path))),
        environment=_read_environment(path / ENVIRONMENT_FILE),
        checkpoints=tuple(
            SavedStep(step, folder_nbytes(step_folder(path, step))) for step in saved_steps(path)
        ),
        samples=samples,
        sample_counts=sample_counts,
        notes=tuple(_skip_note(path / name, count) for name, count in skipped.items() if count),
    )


def _read_samples(
    lines: Iterable[Mapping[str, Any]],
) -> tuple[tuple[SavedSample, ...], dict[str, int]]:
    """Return the samples of a file, and their number by prompt. Lines without a prompt and a text are ignored."""
    kept: dict[str, EvenSample[tuple[int, SavedSample]]] = {}
    last: dict[str, tuple[int, SavedSample]] = {}
    for number, line in enumerate(lines):
        prompt = line.get("prompt")
        text = line.get("text")
        if not isinstance(prompt, str) or not isinstance(text, str):
            continue
        if prompt not in kept and len(kept) == MAX_PROMPTS:
            continue
        if len(text) <= MAX_TEXT_NCHARS:
            shown = text
        else:
            shown = f"{text[:MAX_TEXT_NCHARS]} ..."
        last[prompt] = number, SavedSample(line["step"], prompt, shown)
        kept.setdefault(prompt, EvenSample(MAX_TEXTS)).add(last[prompt])
    # The evenly spaced sample may lack the last text of a prompt, which matters most, so it is added.
    # Texts are keyed by line number, so that none occurs twice, and the order of the file is restored.
    by_line = dict(last.values())
    for texts in kept.values():
        by_line.update(texts.items)
    samples = tuple(by_line[number] for number in sorted(by_line))
    return samples, {prompt: texts.count for prompt, texts in kept.items()}


def _skip_note(path: Path, count: int) -> str:
    return (
        f"skipped {count_text(count, 'line')} of {path}: not a JSON object with a step, or too long"
    )


def not_a_run_error(name: str, *, exists: bool) -> PrepError:
    """Return the error for a folder or URL without a run."""
    if exists:
        what = f"{name} is not a run"
    else:
        what = f"{name} does not exist"
    why = f"the folder of a training run has a {RECIPE_FILE}"
    return PrepError(what, why, text("{}", Command("report", "runs/NAME")))


def _unreadable_error(path: Path, error: OSError) -> PrepError:
    return PrepError(f"cannot read {path}", error.strerror or str(error), "check its permissions")


def _read_toml(path: Path) -> TomlTable:
    try:
        return parse_toml(read_regular_file(path).decode())
    except OSError as error:
        raise _unreadable_error(path, error) from error
    except ValueError as error:
        raise PrepError(f"{path} is not TOML", str(error), RECIPE_HINT) from error


def _flatten_tables(tables: TomlTable) -> Iterator[tuple[str, str]]:
    """Yield dotted key and value of each key of a recipe."""
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", to_toml(item)) for key, item in value.items())
        else:
            yield name, to_toml(value)


def _read_environment(path: Path) -> JsonObject:
    try:
        environment = load_json(read_regular_file(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unreadable_error(path, error) from error
    except ValueError as error:
        raise PrepError(f"{path} is not JSON", str(error), ENVIRONMENT_HINT) from error
    if isinstance(environment, dict):
        return environment
    return {}


def folder_nbytes(folder: Path) -> int:
    """Return the size of the files of a step. A running job may remove them meanwhile."""
    nbytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                nbytes += os.stat(os.path.join(parent, name)).st_size
    return nbytes
