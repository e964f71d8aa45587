"""What a run measured: one JSON object a line in `metrics.jsonl`, and the rate of tokens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.models.errors import PrepError

METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run; one that a kill cut short is left out. PrepError for a file that cannot be read."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PrepError(f"cannot read {path}", error.strerror or str(error)) from error
    return [found for found in map(_parse_line, lines) if found is not None]


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


class MetricsWriter:
    """Appends lines; what an earlier start wrote of steps after `step` is taken off, as those are taken again; at step
    0 all of it, as the run begins anew."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= step] if step else []
        fresh = path.with_name(f"{path.name}.new")
        try:
            fresh.write_text("".join(f"{_to_json(line)}\n" for line in kept))
            os.replace(fresh, path)
        except OSError as error:
            raise PrepError(f"cannot write {path}", error.strerror or str(error)) from error

    def write(self, line: Mapping[str, Any]) -> None:
        """One more line, which a reader sees at once. PrepError where the disk refuses it."""
        try:
            with self.path.open("a") as file:
                file.write(f"{_to_json(line)}\n")
        except OSError as error:
            raise PrepError(f"cannot write {self.path}", error.strerror or str(error)) from error


def _to_json(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False)


@dataclass(slots=True)
class StepTimer:
    """Seconds and tokens of steps alone: what compiling, evaluating and saving take is not in them."""

    clock: Callable[[], float] = time.monotonic
    started_at: float | None = None
    seconds: float = 0.0
    steps: int = 0

    def resume(self) -> None:
        """Steps begin, or go on."""
        self.started_at = self.clock()

    def pause(self) -> None:
        """Something else begins."""
        if self.started_at is not None:
            self.seconds += self.clock() - self.started_at
        self.started_at = None

    def count_step(self) -> None:
        """One more step is done: its results are there, it was not only begun."""
        self.steps += 1

    def lap(self) -> float | None:
        """Seconds a step since the last lap; None where no step was taken."""
        self.pause()
        self.resume()
        took = self.seconds / self.steps if self.steps else None
        self.seconds, self.steps = 0.0, 0
        return took
