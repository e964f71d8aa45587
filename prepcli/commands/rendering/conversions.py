"""Conversions and their plans as text and JSON."""

from __future__ import annotations

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.conversion import dropped_text
from prepcli.commands.operations.results import Conversion
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.observer import LEAVES
from prepcli.planning.plan import Plan


def conversion_report(conversion: Conversion, level: int) -> Report:
    """Return the text that a command prints about a conversion.

    Args:
        conversion: Result of the operation.
        level: Verbosity. At LEAVES and above, the JSON object lists the leaves of the output.
    """
    output = str(conversion.details["output"])
    fields = dict(conversion.details)
    if level >= LEAVES:
        fields["leaves"] = _leaf_fields(conversion.plan)
    if "dry_run" in fields:
        return Report(_dry_run_line(conversion, output), fields)
    return Report(output, fields, conversion.next_command)


def _leaf_fields(plan: Plan) -> list[dict[str, object]]:
    """Return the name, the shapes and the dtype of each leaf."""
    return [
        {
            "name": leaf.name,
            "shape": leaf.grid.shape,
            "dtype": leaf.dtype,
            "chunk": leaf.grid.chunk_shape,
        }
        for leaf in plan.leaves
    ]


def _dry_run_line(conversion: Conversion, output: str) -> str:
    """Describe the output of a plan."""
    plan = conversion.plan
    text = f"would write {format_bytes(plan.write_nbytes)}"
    if plan.leaves:
        text += f" in {count_text(plan.chunk_count, 'chunk')} of {count_text(len(plan.leaves), 'leaf', 'leaves')}"
    written = {stream.name for stream in plan.streams if stream.writes}
    text += f" to {output}: {count_text(len(written), 'tensor')}"
    dropped = dropped_text(plan)
    if dropped:
        text += f", {dropped}"
    return f"{text}; plan {conversion.plan_digest}"
