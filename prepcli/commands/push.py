"""`prep export --push`: export, then upload the complete folder to the hub."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from prepcli.commands.export import ExportRequest, export
from prepcli.console.ui import Report, Ui
from prepcli.errors import PrepError, usage_error
from prepcli.execution.hub_push import PushTarget, check_push, parse_push_target, push_folder
from prepcli.execution.workers import PARENT_VARIABLE
from prepcli.planning.shares import requested_share
from prepcli.remote.retries import RetryPolicy, retry_policy_from_env


def export_and_push(request: ExportRequest, repository: str | None, private: bool, ui: Ui) -> Report:
    """Export, and upload the folder to the hub if `repository` is given.

    An output of an earlier run of the same request is not exported again.

    Args:
        request: Request of the export.
        repository: `OWNER/NAME`, optionally with a revision; None to export only.
        private: Whether a new repository is private.
        ui: Receives notes, warnings and progress.

    Returns:
        Report of the export, with the repository and the commit's URL if it was uploaded.

    Raises:
        PrepError: The upload is not possible (checked before the export), the export failed, or the upload failed;
            the export is complete then.
    """
    if repository is None:
        if private:
            raise usage_error(
                "`--private` requires `--push`", "it sets the visibility of a new repository", "`--push OWNER/NAME`"
            )
        return export(request, ui)
    target = parse_push_target(repository, private)
    if PARENT_VARIABLE in os.environ:
        return export(request, ui)  # the parent process uploads
    if requested_share(request.common.process_options.processes, os.environ)[0].count > 1:
        why, hint = "several processes write this output", "upload it when they are done"
        raise usage_error("`--push` is not supported with several processes", why, hint)
    retry_policy = retry_policy_from_env(os.environ, ui.note)
    check_push(target, retry_policy)
    report = export(request, ui)
    if request.common.dry_run:
        ui.note(f"would push it to {target.repo}")
        return report
    return _push_report(report, target, ui, retry_policy)


def _push_report(report: Report, target: PushTarget, ui: Ui, retry_policy: RetryPolicy) -> Report:
    out = Path(str(report.fields["output"]))
    try:
        commit_url = push_folder(out, target, progress=ui.progress(), retry_policy=retry_policy)
    except PrepError as error:
        raise PrepError(error.what, f"{error.why}; the export in {out} is complete", error.hint) from error
    ui.note(f"pushed to {commit_url}")
    push_fields = {"repo": target.repo, "revision": target.revision or "main", "commit": commit_url}
    return replace(report, fields={**report.fields, "pushed": push_fields})
