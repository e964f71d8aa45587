"""Comparisons of the logits of two models as text and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.verification_results import LogitComparison
from prepcli.core.errors import PrepError
from prepcli.core.tables import format_table

HEADER = ("prompt", "KL mean", "KL max", "top 1", "top 5", "logits", "parts at")


def logits_report(comparison: LogitComparison, columns: int | None) -> Report:
    """Return the table and the JSON object of a comparison. It has an error if a logit differs too much.

    Args:
        comparison: Result of the operation.
        columns: Width of the terminal. None for a pipe.
    """
    largest = max(prompt.max_difference for prompt in comparison.prompts)
    error = None
    lines = [_table(comparison, columns)]
    limit = f"the tolerance is {comparison.tolerance:g}"
    if comparison:
        lines.append(f"ok: largest difference {largest:.3g}, {limit} ({comparison.seconds:.1f} s)")
    else:
        second = comparison.against
        if comparison.library != "prep":
            second = f"{second} in {comparison.library}"
        what = f"{comparison.checkpoint} does not compute the logits of {second}"
        hint = "the last column names the first layer with another result"
        if not any(prompt.layer_differences for prompt in comparison.prompts):
            hint = "compare models with the same layers to find the first one with another result"
        error = PrepError(what, f"they differ by up to {largest:.3g}, {limit}", hint)
    return Report("\n".join(lines), _fields(comparison), error=error)


def _fields(comparison: LogitComparison) -> dict[str, object]:
    """Return the fields for JSON. Infinity is no JSON number: it becomes null."""
    prompts: list[dict[str, object]] = []
    for prompt in comparison.prompts:
        entry = asdict(prompt)
        for name in ("kl_mean", "kl_max", "max_difference"):
            entry[name] = _finite_or_none(entry[name])
        entry["layer_differences"] = list(map(_finite_or_none, prompt.layer_differences))
        prompts.append(entry)
    return {
        "checkpoint": comparison.checkpoint,
        "against": comparison.against,
        "library": comparison.library,
        "tolerance": _finite_or_none(comparison.tolerance),
        "equal": comparison.is_equal,
        "prompts": prompts,
    }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _table(comparison: LogitComparison, columns: int | None) -> str:
    rows: list[tuple[str, ...]] = []
    for prompt in comparison.prompts:
        parts_at = prompt.parts_at or "nowhere"
        if not prompt.layer_differences:
            parts_at = "other layers"
        rows.append(
            (
                prompt.name,
                f"{prompt.kl_mean:.2g}",
                f"{prompt.kl_max:.2g}",
                f"{prompt.top1_agreement:.2%}",
                f"{prompt.top5_overlap:.2%}",
                f"{prompt.max_difference:.2g}",
                parts_at,
            )
        )
    return format_table(rows, HEADER, right_aligned=HEADER[1:-1], width=columns)
