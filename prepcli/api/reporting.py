"""Report on training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prepcli.api.session import silent_ui
from prepcli.commands import report as report_command
from prepcli.operations.operation import public
from prepcli.operations.option_spec import PathLike
from prepcli.operations.results import RunsReport


@public
def report(runs: PathLike | Sequence[PathLike], out: PathLike | None = None) -> RunsReport:
    """Write the metrics, recipes and environments of training runs as one HTML page, which needs no network.

    Args:
        runs: Folder or URL of a run, or several to compare.
        out: The HTML file; default: `report.html` in the folder of the first run, or in the working directory if that
            run is in an object store.

    Returns:
        The page, and the main numbers of each run.

    Raises:
        UsageError: There are no runs, or `out` is a URL.
        PrepError: A folder or URL is not a run, or a file cannot be read or written.
    """
    folders = [runs] if isinstance(runs, str | Path) else runs
    request = report_command.ReportRequest(
        tuple(Path(folder) for folder in folders), Path(out) if out is not None else None
    )
    fields: Any = report_command.report(request, silent_ui("report")).fields
    return RunsReport(
        path=Path(fields["output"]),
        runs=tuple(fields["runs"]),
        changed_keys=tuple(fields["changed_keys"]),
    )
