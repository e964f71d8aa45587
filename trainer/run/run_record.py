"""The record of a training run in its folder or bucket: metrics, samples, recipe, environment and checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from prepcli.core.errors import Command, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonObject, load_json
from prepcli.formats.manifest import (
    ENVIRONMENT_FILE,
    RECIPE_FILE,
    listed_step,
    listed_steps,
    saved_steps,
    step_folder,
)
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.files import read_regular_file
from prepcli.stores.object_store import Bucket
from prepcli.stores.paths import create_temporary_folder
from trainer.recipe.key_types import TomlTable, parse_toml, to_toml
from trainer.training.metrics import METRICS_FILE, MetricsFile

# A file of metrics may have any length and any names. These limits bound a record of it to 512
# curves of 2,048 points.
# Larger integers are not floats, and axes cannot show them.
MAX_NUMBER = 1e300
# Buckets of a curve. A curve with at most this many points is exact.
MAX_BUCKETS = 1024
MAX_CURVES = 512
MAX_NAME_NCHARS = 256
MAX_MEDIAN_VALUES = 1 << 14
MAX_EVAL_SIZES = 256
MEDIAN_NAMES = ("tokens_per_s", "mfu")

Point = tuple[float, float]
T = TypeVar("T")


def is_number(value: object) -> bool:
    """Return whether a value of a JSON file is a finite number."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    )


class RunningCurve:
    """Points of a metric in the order of a file, at most `MAX_BUCKETS` buckets of as many points each.

    A bucket keeps its lowest and its highest point, so that spikes stay visible. When all buckets are full,
    neighbours are merged, and the next buckets are twice as large. The result depends only on the points.

    Attributes:
        last: The last value.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        """Create a curve without points.

        Args:
            max_buckets: Maximum number of buckets, an even number.
        """
        self.last: float | None = None
        self._lows: list[Point] = []
        self._highs: list[Point] = []
        self._max_buckets = max_buckets
        self._bucket_size = 1
        self._room = 0  # number of points that still fit into the last bucket

    def add(self, step: float, value: float) -> None:
        """Append a point."""
        self.last = value
        if self._room:
            self._room -= 1
            if value < self._lows[-1][1]:
                self._lows[-1] = (step, value)
            elif value > self._highs[-1][1]:
                self._highs[-1] = (step, value)
            return
        if len(self._lows) == self._max_buckets:
            self._merge_neighbours()
        self._lows.append((step, value))
        self._highs.append((step, value))
        self._room = self._bucket_size - 1

    def points(self) -> list[Point]:
        """Return the lowest and the highest point of each bucket, in the order of steps."""
        points: list[Point] = []
        for low, high in zip(self._lows, self._highs):
            # The set keeps one point if both extremes are equal. Points sort by step.
            points += sorted({low, high})
        return points

    def _merge_neighbours(self) -> None:
        """Merge each pair of neighbouring buckets into one bucket of twice the size. All buckets are full."""
        # The number of buckets is even, so each bucket has a neighbour to merge with.
        value = itemgetter(1)
        self._lows = [min(pair, key=value) for pair in zip(self._lows[::2], self._lows[1::2])]
        self._highs = [max(pair, key=value) for pair in zip(self._highs[::2], self._highs[1::2])]
        self._bucket_size *= 2


class EvenSample(Generic[T]):
    """At most `capacity` items of a sequence, evenly spaced from the first item. A short sequence is kept whole."""

    def __init__(self, capacity: int) -> None:
        """Create an empty sample.

        Args:
            capacity: Maximum number of items.
        """
        self.count = 0
        self.items: list[T] = []
        self._capacity = capacity
        self._distance = 1

    def add(self, item: T) -> None:
        """Append an item to the sequence."""
        if self.count % self._distance == 0:
            if len(self.items) == self._capacity:
                # Every second item stays, e.g. 0 2 4 6 with distance 2: 0 4 with distance 4.
                self.items = self.items[::2]
                self._distance *= 2
            if self.count % self._distance == 0:
                self.items.append(item)
        self.count += 1


@dataclass(slots=True)
class RunMetrics:
    """Metrics of a run."""

    # Lowest and highest step with a line, or None without lines
    steps: tuple[float, float] | None = None
    last_step: int | None = None  # Step of the last line, or None without lines
    # Curve of each name, in the order of the first lines with it
    curves: dict[str, RunningCurve] = field(default_factory=dict)
    _median_values: dict[str, EvenSample[float]] = field(
        default_factory=lambda: {name: EvenSample(MAX_MEDIAN_VALUES) for name in MEDIAN_NAMES}
    )
    # Keyed by the number of evaluation tokens.
    _best_losses: dict[float | None, float] = field(default_factory=dict)

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]]) -> RunMetrics:
        """Return the metrics of lines with steps."""
        metrics = RunMetrics()
        for line in lines:
            metrics.add(line)
        return metrics

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line. Values other than finite numbers are ignored, and so is a line without a finite step."""
        step = line["step"]
        if not is_number(step):
            return
        self.last_step = step
        low, high = self.steps or (step, step)
        self.steps = (min(low, step), max(high, step))
        for name, value in line.items():
            curve = self.curves.get(name) or self._new_curve(name)
            # The first test is the fast one.
            if (
                curve is not None
                and (type(value) is float or is_number(value))
                and -MAX_NUMBER < value < MAX_NUMBER
            ):
                curve.add(step, value)
                if name in self._median_values:
                    self._median_values[name].add(value)
        if is_number(line.get("eval_loss")):
            loss = line["eval_loss"]
            num_tokens = line.get("eval_tokens")
            if isinstance(num_tokens, int | float) and is_number(num_tokens):
                key = num_tokens
            else:
                key = None
            best = self._best_losses.pop(key, loss)
            # The last number of tokens is the last key.
            self._best_losses[key] = min(best, loss)
            if len(self._best_losses) > MAX_EVAL_SIZES:
                # `pop` above moves a used key to the end, so the first key is the one that was not used for longest.
                del self._best_losses[next(iter(self._best_losses))]

    def points(self, name: str) -> list[Point]:
        """Return (step, value) pairs of a name. Long curves keep only the extremes of each bucket."""
        curve = self.curves.get(name)
        if curve:
            return curve.points()
        return []

    def last(self, name: str) -> float | None:
        """Return the last value of a name, or None if there is none."""
        curve = self.curves.get(name)
        if curve:
            return curve.last
        return None

    def median_values(self, name: str) -> list[float]:
        """Return values of a name at equal distances."""
        return self._median_values[name].items

    def best_eval_loss(self) -> float | None:
        """Return the lowest evaluation loss. Only evaluations on as many tokens as the last one count."""
        return next(reversed(self._best_losses.values()), None)

    def _new_curve(self, name: str) -> RunningCurve | None:
        if name == "step" or len(self.curves) >= MAX_CURVES or len(name) > MAX_NAME_NCHARS:
            return None
        return self.curves.setdefault(name, RunningCurve())


SAMPLES_FILE = "samples.jsonl"
RECORD_FILES = frozenset({RECIPE_FILE, METRICS_FILE, SAMPLES_FILE, ENVIRONMENT_FILE})
# Limits of the texts on a page
MAX_PROMPTS = 256
MAX_TEXTS = 64  # generated texts per prompt, without the last one
MAX_TEXT_NCHARS = 10_000
RECIPE_HINT = "copy the recipe of its last start to it"
ENVIRONMENT_HINT = "remove it: the next start of the run writes it again"


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint of a run."""

    step: int  # Its step
    nbytes: int  # Size of its files


@dataclass(frozen=True, slots=True)
class SavedSample:
    """A generated text of a run: its step, and the prompt from the recipe."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as its files describe it."""

    name: str  # Its path or URL
    title: str  # The last part of it
    metrics: RunMetrics  # Its metrics
    recipe: Mapping[str, str]  # Value of each recipe key as TOML
    # Machine, data and versions of the last start, empty for a run of an earlier prep
    environment: JsonObject
    checkpoints: tuple[SavedStep, ...]  # The saved steps
    # Generated texts in the order of steps. If a prompt has too many texts, only evenly spaced ones and the last
    # one.
    samples: tuple[SavedSample, ...]
    sample_counts: Mapping[str, int]  # Number of all texts by prompt
    notes: tuple[str, ...] = ()  # Messages about parts of the files that were not read

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
        notes=tuple(
            f"skipped {count_text(count, 'line')} of {path / name}: not a JSON object with a step, or too long"
            for name, count in skipped.items()
            if count
        ),
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


def read_bucket_run(bucket: Bucket) -> RunRecord:
    """Read the record of a run. Its steps are listed, not read.

    Args:
        bucket: Client of the URL of the run.

    Raises:
        PrepError: No run is there, the store cannot be reached, or a file is damaged.
    """
    files = {file.path: file for file in bucket.list_files()}
    if RECIPE_FILE not in files:
        raise not_a_run_error(bucket.name, exists=bool(files))
    folder = create_temporary_folder()
    # The files of the steps are not downloaded. They may have terabytes, and their names suffice for the record.
    for name in files.keys() & RECORD_FILES:
        bucket.download(files[name], folder / name)
    record = read_run(folder)
    # `gs://b` has an empty path: the bucket is the run.
    title = bucket.url.path.rpartition("/")[2] or bucket.url.bucket
    return replace(record, name=bucket.name, title=title, checkpoints=_saved_steps(files.values()))


def _saved_steps(files: Iterable[RemoteFile]) -> tuple[SavedStep, ...]:
    """Return the complete steps among the files of a run, with their sizes."""
    # Key None collects the files outside of steps. Steps without a manifest are counted too, and left out
    # at the end: their upload was interrupted, or is in progress.
    paths = list[str]()
    nbytes = Counter[int | None]()
    for file in files:
        paths.append(file.path)
        nbytes[listed_step(file.path)] += file.size
    return tuple(SavedStep(step, nbytes[step]) for step in listed_steps(paths))
