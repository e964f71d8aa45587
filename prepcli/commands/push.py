"""`prep export --push`: an export that is whole is uploaded to the hub."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from prepcli.commands.export import Request, export
from prepcli.console.ui import Report, Ui
from prepcli.errors import PrepError, usage
from prepcli.execution.hub_push import Target, check, push, target_of
from prepcli.execution.workers import PARENT
from prepcli.planning.shares import asked_share
from prepcli.remote.patience import Patience, patience_of


def export_and_push(request: Request, to: str | None, private: bool, ui: Ui) -> Report:
    """Export, and push the folder if `to` names a repository; an export that was made before is only pushed.

    Raises PrepError as exporting does, before it for what would keep the upload from working, and after it, with the
    export whole, for an upload that failed.
    """
    if to is None:
        if private:
            raise usage("`--private` is for `--push`", "it says who may see the repository", "`--push OWNER/NAME`")
        return export(request, ui)
    target = target_of(to, private)
    if PARENT in os.environ:
        return export(request, ui)  # the process that this one works for pushes
    if asked_share(request.common.asked.processes, os.environ)[0].count > 1:
        raise usage("`--push` is for one process", "several write this output", "push it when they are done")
    patience = patience_of(os.environ, ui.note)
    check(target, patience)
    report = export(request, ui)
    if request.common.dry_run:
        ui.note(f"would push it to {target.repo}")
        return report
    return _pushed(report, target, ui, patience)


def _pushed(report: Report, target: Target, ui: Ui, patience: Patience) -> Report:
    out = Path(str(report.fields["output"]))
    try:
        url = push(out, target, ui.progress(), patience)
    except PrepError as error:
        raise PrepError(error.what, f"{error.why}; the export in {out} is whole", error.hint) from error
    ui.note(f"pushed to {url}")
    pushed = {"repo": target.repo, "revision": target.revision or "main", "commit": url}
    return replace(report, fields={**report.fields, "pushed": pushed})
