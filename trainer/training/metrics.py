"""The events of a run, their lines of metrics and samples, and the files of these lines.

A file has one JSON object per line. Process 0 writes the metrics to `metrics.jsonl`. With `log.all_workers` every other
process writes a separate file, such as `metrics.1.jsonl`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonObject
from prepcli.formats.manifest import METRICS_FILE
from prepcli.stores.files import ACCESS_HINT, read_complete_lines, replacing_file

# Prefix of the values of an evaluation.
EVAL_PREFIX = "eval_"
# exp(700) is finite in float64.
MAX_EXPONENT = 700.0
LINE_START = re.compile(rb'\{"step": ([0-9]{1,18})[,}]')
# A line of a metrics file. `line_step` returns its step.
MetricsLine: TypeAlias = Mapping[str, object]
PROCESS_METRICS_FILE = re.compile(r"metrics\.([1-9][0-9]*)\.jsonl")


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Loss and accuracy over the predicted tokens of a dataset."""

    mean_loss: float  # Mean cross-entropy of a token. NaN without tokens.
    accuracy: float  # Fraction of the tokens that are predicted correctly. NaN without tokens.
    # Sum of the loss weights of the predicted tokens: their number if all weights are 1
    weight: float
    # Mean over the tokens of each value that `metric_fn` computes. NaN without tokens.
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of predicted tokens, each counted with its loss weight."""
        return int(self.weight)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss, limited to stay finite."""
        return math.exp(min(self.mean_loss, MAX_EXPONENT))


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the text that the model generated for it: its continuation, or the target of an encoder-decoder."""

    prompt: str
    text: str


class ZLossField(TypedDict, total=False):
    """The entry of a step's line for the z-loss. Absent if the loss does not have this term."""

    z_loss: float | None


class SpeedFields(TypedDict, total=False):
    """The speed of a step, as entries of its line in the log."""

    # Seconds of a step. Absent if they are unknown, as are `tokens_per_s` and `mfu` then.
    seconds: float
    tokens_per_s: float  # Tokens of all devices per second, with the tokens of sources
    mfu: float  # Model FLOPs utilization. Absent too if the peak rate of the devices is unknown.
    memory_bytes: int  # Highest memory in use on a device. Absent if the devices do not count it.


class StepLine(ZLossField, SpeedFields):
    """The line of a training step. A value is None if it is not finite.

    The line of a mixture also has the tokens of each source, e.g. `tokens.web`.
    """

    step: int
    loss: float | None  # Mean loss of its tokens. None if none of them has loss.
    # Fraction of its tokens that are predicted correctly. None if none of them has loss.
    accuracy: float | None
    grad_norm: float | None  # Norm of the gradients
    lr: float  # Learning rate
    # Tokens of all steps so far. Steps before a training state that the run began with count as its own.
    tokens: int
    skipped: int  # Number of skipped steps so far


def step_line(step: int, values: Mapping[str, float], *, tokens: int) -> StepLine:
    """Return the line of a training step.

    Args:
        step: The step.
        values: Its metrics: sums of losses and of correct tokens, their weight, and numbers of the optimizer.
        tokens: Tokens of all steps so far.
    """
    # A step without a token with loss has no mean.
    weight = values["weight"] or math.nan
    z_loss: ZLossField = {}
    if "z_loss" in values:
        z_loss["z_loss"] = finite_or_none(values["z_loss"] / weight)
    return {
        "step": step,
        "loss": finite_or_none(values["loss"] / weight),
        **z_loss,
        "accuracy": finite_or_none(values["correct"] / weight),
        "grad_norm": finite_or_none(values["grad_norm"]),
        "lr": values["lr"],
        "tokens": tokens,
        "skipped": int(values["skipped"]),
    }


def speed_fields(
    step_s: float | None, *, tokens_per_step: int, peak_step_s: float | None
) -> SpeedFields:
    """Return the speed of a step as entries of its log line.

    Empty if the duration of the step is unknown.

    Args:
        step_s: Duration of the step in seconds.
        tokens_per_step: Tokens of the step.
        peak_step_s: Duration of the model's FLOPs at the peak rate of the devices. None if the
            peak rate is unknown.
    """
    if not step_s:
        return {}
    fields: SpeedFields = {
        "seconds": round(step_s, 4),
        "tokens_per_s": round(tokens_per_step / step_s, 1),
    }
    if peak_step_s is not None:
        fields["mfu"] = round(peak_step_s / step_s, 4)
    return fields


def evaluation_line(step: int, result: EvaluationResult) -> JsonObject:
    """Return the line of an evaluation after a step."""
    return {
        "step": step,
        "eval_loss": finite_or_none(result.mean_loss),
        "eval_perplexity": finite_or_none(result.perplexity),
        "eval_accuracy": finite_or_none(result.accuracy),
        "eval_tokens": result.num_tokens,
        **{f"eval_{name}": finite_or_none(value) for name, value in result.metrics.items()},
    }


def sample_line(step: int, sample: Sample) -> JsonObject:
    """Return the line of a text that was generated after a step."""
    return {"step": step, "prompt": sample.prompt, "text": sample.text}


def finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is infinite or NaN, which JSON does not have."""
    if math.isfinite(value):
        return value
    return None


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
    """Return the step of a line. None if it is not a JSON object with a step."""
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


class RunLog:
    """A receiver of the events of a run. A subclass overrides the methods of the events that it shows or stores."""

    def on_phase(self, phase: str) -> None:
        """Begin a phase such as `compile`, `step 12` or `save 12`."""

    def on_compile(self, seconds: float) -> None:
        """Report the seconds of compiling the step."""

    def on_step(self, step: int, remaining_s: float | None) -> None:
        """Report a finished step, and an estimate of the remaining seconds."""

    def on_progress(self, done: int, total: int) -> None:
        """Report the progress of an evaluation in batches, or of samples in tokens."""

    def on_log(self, line: StepLine, remaining_s: float | None) -> None:
        """Report the line of a step, and an estimate of the remaining seconds."""

    def on_evaluate(self, step: int, result: EvaluationResult) -> None:
        """Report an evaluation after a step."""

    def on_samples(self, step: int, samples: Sequence[Sample], num_new: int) -> None:
        """Report the texts generated after a step. No earlier start has logged the last `num_new`."""

    def on_save(self, step: int, seconds: float) -> None:
        """Report a durable checkpoint, its step, and the seconds of saving it."""

    def on_end(self, stop_reason: str) -> None:
        """Report that the run has ended, or why it was stopped before its end."""

    def close(self, *, has_failed: bool = False) -> None:
        """End the log, after an error if `has_failed`."""


class MetricsLog(RunLog):
    """A log of the lines of steps and evaluations. A subclass writes them."""

    def write(self, line: MetricsLine) -> None:
        """Append a line."""
        raise NotImplementedError

    def on_log(self, line: StepLine, remaining_s: float | None) -> None:
        """Write the line of a step."""
        self.write(line)

    def on_evaluate(self, step: int, result: EvaluationResult) -> None:
        """Write the line of an evaluation."""
        self.write(evaluation_line(step, result))


class FileLog(RunLog):
    """A log that appends lines to a file of the run."""

    def __init__(self, path: Path, lines: Iterable[bytes] = ()) -> None:
        """Replace a file by the lines that the run continues.

        Args:
            path: The file.
            lines: The lines, each with its end.

        Raises:
            PrepError: The file cannot be written.
        """
        self.path = path
        self._fd = -1
        self.replace(lines)

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace all lines. A kill leaves the old ones. Raise PrepError if the disk refuses them."""
        try:
            with replacing_file(self.path) as file:
                file.writelines(lines)
                self.close()
                # Later lines go to this file, and not to the path. Another start of the run may take over the lock of
                # a bucket, and replace the file in the local folder that both have on one host. Until this start
                # notices it, its lines must not get between the other's lines.
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise self._write_error(error) from error

    def append(self, line: bytes) -> None:
        """Append a line, visible to readers at once. Raise PrepError if the disk refuses it."""
        data = line
        try:
            while data:
                # `os.write` may write a part only, e.g. on a disk that fills up. The rest follows
                # in the next round.
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise self._write_error(error) from error

    def close(self, *, has_failed: bool = False) -> None:
        """Close the file. Raise PrepError if the disk refuses it, unless the run has failed already."""
        fd = self._fd
        self._fd = -1
        try:
            if fd != -1:
                os.close(fd)
        except OSError as error:
            if not has_failed:
                raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> PrepError:
        return PrepError(f"cannot write {self.path}", error.strerror or str(error), ACCESS_HINT)


class JsonLinesLog(FileLog):
    """A log that appends lines to a file of JSON objects, each with its step."""

    def __init__(self, path: Path, step: int) -> None:
        """Open a file to continue after a step.

        Lines of later steps are removed, since the run takes these steps again. At step 0 all lines are removed.

        Args:
            path: The file.
            step: Start step of the run.

        Raises:
            PrepError: The file cannot be written.
        """
        super().__init__(path, _lines_up_to(path, step))

    def write(self, line: MetricsLine) -> None:
        """Append a line, visible to readers at once. Raise PrepError if the disk refuses it."""
        # NaN and Infinity are not JSON, and many readers reject them.
        self.append(f"{json.dumps(line, allow_nan=False)}\n".encode())


def _lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    """Yield the lines of a file up to a step. None at step 0."""
    for line in MetricsFile(path).raw_lines() if step else ():
        raw_step = _raw_line_step(line)
        if raw_step is not None and raw_step <= step:
            yield line + b"\n"


class MetricsFileLog(JsonLinesLog, MetricsLog):
    """The metrics file of a process."""


class SamplesFileLog(JsonLinesLog):
    """The file of generated texts."""

    def on_samples(self, step: int, samples: Sequence[Sample], num_new: int) -> None:
        """Append a line for each text that no earlier start has logged."""
        for sample in samples[-num_new:]:
            self.write(sample_line(step, sample))
