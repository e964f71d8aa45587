"""Training runs, evaluations, generated texts, tokens, recipes, jobs, and the environment as text and JSON."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.operations.compute_options import format_token_ids
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.json_values import json_fields
from prepcli.core.tables import Block, Cell, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from prepcli.commands.operations.about import DocsPage, Environment
    from prepcli.commands.operations.chat import ChatResult
    from prepcli.commands.operations.launch import LaunchedScript, LocalJob
    from prepcli.commands.operations.recipes import ShippedRecipe
    from prepcli.commands.operations.run_results import (
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
        if run.is_finished:
            text = f"would train no step: {fields['run']} is finished"
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


def evaluation_report(evaluation: Evaluation) -> Report:
    """Return a line per source, one for all if there are several, and the metrics of generated targets."""
    rows = list(evaluation.sources.items())
    if len(rows) > 1:
        rows.append(("all", evaluation))
    cells: list[tuple[Cell, ...]] = []
    for name, scores in rows:
        numbers = ((scores.loss, ".6f"), (scores.perplexity, ",.4f"), (scores.accuracy, ".4f"))
        texts = ["not finite" if value is None else format(value, spec) for value, spec in numbers]
        cells.append((name, *texts, scores.tokens))
    blocks: list[Block] = [Table(SCORES_HEADER, cells, SCORES_HEADER[1:])]
    for name, scores in evaluation.sources.items():
        for metric, value in scores.metrics.items():
            blocks.append(f"{name}: {metric} {'none' if value is None else f'{value:.4f}'}")
    settings = ("checkpoint", "step", "mesh", "dtype", "reduction", "seq_length")
    fields = {
        **json_fields(evaluation, *settings),
        **_score_fields(evaluation),
        "sources": {name: _score_fields(scores) for name, scores in evaluation.sources.items()},
        "seconds": round(evaluation.compute_seconds, 3),
    }
    return Report(blocks, fields, process=evaluation.process)


def _score_fields(scores: EvaluationScores) -> dict[str, float | int | None]:
    """Return scores as JSON fields, with one field per metric."""
    names = ("loss", "perplexity", "accuracy", "tokens", "sequences")
    return {**json_fields(scores, *names), **scores.metrics}


def generation_report(generation: Generation) -> Report:
    """Return one line per prompt, its text or its token ids, and the JSON object."""
    texts = [text for text in generation.texts if text is not None]
    lines = texts or [format_token_ids(ids) for ids in generation.tokens]
    names = (
        "mesh",
        "dtype",
        "prompts",
        "prompt_tokens",
        "texts",
        "tokens",
        "ended",
        "tokens_per_s",
    )
    fields = json_fields(generation, *names)
    fields |= {"texts": texts or None, "compile_seconds": round(generation.compile_seconds, 3)}
    return Report(lines, fields, process=generation.process)


def chat_report(result: ChatResult) -> Report:
    """Return the JSON object of a conversation. Its text was printed answer by answer."""
    fields = json_fields(result, "mesh", "dtype", "messages")
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
        names = ("path", "shards", "missing_shards", "tokens", "documents")
        if part.counts is not None:
            names += ("counts", "samples")
        data[part.name] = json_fields(part, *names)
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


def runs_report(result: RunsReport) -> Report:
    """Return the table of the runs' main numbers."""
    from prepcli.commands.pages.report_page import summary_cells

    cells = [summary_cells(summary) for summary in result.runs]
    header = [*cells[0]]
    rows = [[name, *row.values()] for name, row in zip(result.names, cells)]
    fields = {"output": result.path, **json_fields(result, "runs", "changed_keys")}
    return Report([Table(["run", *header], rows, right_aligned=header)], fields)


def recipes_report(recipes: Sequence[ShippedRecipe]) -> Report:
    """Return the table of the recipes."""
    rows: list[tuple[str, ...]] = []
    entries: list[dict[str, object]] = []
    for recipe in recipes:
        name = recipe.path.stem
        rows.append((name, recipe.model, str(recipe.devices), recipe.summary))
        entries.append({"name": name, **json_fields(recipe)})
    table = Table(("recipe", "model", "devices", "summary"), rows, wrapped=["summary"])
    return Report([table], {"recipes": entries})


def recipe_report(path: Path) -> Report:
    """Return the text of a recipe."""
    text = path.read_text("utf-8")
    return Report(text.rstrip("\n"), {"name": path.stem, "path": str(path), "text": text})


# --- The environment


def environment_report(environment: Environment) -> Report:
    """Return a table for each topic."""
    versions = dict(environment.system)
    for name, version in environment.versions.items():
        versions[name] = version or "not installed"
    devices = environment.devices
    if devices is None:
        devices = {"not listed": "`prep env --devices` imports jax"}
    processes: dict[str, str] = {}
    for name, value in environment.processes.items():
        processes[name] = "-" if value is None else str(value)
    memory: dict[str, str] = {}
    for name, size in environment.memory.items():
        memory[name] = "none" if size is None else format_bytes(size)
    settings = [(setting.name, setting.value, setting.source) for setting in environment.settings]
    topics = {
        "versions": versions,
        "devices": devices,
        "processes": processes,
        "memory": memory,
    }
    blocks: list[Block] = []
    for title, values in topics.items():
        blocks += [Table([title, ""], [*values.items()], wrapped=[""]), ""]
    blocks.append(Table(["settings", "", "set by"], settings, wrapped=[""]))
    fields = {
        **environment.system,
        **json_fields(environment, "versions", "devices", "processes"),
        "memory": {name.replace(" ", "_"): size for name, size in environment.memory.items()},
        "settings": environment.settings,
    }
    return Report(blocks, fields)


# --- Pages of the documentation


def page_report(path: Path, ui: Ui, *, path_only: bool) -> Report:
    """Return the text of a page."""
    text = path.read_text("utf-8")
    fields = {"name": path.stem, "path": str(path), "text": text}
    if path_only:
        return Report(str(path), fields)
    ui.note(str(path))
    return Report(text.rstrip("\n"), fields)


def pages_report(pages: Sequence[DocsPage], folder: Path, *, path_only: bool) -> Report:
    """Return the table of the pages."""
    rows: list[tuple[str, str, str]] = []
    entries: list[dict[str, str]] = []
    for page in pages:
        name = page.path.stem
        rows.append((name, page.section, page.title))
        entries.append({"name": name, "path": str(page.path), "title": page.title})
    fields = {"path": str(folder), "pages": entries}
    if path_only:
        return Report(str(folder), fields)
    return Report([Table(("page", "section", "title"), rows, wrapped=("title",))], fields)


# --- Launched jobs


def script_report(launched: LaunchedScript) -> Report:
    """Return the report of a script: the reply to its submission, its file, or its text."""
    fields = {**json_fields(launched, "target", "script"), "output": launched.out}
    if launched.reply is not None:
        return Report(launched.reply, fields)
    if launched.out is not None:
        from prepcli.commands.operations.launch import submit_line

        next_command = submit_line(launched.target, launched.out)
        return Report(str(launched.out), fields, next_command)
    return Report(launched.script.rstrip("\n"), fields, is_script=True)


def local_report(job: LocalJob) -> Report:
    """Return the report of a job on this machine."""
    fields = {"target": "local", **json_fields(job, "processes", "devices")}
    return Report(job.result.rstrip("\n"), fields)
