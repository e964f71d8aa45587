"""Training runs, evaluations, generated texts, tokens and recipes as text and JSON."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.compute_options import format_token_ids
from prepcli.core.counts import count_text
from prepcli.core.tables import format_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from prepcli.commands.operations.chat import ChatResult
    from prepcli.commands.operations.recipes import ShippedRecipe
    from prepcli.commands.operations.results import (
        Evaluation,
        EvaluationScores,
        Generation,
        RunsReport,
        Tokenization,
        TokenizedData,
        TrainingRun,
    )


def training_report(run: TrainingRun) -> Report:
    """Return the text, the JSON object and the next command of a run.

    A run that was stopped has an error, with the exit code of its cause.
    """
    fields = dict(run.details)
    if "dry_run" in fields:
        text = f"would train to step {fields['steps']} in {fields['run']}"
        return Report(text, fields, process=run.process)
    if run.error is not None:
        return Report(fields=fields, error=run.error, process=run.process)
    next_command = f"prep export {shlex.quote(str(fields['run']))}"
    return Report(fields["output"] or "", fields, next_command, process=run.process)


def schema_report() -> Report:
    """Return the JSON schema of recipes."""
    from trainer.recipe import schema

    return Report(json.dumps(schema(), indent=2))


# --- The scores of an evaluation as text and JSON


HEADER = ("source", "loss", "perplexity", "accuracy", "tokens")
NOT_FINITE = "not finite"


def evaluation_report(evaluation: Evaluation, columns: int | None) -> Report:
    """Return the text and the JSON object of an evaluation."""
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


# --- Generated texts as text and JSON


def generation_report(generation: Generation) -> Report:
    """Return one line per prompt, its text or its token ids, and the JSON object."""
    texts = [text for text in generation.texts if text is not None]
    lines = texts or [format_token_ids(ids) for ids in generation.tokens]
    fields = {
        "mesh": generation.mesh,
        "dtype": generation.dtype,
        "prompts": generation.prompts,
        "prompt_tokens": generation.prompt_tokens,
        "texts": texts or None,
        "tokens": generation.tokens,
        "ended": generation.ended,
        "tokens_per_s": generation.tokens_per_s,
        "compile_seconds": round(generation.compile_seconds, 3),
    }
    return Report("\n".join(lines), fields, process=generation.process)


def chat_report(result: ChatResult) -> Report:
    """Return the JSON object of a conversation. Its text was printed answer by answer."""
    fields = {
        "mesh": result.mesh,
        "dtype": result.dtype,
        "messages": result.messages,
        "tokens": result.num_tokens,
    }
    return Report("", fields)


# --- The tokens of a recipe as text and JSON


def tokenization_report(
    result: Tokenization, columns: int | None, *, shows_ids: bool = False
) -> Report:
    """Return one line per token store, and the JSON object. The samples and the table of their counts come first."""
    fields = {
        "process": result.process,
        "complete": result.is_complete,
        "data": {part.name: _data_fields(part) for part in result.data},
        "seconds": round(result.seconds, 3),
    }
    lines = [*_sample_lines(result.data, columns, shows_ids=shows_ids)]
    lines += [_data_line(part) for part in result.data]
    # Only process 0 prints the report of a job. Here another process may have completed the tokens.
    process = result.process
    if result.is_complete:
        process = None
    return Report("\n".join(lines), fields, process=process, has_marks=True)


def _sample_lines(
    data: Sequence[TokenizedData], columns: int | None, *, shows_ids: bool
) -> Iterator[str]:
    """Yield the samples of each source, and the table of all counts. Nothing if they were not read."""
    from trainer.data.sample_text import counts_table, sample_lines, sample_title

    counts = {part.name: part.counts for part in data if part.counts is not None}
    if not counts:
        return
    for part in data:
        for number, sample in enumerate(part.samples, 1):
            yield f"--- {sample_title(part.name, number, sample)}"
            yield from sample_lines(sample, shows_ids=shows_ids, width=columns)
            yield ""
    yield counts_table(counts, columns)
    yield ""


def _data_fields(part: TokenizedData) -> dict[str, object]:
    fields: dict[str, object] = {
        "path": None if part.path is None else str(part.path),
        "shards": part.shards,
        "missing_shards": part.missing_shards,
        "tokens": part.tokens,
        "documents": part.documents,
    }
    if part.counts is not None:
        fields["counts"] = asdict(part.counts)
        fields["samples"] = [asdict(sample) for sample in part.samples]
    return fields


def _data_line(part: TokenizedData) -> str:
    """Return the output of a store, the number of its missing shards, or that a dry run keeps no tokens."""
    if part.path is None and not part.missing_shards:
        return f"{part.name}: no tokens are kept"
    if part.path is None:
        missing = count_text(part.missing_shards, "shard")
        return f"{part.name}: {missing} of {part.shards:,} left to other processes"
    return str(part.path)


# --- Reports on training runs as text and JSON


def runs_report(result: RunsReport, columns: int | None) -> Report:
    """Return the table of the runs' main numbers."""
    from prepcli.commands.pages.report_page import summary_cells

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


# --- Shipped recipes as text and JSON


def recipes_report(recipes: Sequence[ShippedRecipe], columns: int | None) -> Report:
    """Return the table of the recipes."""
    rows: list[tuple[str, ...]] = []
    entries: list[dict[str, object]] = []
    for recipe in recipes:
        name = recipe.path.stem
        rows.append((name, recipe.model, str(recipe.devices), recipe.summary))
        entries.append(
            {
                "name": name,
                "path": str(recipe.path),
                "summary": recipe.summary,
                "model": recipe.model,
                "devices": recipe.devices,
            }
        )
    header = ("recipe", "model", "devices", "summary")
    table = format_table(rows, header, width=columns, wrapped=["summary"])
    return Report(table, {"recipes": entries})


def recipe_report(path: Path) -> Report:
    """Return the text of a recipe."""
    text = path.read_text("utf-8")
    return Report(text.rstrip("\n"), {"name": path.stem, "path": str(path), "text": text})


def copy_report(name: str, copy: Path) -> Report:
    """Return the path of the copy of a recipe."""
    return Report(str(copy), {"name": name, "path": str(copy)})
