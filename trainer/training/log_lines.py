"""The lines of a run's metrics and samples, as JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.training.evaluation import EvaluationResult
from trainer.training.samples import Sample


def step_line(step: int, values: Mapping[str, float], *, tokens: int) -> dict[str, Any]:
    """Return the line of a training step.

    Args:
        step: The step.
        values: Its metrics: sums of losses and of correct tokens, their weight, and numbers of the optimizer.
        tokens: Tokens of all steps so far.
    """
    weight = max(values["weight"], 1e-9)
    z_loss: dict[str, float | None] = {}
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
) -> dict[str, float]:
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
    fields = {"seconds": round(step_s, 4), "tokens_per_s": round(tokens_per_step / step_s, 1)}
    if peak_step_s is not None:
        fields["mfu"] = round(peak_step_s / step_s, 4)
    return fields


def evaluation_line(step: int, result: EvaluationResult) -> dict[str, Any]:
    """Return the line of an evaluation after a step."""
    return {
        "step": step,
        "eval_loss": finite_or_none(result.mean_loss),
        "eval_perplexity": finite_or_none(result.perplexity),
        "eval_accuracy": finite_or_none(result.accuracy),
        "eval_tokens": result.num_tokens,
        **{f"eval_{name}": finite_or_none(value) for name, value in result.metrics.items()},
    }


def sample_lines(step: int, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the line of each text that was generated after a step."""
    return [{"step": step, "prompt": sample.prompt, "text": sample.text} for sample in samples]


def finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is infinite or NaN, which JSON does not have."""
    if math.isfinite(value):
        return value
    return None
