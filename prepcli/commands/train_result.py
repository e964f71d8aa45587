"""The result of `prep train`: its fields, and the error of a stopped run."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prepcli.commands.train_run import Run
from prepcli.console.ui import Report
from prepcli.errors import INTERRUPTED, RESUME_HINT, STOPPED, PrepError

if TYPE_CHECKING:
    from trainer.training.loop import RunResult


def dry_run_report(run: Run) -> Report:
    """Report the run that would be started, with its memory estimate."""
    text = f"would train to step {run.job.steps} in {run.place.name}"
    return Report(text, run_fields(run, run.step) | {"memory": run.memory, "dry_run": True})


def finished_report(run: Run, fields: Mapping[str, Any] | None = None) -> Report:
    """Report the last step.

    Args:
        run: The run.
        fields: Metrics of the run; None if it took no step.
    """
    step = run.step if fields is None else run.job.steps
    all_fields = run_fields(run, step) | dict(fields or {})
    return Report(run.place.step_name(run.job.steps), all_fields, f"prep export {run.place.name}")


def stopped_report(run: Run, result: RunResult, fields: Mapping[str, Any]) -> Report:
    """Report the stop of a run before its last step, as an error."""
    has_saved_step = bool(run.place.known_steps())
    error = _stopped_error(result.stop_reason, result.step, has_saved_step)
    return Report(fields=run_fields(run, result.step) | dict(fields), error=error)


def run_fields(run: Run, step: int) -> dict[str, Any]:
    """Return the fields that every result of a run has.

    Args:
        run: The run.
        step: The last step taken.
    """
    steps = run.place.known_steps()
    return {
        "output": run.place.step_name(steps[-1]) if steps else None,
        "run": run.place.name,
        "step": step,
        "steps": run.job.steps,
        "resumed_at": run.step,
        "mesh": str(run.job.setup.forward_config.sharding.mesh),
        "attention_kernel": run.kernel.name,
    }


def _stopped_error(reason: str, step: int, has_saved_step: bool) -> PrepError:
    code = INTERRUPTED if reason == signal.Signals.SIGINT.name else STOPPED
    why = f"step {step} is saved" if has_saved_step else "no step was completed"
    what = f"stopped by {reason}" if reason.startswith("SIG") else f"stopped: {reason}"
    return PrepError(what, why, RESUME_HINT, code)
