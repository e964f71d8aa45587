"""Write the curves, recipe, data, environment and checkpoints of training runs as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from prepcli.commands.operations.operation import public
from prepcli.commands.operations.run_results import RunsReport
from prepcli.commands.pages.html_page import check_page_path
from prepcli.commands.pages.report_page import (
    RunSummary,
    changed_keys,
    run_names,
    summary_cells,
    write_report_page,
)
from prepcli.core.errors import Command, text, usage_error
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.stores.addresses import parse_out_url
from prepcli.stores.byte_ranges import retry_policy_from_env
from prepcli.stores.object_store import Bucket
from trainer.run.run_record import RunRecord, read_bucket_run, read_run

PAGE = "report.html"


@public
def report(
    runs: PathLike | Sequence[PathLike],
    out: PathLike | None = None,
    *,
    progress: Progress | Observer | None = None,
) -> RunsReport:
    """Write the metrics, recipes and environments of training runs as one HTML page, which needs no network.

    Args:
        runs: Folder or URL of a run, or several to compare.
        out: The HTML file. Default: `report.html` in the folder of the first run, or in the working directory if that
            run is in an object store.
        progress: Receives notes about the files of the runs, if it is an `Observer`. Default: none.

    Returns:
        The page, and the main numbers of each run.

    Raises:
        UsageError: There are no runs, or `out` is a URL.
        PrepError: A folder or URL is not a run, or a file cannot be read or written.
    """
    observer = observer_of(progress)
    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not folders:
        raise usage_error("no runs to report", "", text("{}", Command("report", "runs/NAME")))
    page = folders[0] / PAGE
    if parse_out_url(folders[0]) is not None:
        # A run in an object store has no local folder.
        page = Path(PAGE)
    if out is not None:
        page = Path(out)
        # The page of a run is checked when it is written. A misspelled run is another error.
        check_page_path(page)
    records: list[RunRecord] = []
    for folder in folders:
        url = parse_out_url(folder)
        if url is None:
            record = read_run(folder)
        else:
            policy = retry_policy_from_env(os.environ, observer.note)
            record = read_bucket_run(Bucket(url, retry_policy=policy))
        for note in record.notes:
            observer.note(note)
        records.append(record)
    summaries = tuple(summarize(record) for record in records)
    write_report_page(page, records, [summary_cells(summary) for summary in summaries])
    observer.note(f"wrote {page}")
    return RunsReport(
        path=page,
        runs=summaries,
        changed_keys=tuple(changed_keys(records)),
        names=tuple(run_names(records)),
    )


def summarize(run: RunRecord) -> RunSummary:
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
        "tokens_per_s": _median_metric(run, "tokens_per_s"),
        "mfu": _median_metric(run, "mfu"),
        "skipped": None if skipped is None else int(skipped),
    }


def _median_metric(run: RunRecord, name: str) -> float | None:
    values = run.metrics.median_values(name)
    # The median, because steps that also compile or save are much slower than the rest.
    return median(values) if values else None
