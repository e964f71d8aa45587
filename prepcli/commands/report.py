"""`prep report`: the curves, recipe, data, environment and checkpoints of training runs as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from prepcli.commands.report_page import changed_keys, run_names, write_report_page
from prepcli.console.ui import Report, Ui, format_table
from prepcli.inspection.run_record import RunRecord, read_run

PAGE = "report.html"


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """Request of `prep report`.

    Attributes:
        runs: Folders of the runs.
        out: The HTML file; None: `report.html` in the folder of the first run.
    """

    runs: tuple[Path, ...]
    out: Path | None = None


def report(request: ReportRequest, ui: Ui) -> Report:
    """Write the page of runs.

    Args:
        request: The request.
        ui: Prints the path of the page.

    Raises:
        PrepError: A folder is not a run, or a file cannot be read or written.
    """
    runs = [read_run(path) for path in request.runs]
    path = request.out or request.runs[0] / PAGE
    summaries = [summarize(run) for run in runs]
    cells = [_texts(summary) for summary in summaries]
    write_report_page(path, runs, cells)
    rows = [[name, *row.values()] for name, row in zip(run_names(runs), cells)]
    table = format_table(rows, ["run", *cells[0]], right_aligned=[*cells[0]], width=ui.columns)
    ui.note(f"wrote {path}")
    fields = {"output": str(path), "runs": summaries, "changed_keys": changed_keys(runs)}
    return Report(table, fields)


def summarize(run: RunRecord) -> dict[str, Any]:
    """Return the main numbers of a run, None for those that it does not have."""
    rates, eval_losses = run.points("tokens_per_s"), run.points("eval_loss")
    tokens, skipped = run.last("tokens"), run.last("skipped")
    return {
        "run": str(run.path),
        "step": run.last_step,
        "steps": run.steps,
        "tokens": None if tokens is None else int(tokens),
        "loss": run.last("loss"),
        "eval_loss": run.last("eval_loss"),
        "best_eval_loss": min((value for _, value in eval_losses), default=None),
        "tokens_per_s": median([value for _, value in rates]) if rates else None,
        "mfu": run.last("mfu"),
        "skipped": None if skipped is None else int(skipped),
    }


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
