"""Training runs as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from prepcli.console.formatting import count_text, format_bytes
from prepcli.inspection.html_page import write_html_page
from prepcli.inspection.run_chart import CHART_STYLE, RunCurve, color_of, run_chart
from prepcli.inspection.run_record import RunRecord, SavedSample
from trainer.training.metrics import EVAL_PREFIX

CURVES = {  # metric -> heading
    "loss": "Training loss",
    "z_loss": "Z-loss",
    "eval_loss": "Evaluation loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_s": "Tokens per second",
    "mfu": "Model FLOPs utilization",
    "memory_bytes": "Peak memory per device, GiB",
    "eval_accuracy": "Evaluation accuracy",
}
COUNTS = ("eval_tokens",)  # numbers of evaluations without a chart
SOURCE_PREFIX = "tokens."  # of the tokens of each data source
MAX_TITLE_NAMES = 3
DIGEST_DIGITS = 12
SCALES = {"memory_bytes": 1 / (1 << 30)}
STYLE = (
    CHART_STYLE
    + """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 1.5rem }
.charts h3 { margin: 1rem 0 .2rem; font-size: 1rem }
.chip { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin-right: .4em }
.scroll { overflow-x: auto }
.scroll td { min-width: 4.5rem }
.scroll td + td:has(code) { overflow-wrap: anywhere }
.sample { white-space: pre-wrap; overflow-wrap: anywhere }
h3.sample { font-weight: normal; font-style: italic }
tr.changed { background: #f59e0b2e }
summary { cursor: pointer; padding: .4rem 0 }
"""
)


def write_report_page(path: Path, runs: Sequence[RunRecord], summaries: Sequence[Mapping[str, Any]]) -> None:
    """Write the page of runs.

    Args:
        path: The HTML file.
        runs: The runs.
        summaries: The values of each run in the table at the top, as text by column.

    Raises:
        PrepError: The file cannot be written.
    """
    title = f"prep report {' '.join(run_names(runs))}"
    write_html_page(path, title, _body(runs, summaries), style=STYLE)


def run_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return a name for each run: that of its folder, or its path or URL if two folders have the same."""
    titles = [run.title for run in runs]
    return titles if len({*titles}) == len(titles) else [run.name for run in runs]


def changed_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the recipe keys whose values differ between runs; an absent key has a value of its own."""
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    return [key for key in keys if len({run.recipe.get(key) for run in runs}) > 1]


def _body(runs: Sequence[RunRecord], summaries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = run_names(runs)
    yield f"<h1>{escape(', '.join(names) if len(names) <= MAX_TITLE_NAMES else f'{len(names)} runs')}</h1>"
    yield from _table(
        ["run", *summaries[0]],
        [[_named(n, name), *map(_cell, row.values())] for n, (name, row) in enumerate(zip(names, summaries))],
    )
    yield "<h2>Curves</h2>"
    yield from _charts(runs, names)
    yield from _samples_section(runs, names)
    yield from _recipe_section(runs, names)
    yield from _environment_section(runs, names)
    yield "<h2>Checkpoints</h2>"
    rows = [
        [_named(n, names[n]), f"{saved.step:,}", format_bytes(saved.nbytes)]
        for n, run in enumerate(runs)
        for saved in run.checkpoints
    ]
    yield from _table(["run", "step", "size"], rows) if rows else ["<p>No step is saved.</p>"]


def _charts(runs: Sequence[RunRecord], names: Sequence[str]) -> Iterator[str]:
    """Yield a chart of each metric, all with the same x axis."""
    yield '<div class="charts">'
    logged_steps = [step for run in runs for step in run.metrics.steps or ()]
    for metric, heading in {**CURVES, **_further_curves(runs)}.items():
        scale = SCALES.get(metric, 1)
        points = [[(step, value * scale) for step, value in run.metrics.points(metric)] for run in runs]
        curves = [RunCurve(names[n], n, values) for n, values in enumerate(points) if values]
        if curves:
            svg = run_chart(curves, f"{heading} by step", (min(logged_steps), max(logged_steps)))
            yield f"<section><h3>{escape(heading)}</h3>{svg}</section>"
    yield "</div>"


def _further_curves(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Return the headings of the other values of evaluations, such as those of `metric_fn`, and of data sources."""
    names = dict.fromkeys(name for run in runs for name in run.metrics.curves)
    values = [name for name in names if name.startswith(EVAL_PREFIX) and name not in {*CURVES, *COUNTS}]
    sources = [name for name in names if name.startswith(SOURCE_PREFIX)]
    return {
        **{name: f"Evaluation {name.removeprefix(EVAL_PREFIX).replace('_', ' ')}" for name in values},
        **{name: f"Tokens of {name.removeprefix(SOURCE_PREFIX)}" for name in sources},
    }


def _samples_section(runs: Sequence[RunRecord], names: Sequence[str]) -> Iterator[str]:
    """Yield for each prompt the last text of each run, and a folded table of the texts of all steps."""
    prompts = dict.fromkeys(sample.prompt for run in runs for sample in run.samples)
    if prompts:
        yield "<h2>Samples</h2>"
    for prompt in prompts:
        yield f'<h3 class="sample">{escape(prompt)}</h3>'
        texts = [[sample for sample in run.samples if sample.prompt == prompt] for run in runs]
        last = [samples[-1:] for samples in texts]
        yield from _sample_table(last, names)
        if texts != last:
            shown = sum(map(len, texts))
            count = sum(run.sample_counts.get(prompt, 0) for run in runs)
            quantity = f"All {count:,}" if shown == count else f"{shown:,} of {count:,}"
            yield f"<details><summary>{quantity} texts</summary>"
            yield from _sample_table(texts, names)
            yield "</details>"


def _sample_table(samples: Sequence[Sequence[SavedSample]], names: Sequence[str]) -> Iterator[str]:
    """Yield a table of the samples of each run."""
    yield from _table(
        ["run", "step", "text"],
        [
            [_named(n, names[n]), f"{sample.step:,}", f'<span class="sample">{escape(sample.text)}</span>']
            for n, run_samples in enumerate(samples)
            for sample in run_samples
        ],
    )


def _recipe_section(runs: Sequence[RunRecord], names: Sequence[str]) -> Iterator[str]:
    """Yield the differences of the recipes, and the complete recipes with differences highlighted."""
    yield "<h2>Recipe</h2>"
    changed = changed_keys(runs)
    header = ["key", *(_named(n, name) for n, name in enumerate(names))] if len(runs) > 1 else ["key", "value"]
    if len(runs) > 1:
        yield f"<p>{count_text(len(changed), 'key differs', 'keys differ') if changed else 'No key differs'}.</p>"
        yield from _table(header, _recipe_rows(runs, changed)) if changed else ()
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    yield f"<details><summary>All {len(keys)} keys</summary>"
    yield from _table(header, _recipe_rows(runs, keys), highlighted=changed)
    yield "</details>"


def _recipe_rows(runs: Sequence[RunRecord], keys: Iterable[str]) -> list[list[str]]:
    return [[_code(key), *(_code(run.recipe.get(key, "")) for run in runs)] for key in keys]


def _environment_section(runs: Sequence[RunRecord], names: Sequence[str]) -> Iterator[str]:
    """Yield the data, the machine and the versions of each run."""
    data, versions = ([run.table(name) for run in runs] for name in ("data", "versions"))
    nested = ("data", "versions")
    data = [{**table, "digest": str(table["digest"])[:DIGEST_DIGITS]} if "digest" in table else table for table in data]
    machine = [{key: value for key, value in run.environment.items() if key not in nested} for run in runs]
    for heading, tables in (("Data", data), ("Environment", machine), ("Versions", versions)):
        keys = dict.fromkeys(key for table in tables for key in table)
        yield f"<h2>{heading}</h2>"
        if not keys:
            yield "<p>Not recorded.</p>"
            continue
        rows = [[escape(key.replace("_", " ")), *(_cell(table.get(key)) for table in tables)] for key in keys]
        header = [_named(n, name) for n, name in enumerate(names)] if len(runs) > 1 else [""]
        yield from _table(["", *header], rows, highlighted=_differing(rows) if len(runs) > 1 else ())


def _differing(rows: Iterable[Sequence[str]]) -> list[str]:
    return [first for first, *values in rows if len({*values}) > 1]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, highlighted: Iterable[str] = ()) -> Iterator[str]:
    """Yield a table of HTML cells that scrolls on narrow screens.

    Args:
        header: Names of the columns.
        rows: The cells.
        highlighted: First cells of the rows to highlight, as text or as code.
    """
    marked = {*highlighted} | {_code(key) for key in highlighted}
    yield '<div class="scroll"><table><tr>' + "".join(f"<th>{cell}</th>" for cell in header) + "</tr>"
    for row in rows:
        kind = ' class="changed"' if row[0] in marked else ""
        yield f"<tr{kind}>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    yield "</table></div>"


def _named(number: int, name: str) -> str:
    return f'<span class="chip" style="background:{color_of(number)}"></span>{escape(name)}'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>" if text else ""


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
