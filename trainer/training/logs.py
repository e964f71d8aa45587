"""The events of a run and their receivers: lines of metrics and samples, as JSON values and as files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from prepcli.core.json_values import JsonObject
from trainer.training.metrics import MetricsLine, MetricsWriter

if TYPE_CHECKING:
    from trainer.training.evaluation import EvaluationResult
    from trainer.training.samples import Sample


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


class MetricsFileLog(MetricsLog):
    """The metrics file of a process."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the file to continue after a step. See `MetricsWriter`."""
        self._writer = MetricsWriter(path, step)

    def write(self, line: MetricsLine) -> None:
        """Append a line."""
        self._writer.write(line)

    def close(self, *, has_failed: bool = False) -> None:
        """Close the file."""
        self._writer.close()


class SamplesFileLog(RunLog):
    """The file of generated texts."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the file to continue after a step. See `MetricsWriter`."""
        self._writer = MetricsWriter(path, step)

    def on_samples(self, step: int, samples: Sequence[Sample], num_new: int) -> None:
        """Append a line for each text that no earlier start has logged."""
        for sample in samples[-num_new:]:
            self._writer.write(sample_line(step, sample))

    def close(self, *, has_failed: bool = False) -> None:
        """Close the file."""
        self._writer.close()
