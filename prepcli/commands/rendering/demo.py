"""Demos as text and JSON."""

from __future__ import annotations

from dataclasses import asdict

from prepcli.commands.console.ui import Report
from prepcli.commands.demo.run import REPORT, DemoRun, StepReport
from prepcli.core.errors import PrepError
from prepcli.core.formatting import format_bytes
from prepcli.core.tables import format_table


def demo_report(run: DemoRun, columns: int | None) -> Report:
    """Return the table of the steps. The report has an error if a step failed.

    Args:
        run: The steps that ran.
        columns: Width of the terminal. None means unlimited.
    """
    header = ("step", "seconds", "bytes", "memory", "result")
    text = format_table(
        [_table_row(step) for step in run.steps],
        header,
        right_aligned=("seconds", "bytes", "memory"),
        width=columns,
        wrapped=["result"],
    )
    fields: dict[str, object] = {
        "output": str(run.out),
        "steps": [asdict(step) for step in run.steps],
    }
    failed = run.failed_step
    if failed is not None:
        what = f"the demo failed at step {len(run.steps)}: {failed.step}"
        return Report(text, fields, error=PrepError(what, failed.result, failed.hint))
    page = run.out / REPORT
    fields["report"] = str(page)
    closing = f"all {run.num_planned} steps passed; report with pictures: {page}"
    return Report(f"{text}\n{closing}", fields, "run the same commands with your own model")


def _table_row(report: StepReport) -> tuple[str, ...]:
    memory = format_bytes(report.peak) if report.peak else "-"
    return (
        report.step,
        f"{report.seconds:.1f}",
        format_bytes(report.bytes),
        memory,
        report.result_text,
    )
