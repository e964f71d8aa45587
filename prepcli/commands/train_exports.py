"""Hugging Face exports of a run: of some steps while it trains, and of the last step for the hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.conversion import CommonOptions
from prepcli.commands.export import ExportRequest, export
from prepcli.commands.push import export_and_push
from prepcli.commands.train_run import Run
from prepcli.console.lists import join_names
from prepcli.console.ui import Report, Ui, open_ui
from prepcli.engine.budget import DEFAULT_MEMORY, parse_memory
from prepcli.engine.files import io_error
from prepcli.execution.hub_push import check_push, parse_push_target
from prepcli.execution.step_exports import StepExports
from prepcli.remote.retries import retry_policy_from_env
from trainer.recipe.run_tables import Checkpoint

if TYPE_CHECKING:
    from trainer.distributed.process_group import ProcessGroup

EXPORTS_FOLDER = "exports"  # in the folder of a run


def export_request(run: Run, step: int) -> ExportRequest:
    """Return the request that exports a step to the run's folder."""
    out, memory_nbytes = _export_folder(run, step), parse_memory(DEFAULT_MEMORY)
    return ExportRequest(CommonOptions(checkpoint=run.place.step_name(step), out=out, memory_nbytes=memory_nbytes))


def _export_folder(run: Run, step: int) -> Path:
    return run.folder / EXPORTS_FOLDER / str(step)


def step_exports(run: Run, ui: Ui) -> StepExports | None:
    """Return the exports of a run in process 0; None if there are none, or in other processes."""
    every = run.recipe.checkpoint.export_every
    if not every or run.group.index > 0:
        return None

    def export_step(step: int) -> None:
        request = export_request(run, step)
        _make_parent(request)
        export(request, _quiet_ui())

    return StepExports(every, export=export_step, warn=ui.warn, note=ui.note)


def make_missing_exports(run: Run, ui: Ui) -> None:
    """Export the due steps of a finished run whose exports a kill has interrupted."""
    exports = step_exports(run, ui)
    if exports is not None:
        exports.start_missing(run.place.steps())
        exports.wait()


def missing_note(run: Run) -> str:
    """Describe the exports and the push that a run lacks after its last step; empty before it, and in other processes.

    The next start of the run makes them.
    """
    checkpoint, steps = run.recipe.checkpoint, run.place.known_steps()
    if run.group.index > 0 or run.job.steps not in steps:
        return ""
    due = [step for step in steps if checkpoint.export_every and step % checkpoint.export_every == 0]
    unexported = [f"step {step}" for step in due if not _export_folder(run, step).exists()]
    parts = [f"not exported: {join_names(unexported)}"] if unexported else []
    parts += [f"not pushed to {checkpoint.push}"] if checkpoint.push is not None else []
    return "; ".join(parts)


def remove_exports(run: Run) -> None:
    """Remove the exports of a run that starts again, in process 0; PrepError if they cannot be removed."""
    if run.group.index > 0:
        return
    folder = run.folder / EXPORTS_FOLDER
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise io_error(folder, error) from error


def check_repository(checkpoint: Checkpoint, group: ProcessGroup, ui: Ui) -> None:
    """Check in process 0 that the hub accepts an upload, if the recipe names a repository.

    Raises:
        PrepError: It does not.
    """
    if checkpoint.push is not None and group.index == 0:
        target = parse_push_target(checkpoint.push, private=False)
        check_push(target, retry_policy_from_env(os.environ, ui.note))


def push_last_step(run: Run, report: Report, ui: Ui) -> Report:
    """Export the last step of a finished run and upload it, if the recipe names a repository.

    Raises:
        PrepError: The export or the upload failed; the run is complete.
    """
    repository = run.recipe.checkpoint.push
    if repository is None or run.group.index > 0 or report.error is not None:
        return report
    request = export_request(run, run.job.steps)
    _make_parent(request)
    ui.note(f"pushing step {run.job.steps} to {repository}")
    fields: Any = export_and_push(request, repository, private=False, ui=_quiet_ui()).fields
    ui.note(f"pushed to {fields['pushed']['commit']}")
    return Report(report.text, {**report.fields, "pushed": fields["pushed"]}, report.next_command)


def _quiet_ui() -> Ui:
    return open_ui("export", as_json=False, quiet=True, verbose=0, progress="none")


def _make_parent(request: ExportRequest) -> None:
    assert request.common.out is not None
    parent: Path = request.common.out.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error(parent, error) from error
