"""Metrics of a run: one JSON object per line in `metrics.jsonl`.

Process 0 writes that file. With `log.all_workers` every other process writes a separate file, such as
`metrics.1.jsonl`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonObject
from prepcli.stores.files import ACCESS_HINT, read_complete_lines, replacing_file

METRICS_FILE = "metrics.jsonl"
# Prefix of the values of an evaluation.
EVAL_PREFIX = "eval_"
LINE_START = re.compile(rb'\{"step": ([0-9]{1,18})[,}]')
# A line of a metrics file. `line_step` returns its step.
MetricsLine: TypeAlias = Mapping[str, object]
PROCESS_METRICS_FILE = re.compile(r"metrics\.([1-9][0-9]*)\.jsonl")


class MetricsFile:
    """The lines of a metrics file, read one at a time in bounded memory.

    Lines other than JSON objects with a step are skipped. A last line without an end, as after a kill, is ignored.

    Attributes:
        num_skipped: Number of skipped lines so far.
    """

    def __init__(self, path: Path) -> None:
        """Set the path of the file, which need not exist.

        Args:
            path: The file.
        """
        self._path = path
        self.num_skipped = 0

    def __iter__(self) -> Iterator[JsonObject]:
        """Yield the lines. Raise PrepError if the file cannot be read."""
        for line in self.raw_lines():
            values = _parse_line(line)
            if values is None:
                self.num_skipped += 1
            else:
                yield values

    def raw_lines(self) -> Iterator[bytes]:
        """Yield the bytes of all lines. Raise PrepError if the file cannot be read."""
        try:
            yield from read_complete_lines(self._path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise PrepError(
                f"cannot read {self._path}", error.strerror or str(error), ACCESS_HINT
            ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a short metrics file.

    Empty if it does not exist.

    Raises:
        PrepError: The file cannot be read.
    """
    return list(MetricsFile(path))


def _parse_line(line: bytes) -> JsonObject | None:
    """Return the values of a line, None for a damaged line."""
    try:
        values = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if isinstance(values, dict) and isinstance(values.get("step"), int):
        return values
    return None


def _raw_line_step(line: bytes) -> int | None:
    """Return the step of a line.

    None if it is not a JSON object with a step.
    """
    # Matches lines as prep writes them, which is faster than parsing JSON.
    match = LINE_START.match(line)
    if match and line.endswith(b"}"):
        return int(match[1])
    values = _parse_line(line)
    if values is None:
        return None
    return line_step(values)


def metrics_file_name(process: int) -> str:
    """Return the name of the metrics file of a process."""
    if process:
        return f"metrics.{process}.jsonl"
    return METRICS_FILE


def remove_other_metrics(folder: Path, num_processes: int) -> None:
    """Remove the metrics that an earlier start of a run wrote in processes that do not log now.

    Args:
        folder: Folder of the run.
        num_processes: Number of processes that log.

    Raises:
        PrepError: A file cannot be removed.
    """
    for path in folder.glob("metrics.*.jsonl"):
        match = PROCESS_METRICS_FILE.fullmatch(path.name)
        if match and int(match[1]) >= num_processes:
            try:
                path.unlink()
            except OSError as error:
                raise PrepError(
                    f"cannot remove {path}", error.strerror or str(error), ACCESS_HINT
                ) from error


def line_step(line: MetricsLine) -> int:
    """Return the step of a line."""
    step = line["step"]
    assert isinstance(step, int), "lines without a step are skipped"
    return step


def metric_values(line: MetricsLine) -> dict[str, float]:
    """Return the numbers of a line by the names in TensorBoard and W&B: `train/loss`, `eval/loss`."""
    values: dict[str, float] = {}
    for name, value in line.items():
        if name == "step" or not isinstance(value, int | float):
            continue
        if name.startswith(EVAL_PREFIX):
            values[f"eval/{name.removeprefix(EVAL_PREFIX)}"] = value
        else:
            values[f"train/{name}"] = value
    return values


# Step of a line, and whether the line is of an evaluation
LogKey = tuple[int, bool]


def log_key(line: MetricsLine) -> LogKey:
    """Return the key of a line, unique within a run."""
    return line_step(line), f"{EVAL_PREFIX}loss" in line


def repeated_lines(path: Path, step: int) -> frozenset[LogKey]:
    """Return the keys of the lines from a step on. A run that continues after the step writes them again.

    Raises:
        PrepError: The file cannot be read.
    """
    return frozenset(log_key(line) for line in MetricsFile(path) if line_step(line) >= step)


def num_logged_events(path: Path, step: int) -> int:
    """Return the number of lines of a step in a file of metrics or samples that are not of the training step itself.

    Raises:
        PrepError: The file cannot be read.
    """
    count = 0
    for line in MetricsFile(path):
        is_event = f"{EVAL_PREFIX}loss" in line or "prompt" in line
        count += line_step(line) == step and is_event
    return count


def logged_evaluation(path: Path, step: int) -> JsonObject | None:
    """Return the line of a step's evaluation, or None if the file has none.

    Raises:
        PrepError: The file cannot be read.
    """
    for line in MetricsFile(path):
        if line_step(line) == step and f"{EVAL_PREFIX}loss" in line:
            return line
    return None


class MetricsWriter:
    """Writer that appends lines to a file of JSON objects, each with its step."""

    def __init__(self, path: Path, step: int) -> None:
        """Open a metrics file to continue after a step.

        Lines of later steps are removed, since the run takes these steps again. At step 0 all lines are removed.

        Args:
            path: The file.
            step: Start step of the run.

        Raises:
            PrepError: The file cannot be written.
        """
        self.path = path
        try:
            # The shortened file replaces the old one as a whole: a kill before leaves the old
            # lines.
            with replacing_file(path) as file:
                for line in MetricsFile(path).raw_lines() if step else ():
                    raw_step = _raw_line_step(line)
                    if raw_step is not None and raw_step <= step:
                        file.write(line + b"\n")
                # Later lines go to this file, and not to the path. Another start of the run may take over the lock of
                # a bucket, and replace the file in the local folder that both have on one host. Until this start
                # notices it, its lines must not get between the other's lines.
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise self._write_error(error) from error

    def write(self, line: MetricsLine) -> None:
        """Append a line, visible to readers at once.

        Raise PrepError if the disk refuses it.
        """
        data = f"{_to_json(line)}\n".encode()
        try:
            while data:
                # `os.write` may write a part only, e.g. on a disk that fills up. The rest follows
                # in the next round.
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise self._write_error(error) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _write_error(self, error: OSError) -> PrepError:
        return PrepError(f"cannot write {self.path}", error.strerror or str(error), ACCESS_HINT)


def _to_json(line: MetricsLine) -> str:
    # NaN and Infinity are not JSON, and many readers reject them.
    return json.dumps(line, allow_nan=False)
