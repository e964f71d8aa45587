"""The lines of a run's metrics and samples, as JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypedDict

from prepcli.core.json_values import JsonObject
from trainer.training.evaluation import EvaluationResult
from trainer.training.samples import Sample


class ZLossField(TypedDict, total=False):
    """The entry of a step's line for the z-loss. Absent if the loss does not have this term."""

    z_loss: float | None


class SpeedFields(TypedDict, total=False):
    """The speed of a step, as entries of its line in the log.

    Attributes:
        seconds: Seconds of a step. Absent if they are unknown, as are `tokens_per_s` and `mfu` then.
        tokens_per_s: Tokens of all devices per second.
        mfu: Model FLOPs utilization. Absent too if the peak rate of the devices is unknown.
        memory_bytes: Highest memory in use on a device. Absent if the devices do not count it.
    """

    seconds: float
    tokens_per_s: float
    mfu: float
    memory_bytes: int


class StepLine(ZLossField, SpeedFields):
    """The line of a training step. A value is None if it is not finite.

    Attributes:
        step: The step.
        loss: Mean loss of its tokens. None if none of them has loss.
        accuracy: Fraction of its tokens that are predicted correctly. None if none of them has loss.
        grad_norm: Norm of the gradients.
        lr: Learning rate.
        tokens: Tokens of all steps so far.
        skipped: Number of skipped steps so far.
    """

    step: int
    loss: float | None
    accuracy: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    skipped: int


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
