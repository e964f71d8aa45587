"""Training runs as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TypedDict

from prepcli.commands.pages.charts import SMALL, Curve, line_chart
from prepcli.commands.pages.html_page import Markup, chip, html_table, write_html_page
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.tables import Cell, Table
from trainer.run.run_record import RunRecord, SavedSample
from trainer.training.metrics import EVAL_PREFIX

# Heading of the chart of each metric.
CURVES = {
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
# Metrics of evaluations that count something, and have no chart.
COUNTS = ("eval_tokens",)
# Prefix of the metrics that count the tokens of a data source.
SOURCE_PREFIX = "tokens."
MAX_TITLE_NAMES = 3
DIGEST_DIGITS = 12
# Factor from the logged value to the unit of the heading.
SCALES = {"memory_bytes": 1 / (1 << 30)}
STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 1.5rem }
.charts .chart { width: 100% }
.charts h3 { margin: 1rem 0 .2rem; font-size: 1rem }
.scroll td { min-width: 4.5rem }
.scroll td + td:has(code) { overflow-wrap: anywhere }
.sample { white-space: pre-wrap; overflow-wrap: anywhere }
h3.sample { font-weight: normal; font-style: italic }
tr.changed { background: #f59e0b2e }
summary { cursor: pointer; padding: .4rem 0 }
"""


class RunSummary(TypedDict):
    """The main numbers of a run. Missing numbers are None."""

    run: str
    step: int
    steps: int | None
    tokens: int | None
    loss: float | None
    eval_loss: float | None
    best_eval_loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    skipped: int | None


def write_report_page(
    path: Path, runs: Sequence[RunRecord], summaries: Sequence[Mapping[str, str]]
) -> None:
    """Write the page of one or several runs. `summaries` has the cells of the table at the top, by column name.

    Raises:
        PrepError: The file cannot be written.
    """
    title = f"prep report {' '.join(run_names(runs))}"
    write_html_page(path, title, _page_body(runs, summaries), style=STYLE)


def run_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the name of each run: its folder's name, or its path or URL if two names are equal."""
    titles = [run.title for run in runs]
    if len({*titles}) < len(titles):
        return [run.name for run in runs]
    return titles


def summary_cells(summary: RunSummary) -> dict[str, str]:
    """Return the main numbers of a run as table cells, by column name. The cell of a missing number is `-`."""
    steps = f"{summary['step']:,}"
    if summary["steps"]:
        steps += f" / {summary['steps']:,}"
    return {
        "steps": steps,
        "tokens": _number_text(summary["tokens"], ",d"),
        "loss": _number_text(summary["loss"], ".4f"),
        "eval loss": _number_text(summary["eval_loss"], ".4f"),
        "best": _number_text(summary["best_eval_loss"], ".4f"),
        "tokens/s": _number_text(summary["tokens_per_s"], ",.0f"),
        "MFU": _number_text(summary["mfu"], ".1%"),
    }


def _number_text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def changed_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the recipe keys with different values. An absent key differs from every value."""
    keys = _all_keys(run.recipe for run in runs)
    # Recipes have their values as text here, so they are hashable, and an absent key gives None.
    return [key for key in keys if len({run.recipe.get(key) for run in runs}) > 1]


def _page_body(runs: Sequence[RunRecord], summaries: Sequence[Mapping[str, str]]) -> Iterator[str]:
    names = run_names(runs)
    labels = [_run_label(number, name) for number, name in enumerate(names)]
    heading = count_text(len(names), "run")
    if len(names) <= MAX_TITLE_NAMES:
        heading = ", ".join(names)
    yield f"<h1>{escape(heading)}</h1>"
    rows = [[label, *map(_cell_text, row.values())] for label, row in zip(labels, summaries)]
    yield from html_table(Table(["run", *summaries[0]], rows, right_aligned=[*summaries[0]]))
    yield "<h2>Curves</h2>"
    yield from _chart_sections(runs, names)
    yield from _samples_section(runs, labels)
    yield from _recipe_section(runs, labels)
    yield from _environment_section(runs, labels)
    yield "<h2>Checkpoints</h2>"
    saved_rows: list[list[Cell]] = []
    for label, run in zip(labels, runs):
        for saved in run.checkpoints:
            saved_rows.append([label, saved.step, format_bytes(saved.nbytes)])
    if saved_rows:
        yield from html_table(Table(["run", "step", "size"], saved_rows, right_aligned=["size"]))
    else:
        yield "<p>No step is saved.</p>"


def _chart_sections(runs: Sequence[RunRecord], names: Sequence[str]) -> Iterator[str]:
    """Yield a chart of each metric, all with the same x axis, and a table of the metrics that were logged once."""
    logged_steps: list[float] = []
    for run in runs:
        logged_steps += run.metrics.steps or ()
    single_values: list[list[str]] = []
    yield '<div class="charts">'
    for metric, heading in {**CURVES, **_other_headings(runs)}.items():
        scale = SCALES.get(metric, 1)
        curves: list[Curve] = []
        for number, run in enumerate(runs):
            points = [(step, value * scale) for step, value in run.metrics.points(metric)]
            if points:
                # A run keeps its colour in the charts of metrics that other runs did not log.
                curves.append(Curve(name=names[number], points=points, color=number))
        # A chart of one dot shows less than its number.
        if all(len(curve.points) == 1 for curve in curves):
            for curve in curves:
                ((step, value),) = curve.points
                label = _run_label(curve.color, curve.name)
                single_values.append([heading, label, f"{step:,.0f}", f"{value:.6g}"])
            continue
        svg = line_chart(
            curves,
            f"{heading} by step",
            size=SMALL,
            x_range=(min(logged_steps), max(logged_steps)),
            x_name="step",
            # The square before a run's name in the tables shows its colour.
            has_legend=False,
        )
        yield f"<section><h3>{escape(heading)}</h3>{svg}</section>"
    yield "</div>"
    if single_values:
        header = ("logged once", "run", "step", "value")
        yield from html_table(Table(header, single_values, right_aligned=header[2:]))


def _other_headings(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Return the headings of metrics outside CURVES, e.g. a user's `metric_fn` or a data source."""
    evaluations: dict[str, str] = {}
    sources: dict[str, str] = {}
    for metric in _all_keys(run.metrics.curves for run in runs):
        if metric in CURVES or metric in COUNTS:
            continue
        if metric.startswith(EVAL_PREFIX):
            name = metric.removeprefix(EVAL_PREFIX).replace("_", " ")
            evaluations[metric] = f"Evaluation {name}"
        elif metric.startswith(SOURCE_PREFIX):
            sources[metric] = f"Tokens of {metric.removeprefix(SOURCE_PREFIX)}"
    return {**evaluations, **sources}


def _samples_section(runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterator[str]:
    """Yield the last text of each run for each prompt, and a folded table of all texts."""
    # The prompts of all runs, each once, in the order of the first run that has it.
    prompts: dict[str, None] = {}
    for run in runs:
        prompts |= dict.fromkeys(sample.prompt for sample in run.samples)
    if prompts:
        yield "<h2>Samples</h2>"
    for prompt in prompts:
        samples: list[list[SavedSample]] = []
        for run in runs:
            samples.append([sample for sample in run.samples if sample.prompt == prompt])
        last_samples = [run_samples[-1:] for run_samples in samples]
        yield f'<h3 class="sample">{escape(prompt)}</h3>'
        yield from _sample_table(last_samples, labels)
        if samples == last_samples:
            continue
        # A run with many texts keeps evenly spaced ones, so fewer may be shown than were logged.
        num_shown = sum(map(len, samples))
        num_logged = sum(run.sample_counts.get(prompt, 0) for run in runs)
        quantity = f"{num_shown:,} of {num_logged:,}"
        if num_shown == num_logged:
            quantity = f"All {num_logged:,}"
        yield f"<details><summary>{quantity} texts</summary>"
        yield from _sample_table(samples, labels)
        yield "</details>"


def _sample_table(samples: Sequence[Sequence[SavedSample]], labels: Sequence[str]) -> Iterator[str]:
    """Yield a table of the samples of each run."""
    rows: list[list[Cell]] = []
    for label, run_samples in zip(labels, samples):
        for sample in run_samples:
            text = Markup(f'<span class="sample">{escape(sample.text)}</span>')
            rows.append([label, sample.step, text])
    yield from html_table(Table(["run", "step", "text"], rows))


def _recipe_section(runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterator[str]:
    """Yield the keys that differ between recipes, and the complete recipes."""
    header = ["key", "value"]
    changed: list[str] = []
    yield "<h2>Recipe</h2>"
    if len(runs) > 1:
        header = ["key", *labels]
        changed = changed_keys(runs)
        if changed:
            yield f"<p>{count_text(len(changed), 'key differs', 'keys differ')}.</p>"
            yield from html_table(Table(header, _recipe_rows(runs, changed)))
        else:
            yield "<p>No key differs.</p>"
    keys = _all_keys(run.recipe for run in runs)
    highlighted = {keys.index(key) for key in changed}
    yield f"<details><summary>All {count_text(len(keys), 'key')}</summary>"
    yield from html_table(Table(header, _recipe_rows(runs, keys)), highlighted=highlighted)
    yield "</details>"


def _recipe_rows(runs: Sequence[RunRecord], keys: Iterable[str]) -> list[list[str]]:
    rows: list[list[str]] = []
    for key in keys:
        values = [_code_element(run.recipe.get(key, "")) for run in runs]
        rows.append([_code_element(key), *values])
    return rows


def _environment_section(runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterator[str]:
    """Yield the data, the machine and the versions of each run."""
    data = [run.table("data") for run in runs]
    for number, table in enumerate(data):
        if "digest" in table:
            data[number] = {**table, "digest": str(table["digest"])[:DIGEST_DIGITS]}
    machines: list[dict[str, object]] = []
    for run in runs:
        # The data and the versions have separate tables.
        facts = run.environment.items()
        machines.append({key: value for key, value in facts if key not in ("data", "versions")})
    yield from _value_table("Data", data, labels)
    yield from _value_table("Environment", machines, labels)
    yield from _value_table("Versions", [run.table("versions") for run in runs], labels)


def _value_table(
    heading: str, tables: Sequence[Mapping[str, object]], labels: Sequence[str]
) -> Iterator[str]:
    """Yield a table with one row per key and one column per run. Differences are highlighted."""
    yield f"<h2>{heading}</h2>"
    keys = _all_keys(tables)
    if not keys:
        yield "<p>Not recorded.</p>"
        return
    header = ["", *labels] if len(tables) > 1 else ["", ""]
    rows: list[list[str]] = []
    highlighted: set[int] = set()
    for number, key in enumerate(keys):
        cells = [_cell_text(table.get(key)) for table in tables]
        rows.append([key.replace("_", " "), *cells])
        if len({*cells}) > 1:
            highlighted.add(number)
    yield from html_table(Table(header, rows), highlighted=highlighted)


def _all_keys(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the keys of all mappings once, in the order in which they appear."""
    keys: dict[str, None] = {}
    for mapping in mappings:
        keys.update(dict.fromkeys(mapping))
    return list(keys)


def _run_label(number: int, name: str) -> str:
    """Return the HTML of a run's name, preceded by a square in the colour of the run."""
    return Markup(chip(number) + escape(name))


def _code_element(text: str) -> str:
    return Markup(f"<code>{escape(text)}</code>") if text else ""


def _cell_text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)
