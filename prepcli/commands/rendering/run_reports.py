"""Reports on training runs as text and JSON."""

from __future__ import annotations

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.results import RunsReport
from prepcli.commands.pages.report_page import summary_cells
from prepcli.core.tables import format_table


def runs_report(result: RunsReport, columns: int | None) -> Report:
    """Return the table of the runs' main numbers.

    Args:
        result: Result of the operation.
        columns: Width of the terminal. None means unlimited.
    """
    cells = [summary_cells(summary) for summary in result.runs]
    header = [*cells[0]]
    rows = [[name, *row.values()] for name, row in zip(result.names, cells)]
    table = format_table(rows, ["run", *header], right_aligned=header, width=columns)
    fields = {
        "output": str(result.path),
        "runs": result.runs,
        "changed_keys": result.changed_keys,
    }
    return Report(table, fields)
