"""Training runs, evaluations, generated texts, tokens and recipes as text and JSON."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.compute_options import format_token_ids
from prepcli.core.formatting import count_text
from prepcli.core.tables import Cell, format_table

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


# --- Evaluations and generated texts


SCORES_HEADER = ("source", "loss", "perplexity", "accuracy", "tokens")


def evaluation_report(evaluation: Evaluation, columns: int | None) -> Report:
    """Return a line per source, one for all if there are several, and the metrics of generated targets."""
    rows = list(evaluation.sources.items())
    if len(rows) > 1:
        rows.append(("all", evaluation))
    cells: list[tuple[Cell, ...]] = []
    for name, scores in rows:
        numbers = ((scores.loss, ".6f"), (scores.perplexity, ",.4f"), (scores.accuracy, ".4f"))
        texts = ["not finite" if value is None else format(value, spec) for value, spec in numbers]
        cells.append((name, *texts, scores.tokens))
    lines = [format_table(cells, SCORES_HEADER, SCORES_HEADER[1:], columns)]
    for name, scores in evaluation.sources.items():
        for metric, value in scores.metrics.items():
            lines.append(f"{name}: {metric} {'none' if value is None else f'{value:.4f}'}")
    settings = ("checkpoint", "step", "mesh", "dtype", "reduction", "seq_length")
    fields = {
        **{name: getattr(evaluation, name) for name in settings},
        **_score_fields(evaluation),
        "sources": {name: _score_fields(scores) for name, scores in evaluation.sources.items()},
        "seconds": round(evaluation.compute_seconds, 3),
    }
    return Report("\n".join(lines), fields, process=evaluation.process)


def _score_fields(scores: EvaluationScores) -> dict[str, float | int | None]:
    """Return scores as JSON fields, with one field per metric."""
    names = ("loss", "perplexity", "accuracy", "tokens", "sequences")
    return {**{name: getattr(scores, name) for name in names}, **scores.metrics}


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
    fields = {"mesh": result.mesh, "dtype": result.dtype, "messages": result.messages}
    return Report("", {**fields, "tokens": result.num_tokens})


# --- Tokens


def tokenization_report(
    result: Tokenization, columns: int | None, *, shows_ids: bool = False
) -> Report:
    """Return one line per token store, and the JSON object. The samples and the table of their counts come first."""
    lines = [*_sample_lines(result.data, columns, shows_ids=shows_ids)]
    data: dict[str, dict[str, object]] = {}
    for part in result.data:
        line = str(part.path)
        if part.path is None:
            missing = count_text(part.missing_shards, "shard")
            line = f"{part.name}: {missing} of {part.shards:,} left to other processes"
            if not part.missing_shards:
                # A dry run
                line = f"{part.name}: no tokens are kept"
        lines.append(line)
        names = ("shards", "missing_shards", "tokens", "documents")
        data[part.name] = {"path": None if part.path is None else str(part.path)}
        data[part.name] |= {name: getattr(part, name) for name in names}
        if part.counts is not None:
            samples = [asdict(sample) for sample in part.samples]
            data[part.name] |= {"counts": asdict(part.counts), "samples": samples}
    fields = {
        "process": result.process,
        "complete": result.is_complete,
        "data": data,
        "seconds": round(result.seconds, 3),
    }
    # Only process 0 prints the report of a job. Here another process may have completed the tokens.
    process = None if result.is_complete else result.process
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


# --- Reports and recipes


def runs_report(result: RunsReport, columns: int | None) -> Report:
    """Return the table of the runs' main numbers."""
    from prepcli.commands.pages.report_page import summary_cells

    cells = [summary_cells(summary) for summary in result.runs]
    header = [*cells[0]]
    rows = [[name, *row.values()] for name, row in zip(result.names, cells)]
    table = format_table(rows, ["run", *header], right_aligned=header, width=columns)
    fields = {"output": str(result.path), "runs": result.runs, "changed_keys": result.changed_keys}
    return Report(table, fields)


def recipes_report(recipes: Sequence[ShippedRecipe], columns: int | None) -> Report:
    """Return the table of the recipes."""
    rows: list[tuple[str, ...]] = []
    entries: list[dict[str, object]] = []
    for recipe in recipes:
        name = recipe.path.stem
        rows.append((name, recipe.model, str(recipe.devices), recipe.summary))
        entries.append({"name": name, **asdict(recipe), "path": str(recipe.path)})
    header = ("recipe", "model", "devices", "summary")
    table = format_table(rows, header, width=columns, wrapped=["summary"])
    return Report(table, {"recipes": entries})


def recipe_report(path: Path) -> Report:
    """Return the text of a recipe."""
    text = path.read_text("utf-8")
    return Report(text.rstrip("\n"), {"name": path.stem, "path": str(path), "text": text})
