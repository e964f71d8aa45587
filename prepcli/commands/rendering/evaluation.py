"""The scores of an evaluation as text and JSON."""

from __future__ import annotations

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.results import Evaluation, EvaluationScores
from prepcli.core.tables import format_table

HEADER = ("source", "loss", "perplexity", "accuracy", "tokens")
NOT_FINITE = "not finite"


def evaluation_report(evaluation: Evaluation, columns: int | None) -> Report:
    """Return the text and the JSON object of an evaluation.

    Args:
        evaluation: Result of the operation.
        columns: Width of the terminal. None for a pipe.
    """
    fields = {
        "checkpoint": evaluation.checkpoint,
        "step": evaluation.step,
        "mesh": evaluation.mesh,
        "dtype": evaluation.dtype,
        "reduction": evaluation.reduction,
        "seq_length": evaluation.seq_length,
        **_score_fields(evaluation),
        "sources": {name: _score_fields(scores) for name, scores in evaluation.sources.items()},
        "seconds": round(evaluation.compute_seconds, 3),
    }
    return Report(_evaluation_table(evaluation, columns), fields, process=evaluation.process)


def _score_fields(scores: EvaluationScores) -> dict[str, float | int | None]:
    """Return scores as JSON fields: loss, perplexity, accuracy, counts, and one field per metric."""
    return {
        "loss": scores.loss,
        "perplexity": scores.perplexity,
        "accuracy": scores.accuracy,
        "tokens": scores.tokens,
        "sequences": scores.sequences,
        **scores.metrics,
    }


def _evaluation_table(evaluation: Evaluation, columns: int | None) -> str:
    """Return one line per source, one for all if there are several, and the metrics of generated targets."""
    rows = list(evaluation.sources.items())
    if len(rows) > 1:
        rows.append(("all", evaluation))
    cells = [
        (
            name,
            _format_number(scores.loss, ".6f"),
            _format_number(scores.perplexity, ",.4f"),
            _format_number(scores.accuracy, ".4f"),
            scores.tokens,
        )
        for name, scores in rows
    ]
    lines = [format_table(cells, HEADER, right_aligned=HEADER[1:], width=columns)]
    for name, scores in evaluation.sources.items():
        for metric, value in scores.metrics.items():
            lines.append(f"{name}: {metric} {'none' if value is None else f'{value:.4f}'}")
    return "\n".join(lines)


def _format_number(value: float | None, spec: str) -> str:
    return NOT_FINITE if value is None else format(value, spec)
