"""The result of a run: of a dry run, of a finished run, and of one that was stopped."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prepcli.errors import INTERRUPTED, RESUME_HINT, STOPPED, PrepError, text
from prepcli.training_runs.run import PreparedRun, TrainResult

if TYPE_CHECKING:
    from trainer.training.loop import RunResult


def dry_run_result(prepared: PreparedRun) -> TrainResult:
    """Return the result of a dry run, with its memory estimate."""
    return _result(prepared, prepared.step, memory=prepared.memory)


def finished_result(prepared: PreparedRun, metrics: Mapping[str, Any] | None = None) -> TrainResult:
    """Return the result of a finished run.

    Args:
        prepared: The run.
        metrics: Last metrics of the run. None if it was finished already and took no step.
    """
    if metrics is None:
        return _result(prepared, prepared.step)
    return _result(prepared, prepared.loop.steps, metrics=metrics)


def stopped_result(
    prepared: PreparedRun, stopped: RunResult, metrics: Mapping[str, Any]
) -> TrainResult:
    """Return the result of a run that stopped before its last step, with an error."""
    has_saved_step = bool(prepared.run.storage.steps(refresh=False))
    error = _stopped_error(stopped.stop_reason, stopped.step, has_saved_step)
    return _result(prepared, stopped.step, metrics=metrics, error=error)


def _result(prepared: PreparedRun, step: int, **fields: Any) -> TrainResult:
    """Return a result with the fields that every result has, and further ones."""
    storage = prepared.run.storage
    steps = storage.steps(refresh=False)
    output = None
    if steps:
        output = storage.step_name(steps[-1])
    return TrainResult(
        run=storage.name,
        output=output,
        step=step,
        steps=prepared.loop.steps,
        resumed_at=prepared.step,
        mesh=str(prepared.loop.setup.forward_config.sharding.mesh),
        attention_kernel=prepared.kernel.name,
        **fields,
    )


def _stopped_error(reason: str, step: int, has_saved_step: bool) -> PrepError:
    # 75 asks a launcher to start the job again. Ctrl-C is the user's, who does not want that.
    code = STOPPED
    if reason == signal.Signals.SIGINT.name:
        code = INTERRUPTED
    why = "no step was completed"
    if has_saved_step:
        why = f"step {step} is saved"
    what = text("stopped: {}", reason)
    # Other reasons are texts, e.g. the limit of `stop_after`.
    if reason.startswith("SIG"):
        what = text("stopped by {}", reason)
    return PrepError(what, why, RESUME_HINT, code)
