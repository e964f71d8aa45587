"""`prep export --push`: an export that is whole is uploaded to the hub."""

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
    """Export, and push the folder if `to` names a repository; an export that was made before is only pushed.

    Raises PrepError as exporting does, before it for what would keep the upload from working, and after it, with the
    export whole, for an upload that failed.
    """
    if repository is None:
        if private:
            raise usage_error(
                "`--private` is for `--push`", "it says who may see the repository", "`--push OWNER/NAME`"
            )
        return export(request, ui)
    target = parse_push_target(repository, private)
    if PARENT_VARIABLE in os.environ:
        return export(request, ui)  # the process that this one works for pushes
    if requested_share(request.common.process_options.processes, os.environ)[0].count > 1:
        raise usage_error("`--push` is for one process", "several write this output", "push it when they are done")
    patience = retry_policy_from_env(os.environ, ui.note)
    check_push(target, patience)
    report = export(request, ui)
    if request.common.dry_run:
        ui.note(f"would push it to {target.repo}")
        return report
    return _push_report(report, target, ui, patience)


def _push_report(report: Report, target: PushTarget, ui: Ui, patience: RetryPolicy) -> Report:
    out = Path(str(report.fields["output"]))
    try:
        url = push_folder(out, target, ui.progress(), patience)
    except PrepError as error:
        raise PrepError(error.what, f"{error.why}; the export in {out} is whole", error.hint) from error
    ui.note(f"pushed to {url}")
    pushed = {"repo": target.repo, "revision": target.revision or "main", "commit": url}
    return replace(report, fields={**report.fields, "pushed": pushed})
