"""`prep report`: the curves, recipe, data, environment and checkpoints of training runs as a page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from prepcli.console.ui import Report, Ui, format_table
from prepcli.errors import usage_error
from prepcli.execution.uploads import parse_out_url
from prepcli.inspection.bucket_record import read_bucket_run
from prepcli.inspection.run_record import RunRecord, read_run
from prepcli.pages.html_page import check_page_path
from prepcli.pages.report_page import changed_keys, run_names, write_report_page
from prepcli.remote.object_store import Bucket
from prepcli.remote.retries import retry_policy_from_env

PAGE = "report.html"


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """Request of `prep report`.

    Attributes:
        runs: Folders or URLs of the runs.
        out: The HTML file; None: `report.html` in the folder of the first run, or here for a run in an object store.
    """

    runs: tuple[Path, ...]
    out: Path | None = None


def report(request: ReportRequest, ui: Ui) -> Report:
    """Write the page of runs.

    Args:
        request: The request.
        ui: Prints the path of the page.

    Raises:
        UsageError: There are no runs, or the page would be in an object store.
        PrepError: A folder or URL is not a run, or a file cannot be read or written.
    """
    if not request.runs:
        raise usage_error("no runs to report", "", "`prep report runs/NAME`")
    if request.out is not None and (url := parse_out_url(request.out)) is not None:
        raise usage_error(
            f"cannot write the page to {url}", "it is not a local file", "`--out FILE`"
        )
    folder = request.runs[0] if parse_out_url(request.runs[0]) is None else Path()
    path = request.out or folder / PAGE
    check_page_path(path)
    runs = [_read(path, ui) for path in request.runs]
    summaries = [summarize(run) for run in runs]
    cells = [_texts(summary) for summary in summaries]
    write_report_page(path, runs, cells)
    rows = [[name, *row.values()] for name, row in zip(run_names(runs), cells)]
    table = format_table(rows, ["run", *cells[0]], right_aligned=[*cells[0]], width=ui.columns)
    ui.note(f"wrote {path}")
    fields = {"output": str(path), "runs": summaries, "changed_keys": changed_keys(runs)}
    return Report(table, fields)


def _read(path: Path, ui: Ui) -> RunRecord:
    """Read the record of a run in a folder or an object store."""
    url = parse_out_url(path)
    if url is None:
        run = read_run(path)
    else:
        run = read_bucket_run(Bucket(url, retry_policy=retry_policy_from_env(os.environ, ui.note)))
    for note in run.notes:
        ui.note(note)
    return run


def summarize(run: RunRecord) -> dict[str, Any]:
    """Return the main numbers of a run. Missing numbers are None."""
    metrics = run.metrics
    tokens = metrics.last("tokens")
    skipped = metrics.last("skipped")
    return {
        "run": run.name,
        "step": run.last_step,
        "steps": run.steps,
        "tokens": None if tokens is None else int(tokens),
        "loss": metrics.last("loss"),
        "eval_loss": metrics.last("eval_loss"),
        "best_eval_loss": metrics.best_eval_loss(),
        "tokens_per_s": _median(run, "tokens_per_s"),
        "mfu": _median(run, "mfu"),
        "skipped": None if skipped is None else int(skipped),
    }


def _median(run: RunRecord, name: str) -> float | None:
    values = run.metrics.median_values(name)
    return median(values) if values else None


def _texts(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return a summary as table cells."""
    steps = f"{summary['step']:,}" + (f" / {summary['steps']:,}" if summary["steps"] else "")
    return {
        "steps": steps,
        "tokens": _text(summary["tokens"], ",d"),
        "loss": _text(summary["loss"], ".4f"),
        "eval loss": _text(summary["eval_loss"], ".4f"),
        "best": _text(summary["best_eval_loss"], ".4f"),
        "tokens/s": _text(summary["tokens_per_s"], ",.0f"),
        "MFU": _text(summary["mfu"], ".1%"),
    }


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
