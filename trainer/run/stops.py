"""The end of a run by a signal: the error of a stopped run, and the end of a process that is not to save its step."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NoReturn

from prepcli.core.errors import INTERRUPTED, RESUME_HINT, STOPPED, PrepError, text
from prepcli.execution.signals import exit_with_report
from trainer.run.export import describe_missing_exports
from trainer.run.run import PreparedRun, Run
from trainer.run.storage import describe_saved_progress

if TYPE_CHECKING:
    from trainer.training.loop import LoopResult


def quit_run(run: Run) -> NoReturn:
    """Report a second Ctrl-C, and end the process without the steps since the last saved one."""

    def report() -> int:
        why = describe_saved_progress(run.storage)
        error = PrepError("interrupted", why, RESUME_HINT, INTERRUPTED)
        return run.observer.show_final_error(error)

    exit_with_report(report)


def stopped_error(prepared: PreparedRun, end: LoopResult) -> PrepError:
    """Return the error of a run stopped before its end."""
    run = prepared.run
    reason = end.stop_reason
    why = "no step was completed"
    if run.storage.steps(refresh=False):
        why = f"step {end.step} is saved"
    if missing := describe_missing_exports(run, prepared.loop.steps):
        why = f"{why}; {missing}"
    # 75 asks a launcher to start the job again. After Ctrl-C, the user does not want a restart.
    if reason == signal.Signals.SIGINT.name:
        return PrepError("interrupted", why, RESUME_HINT, INTERRUPTED)
    # Other reasons than signals are texts, e.g. the limit of `stop_after`.
    form = "stopped by {}" if reason.startswith("SIG") else "stopped: {}"
    return PrepError(text(form, reason), why, RESUME_HINT, STOPPED)
