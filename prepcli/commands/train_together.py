"""The end of a run in several processes: together, after an error, a signal, a lost process, or the last step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from prepcli.console.ui import Report, Ui
from prepcli.console.unexpected import as_prep_error
from prepcli.errors import FAILED, INTERRUPTED, STOPPED, PrepError
from prepcli.execution.signals import Interrupted, Stopped, note_durable_work, raise_on_signal

if TYPE_CHECKING:
    from trainer.distributed.coordination import CoordinatedProcesses
    from trainer.distributed.heartbeat import JobEnd
    from trainer.distributed.process_group import ProcessGroup
    from trainer.distributed.watchdog import Watchdog
    from trainer.recipe.run_tables import Cluster

INTERRUPT = "SIGINT"
# In errors of XLA's collectives (gloo, NCCL, the network of TPUs) and of the coordination service
CONNECTION_WORDS = ("UNAVAILABLE", "ABORTED", "DEADLINE_EXCEEDED", "Gloo", "gloo", "NCCL", "onnection", "ocket", "peer")
PRINT_S = 10.0  # a process that cannot print its error within this time ends without it
RESTART_HINT = "start all processes again; the run resumes from its last saved step"
NO_STEP_HINT = "start all processes again; no step is saved"


@contextmanager
def run_together(
    group: ProcessGroup,
    cluster: Cluster,
    ui: Ui,
    *,
    has_saved_step: Callable[[], bool],
    describe_durable: Callable[[], str] = lambda: "",
    hint: str = NO_STEP_HINT,
) -> Iterator[Callable[[str], None]]:
    """End this process with the other processes of its job, and wait for them at the end.

    Args:
        group: Processes of the job.
        cluster: Deadlines of the job.
        ui: Prints the error if another process ends the job.
        has_saved_step: Returns whether the run can be resumed.
        describe_durable: Returns a description of the work that a later run continues from, for the message of a signal
            that ends the wait; empty if there is none.
        hint: Hint of errors if it cannot.

    Yields:
        A function that sets the phase of this process, such as `load` or `step 12`.

    Raises:
        PrepError: The connection to the other processes is broken.
    """
    from trainer.distributed.coordination import CoordinatedProcesses
    from trainer.distributed.watchdog import Watchdog, WatchSettings

    if not isinstance(group, CoordinatedProcesses):
        yield lambda _: None
        return
    watchdog = Watchdog(
        group,
        WatchSettings(cluster.heartbeat_timeout, cluster.step_timeout, group.places),
        is_broken=group.errors.reported.is_set,
        on_end=lambda end: _end_process(end, ui, has_saved_step, hint=hint),
    )
    watchdog.start()
    try:
        yield watchdog.enter
        watchdog.enter("end")
        with raise_on_signal(), note_durable_work(describe_durable):
            _wait_for_all(group)
    except BaseException as raised:
        error = _wait_for_cause(raised, watchdog, has_saved_step, hint=hint)
        _end_job(error, group, watchdog)
        if error is raised:
            raise
        raise error from raised
    watchdog.close()
    if group.is_owner:
        group.disconnect()


def _wait_for_all(group: ProcessGroup) -> None:
    """Wait in a thread until all processes end: Python handles no signal during a wait of the coordination service."""
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            group.barrier("end")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _wait_for_cause(
    error: BaseException, watchdog: Watchdog, has_saved_step: Callable[[], bool], *, hint: str
) -> BaseException:
    """Return the error of this process; for a broken connection, let the watchdog name the lost process first."""
    from jax.errors import JaxRuntimeError

    from trainer.distributed.coordination import ConnectionBrokenError

    is_connection = isinstance(error, JaxRuntimeError) and any(word in str(error) for word in CONNECTION_WORDS)
    if not (is_connection or isinstance(error, ConnectionBrokenError)):
        return error
    watchdog.wait_for_end()  # does not return if a process is lost
    why = str(error).partition("\n")[0]
    hint, code = (RESTART_HINT, STOPPED) if has_saved_step() else (hint, FAILED)
    return PrepError("the devices of the processes cannot exchange data", why, hint, code)


def _end_job(error: BaseException, group: CoordinatedProcesses, watchdog: Watchdog) -> None:
    """Tell the other processes why this one ends, and make it end without them."""
    from trainer.distributed.heartbeat import JobEnd

    if isinstance(error, Stopped | Interrupted | KeyboardInterrupt):
        reason = error.signal_name if isinstance(error, Stopped) else INTERRUPT
        end = JobEnd("stopped", group.index, f"stopped by {reason} of process {group.index}", reason)
        code = STOPPED if isinstance(error, Stopped) else INTERRUPTED
    else:
        reported = error if isinstance(error, PrepError) else as_prep_error(error)
        why = " - ".join(text for text in (reported.what, reported.why) if text)
        what = f"process {group.index} ({group.places[group.index]}) failed"
        end, code = JobEnd("failed", group.index, what, why), reported.code
    watchdog.end_job(end)
    group.exit_without_disconnecting(code)


def _end_process(end: JobEnd, ui: Ui, has_saved_step: Callable[[], bool], *, hint: str) -> NoReturn:
    """Print why another process ended the job, and exit: the main thread may wait for it forever."""
    timer = threading.Timer(PRINT_S, os._exit, (FAILED,))  # the file system or a full pipe may not respond
    timer.daemon = True
    timer.start()
    ui.leave_live_block()
    os._exit(ui.finish(Report(error=_job_error(end, has_saved_step, hint=hint))))


def _job_error(end: JobEnd, has_saved_step: Callable[[], bool], *, hint: str = NO_STEP_HINT) -> PrepError:
    """Return the error of a process that another one ended."""
    hint, code = (RESTART_HINT, STOPPED) if has_saved_step() else (hint, FAILED)
    if end.kind == "stopped":
        return PrepError(end.what, "", hint, INTERRUPTED if end.why == INTERRUPT else STOPPED)
    return PrepError(end.what, end.why, hint, code)
