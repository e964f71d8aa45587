"""The exports of a run: of steps while it trains, of its last step, which is pushed, and the missing ones of a stop."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from prepcli.core.formatting import join_names
from prepcli.core.intervals import is_due
from prepcli.execution.checkpoint_manager import StepExports
from prepcli.execution.hub_push import check_push, parse_push_target
from prepcli.stores.byte_ranges import retry_policy_from_env
from prepcli.stores.files import io_error
from trainer.run.run import Run, TrainResult

EXPORTS_FOLDER = "exports"  # in the folder of a run


def check_repository(run: Run) -> None:
    """Check in process 0 that the hub accepts an upload, if the recipe names a repository.

    Raises:
        PrepError: The hub would refuse the upload.
    """
    # Process 0 alone uploads. The other hosts need no token of the hub.
    repository = run.recipe.checkpoint.push
    if repository is not None and run.is_process_0:
        target = parse_push_target(repository, private=False)
        check_push(target, retry_policy_from_env(os.environ, run.observer.note))


def step_exports(run: Run) -> StepExports | None:
    """Return the exports of a run in process 0, or None without exports or in another process."""
    every = run.recipe.checkpoint.export_every
    if not every or not run.is_process_0:
        return None
    return StepExports(
        every,
        export=partial(_export_step, run),
        warn=run.observer.warn,
        say=run.observer.note,
    )


def _export_step(run: Run, step: int, repository: str | None = None) -> Mapping[str, str]:
    """Export a step, and upload it if a repository is named. Has no effect on a complete export."""
    out = _export_folder(run, step)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error(out.parent, error) from error
    return run.export(run.storage.step_name(step), out, repository)


def _export_folder(run: Run, step: int) -> Path:
    return run.folder / EXPORTS_FOLDER / str(step)


def make_missing_exports(run: Run) -> None:
    """Export the due steps of a finished run if a kill has interrupted their exports."""
    exports = step_exports(run)
    if exports is not None:
        exports.start_missing(run.storage.steps())
        exports.wait()


def describe_missing_exports(run: Run, last_step: int) -> str:
    """Describe the missing exports and the missing push of a finished run. The next start makes them.

    Args:
        run: The run.
        last_step: Last step of the run.

    Returns:
        For example `not exported: step 20 and step 40; not pushed to me/model`. Empty before the
        last step, and in every process but process 0.
    """
    checkpoint = run.recipe.checkpoint
    steps = run.storage.steps(refresh=False)
    if not run.is_process_0 or last_step not in steps:
        return ""
    unexported: list[str] = []
    for step in steps:
        # An export has its name only when it is complete, as every output.
        if is_due(step, checkpoint.export_every) and not _export_folder(run, step).exists():
            unexported.append(f"step {step}")
    parts: list[str] = []
    if unexported:
        parts.append(f"not exported: {join_names(unexported)}")
    if checkpoint.push is not None:
        parts.append(f"not pushed to {checkpoint.push}")
    return "; ".join(parts)


def remove_exports(run: Run) -> None:
    """Remove the exports of a run that starts again, in process 0. Raise PrepError if they cannot be removed."""
    if not run.is_process_0:
        return
    # The new run has the same step numbers. `describe_missing_exports` would count an old `exports/20`
    # as the export of the new step 20.
    folder = run.folder / EXPORTS_FOLDER
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise io_error(folder, error) from error


def push_last_step(run: Run, result: TrainResult) -> TrainResult:
    """Export the last step of a finished run and upload it, if the recipe names a repository.

    Args:
        run: The run.
        result: Its result.

    Returns:
        The result, with the repository and the commit if the step was uploaded.

    Raises:
        PrepError: The export or the upload failed. The run is complete.
    """
    repository = run.recipe.checkpoint.push
    if repository is None or not run.is_process_0 or result.error is not None:
        return result
    run.observer.note(f"pushing step {result.step} to {repository}")
    # The folder stays in the run. If the upload fails, the next start uploads it without a new export.
    pushed = _export_step(run, result.step, repository)
    run.observer.note(f"pushed to {pushed['commit']}")
    return replace(result, pushed=pushed)
