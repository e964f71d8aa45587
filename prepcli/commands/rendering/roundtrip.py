"""Certificates of conversions and their ways back, as text and JSON."""

from __future__ import annotations

from dataclasses import asdict

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.results import Roundtrip, RoundtripWay
from prepcli.core.errors import PrepError
from prepcli.core.formatting import format_bytes
from prepcli.core.tables import format_table

HEADER = ("way", "status", "tensors", "bytes", "digest")
REPORT_HINT = "report it with the certificate"


def roundtrip_report(roundtrip: Roundtrip, width: int | None) -> Report:
    """Return the report of a certificate: a table of the ways. It has an error if a way changed the model.

    Args:
        roundtrip: Result of the operation.
        width: Width of the terminal, or None for full width.
    """
    rows = [_row(way) for way in roundtrip.ways]
    lines = [format_table(rows, HEADER, HEADER[2:4], width, optional=["digest", "bytes"])]
    for way in roundtrip.ways:
        if way.reason:
            lines.append(f"{way.name}: {way.reason}")
    lines.append(str(roundtrip.path))
    fields = asdict(roundtrip) | {"path": str(roundtrip.path)}
    different = [way for way in roundtrip.ways if way.status == "different"]
    error: PrepError | None = None
    if different:
        what = f"{roundtrip.source} is not the same after the way {different[0].name}"
        error = PrepError(what, different[0].reason, REPORT_HINT)
    return Report("\n".join(lines), fields, error=error)


def _row(way: RoundtripWay) -> tuple[str, ...]:
    if way.status == "not available":
        return way.name, way.status, "", "", ""
    size = format_bytes(way.nbytes)
    status = "0 bits changed" if way.status == "equal" else way.status
    return way.name, status, f"{way.tensors:,}", size, way.digest
