"""Suggested maps, as text and JSON."""

from __future__ import annotations

from dataclasses import asdict

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.results import MapSuggestion
from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text, join_names

MAX_LISTED = 8


def suggestion_report(suggestion: MapSuggestion) -> Report:
    """Return the report of a map: its counts, and the tensors that need a decision. An incomplete map is an error."""
    lines = [
        f"{count_text(len(suggestion.rows), 'row')} for {count_text(suggestion.targets, 'tensor')}"
    ]
    other_values = [name for name in suggestion.unmatched if name not in suggestion.ambiguous]
    for title, names in (
        ("ambiguous", [*suggestion.ambiguous]),
        ("not matched", other_values),
        ("not used", [*suggestion.unused]),
    ):
        if names:
            lines.append(f"{title}: {join_names(names, max_names=MAX_LISTED)}")
    if suggestion.cast_to:
        lines.append(f"values are equal after a cast: --dtype {suggestion.cast_to}")
    lines.append(str(suggestion.path))
    fields = asdict(suggestion) | {"path": str(suggestion.path)}
    error: PrepError | None = None
    if not suggestion:
        names = list(suggestion.unmatched or suggestion.unused)
        verb = "has" if len(names) == 1 else "have"
        error = PrepError(
            f"the map {suggestion.path} is not complete",
            f"{join_names(names, max_names=MAX_LISTED)} {verb} no row",
            "write rows or `drop` lines for them",
        )
    return Report("\n".join(lines), fields, error=error)
