"""The plan of a training step as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from prepcli.commands.pages.charts import Bar, Curve, line_chart, stacked_bar
from prepcli.commands.pages.html_page import html_table, write_html_page
from prepcli.commands.pages.plan_rows import (
    CAVEAT,
    COLLECTIVE_HEADER,
    KIND_HEADER,
    CompiledStep,
    collective_rows,
    compiled_memory_rows,
    compiled_note,
    compiled_title,
    device_kind_rows,
    flops_table,
    title_lines,
    traffic_header,
    traffic_rows,
)
from prepcli.core.formatting import format_bytes
from trainer.planning.training_plan import KindEstimate, TrainingPlan

GIB = 1 << 30
# Context lengths of the curve, as multiples of the plan's.
LENGTH_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
MIN_LENGTH = 128

Replan = Callable[[Mapping[str, object]], TrainingPlan]


def write_plan_page(
    path: Path,
    name: str,
    plan: TrainingPlan,
    *,
    kinds: Sequence[KindEstimate],
    replan: Replan,
    advice: str,
    compiled: CompiledStep | None,
    settings: Sequence[str],
) -> None:
    """Write the page of a plan.

    Args:
        path: The HTML file.
        name: Name of the recipe or the checkpoint.
        plan: The plan.
        kinds: The step on each kind of accelerator to show. The memory of a single one is drawn
            as the limit.
        replan: Returns the plan with changed values of dotted recipe keys.
        advice: Sentence about fitting into memory, or an empty text.
        compiled: The compiled step, if it was compiled.
        settings: Sentences about the other settings of the recipe.

    Raises:
        PrepError: The file cannot be written.
    """
    lines = (*title_lines(plan), *settings)
    body = list(_page_body(name, plan, kinds, lines=lines, replan=replan, advice=advice))
    if compiled is not None:
        body += _compiled_section(compiled)
    write_html_page(path, f"prep plan {name}", body)


def _page_body(
    name: str,
    plan: TrainingPlan,
    kinds: Sequence[KindEstimate],
    *,
    lines: Sequence[str],
    replan: Replan,
    advice: str,
) -> Iterator[str]:
    """Yield the HTML elements of the page: memory, devices, operations and communication."""
    limit = None
    if len(kinds) == 1:
        limit = kinds[0]
    parts = _memory_parts(plan)
    yield f"<h1>Plan of {escape(name)}</h1>"
    for line in lines:
        yield f"<p>{escape(line)}</p>"
    if advice:
        yield f"<p>{escape(advice)}</p>"
    yield "<h2>Memory of one device</h2>"
    yield stacked_bar(parts, "memory of one device by part", limit=_limit_bar(limit))
    memory_rows = [(part.name, part.text) for part in parts]
    memory_rows.append(("peak", format_bytes(plan.memory.peak)))
    yield from html_table(["part", "bytes"], memory_rows)
    yield "<h2>Memory by context length</h2>"
    yield "<p>The peak in GiB by thousands of tokens per sequence.</p>"
    yield _context_chart(plan, limit, replan)
    yield "<h2>Devices</h2>"
    yield from html_table(KIND_HEADER, device_kind_rows(plan, kinds))
    yield "<h2>Operations of a step</h2>"
    unit, rows = flops_table(plan.flops)
    yield from html_table(["part", unit], rows)
    if plan.traffic:
        yield "<h2>Communication</h2>"
        yield from html_table(traffic_header(plan), traffic_rows(plan))
    yield f"<p>{escape(CAVEAT)}</p>"


def _compiled_section(step: CompiledStep) -> Iterator[str]:
    """Yield the elements of a compiled step."""
    yield f"<h2>The step {escape(compiled_title(step))}</h2>"
    yield from html_table(["memory of one device", ""], compiled_memory_rows(step))
    if step.plan.collectives:
        yield from html_table(COLLECTIVE_HEADER, collective_rows(step))
    yield f"<p>{escape(compiled_note(step))}</p>"


def _memory_parts(plan: TrainingPlan) -> list[Bar]:
    """Return the parts of the peak memory as bars of a chart."""
    memory = plan.memory
    # A layer and the head are never at work at the same time, so only the larger one counts.
    working_set = "one layer at work"
    if memory.head > memory.layer:
        working_set = "head and loss"
    parts = {
        "parameters": memory.parameters,
        "moments": memory.moments,
        "gradients and updates": memory.gradients,
        "saved activations": memory.saved,
        working_set: max(memory.head, memory.layer),
        "batch": memory.batch,
    }
    return [Bar(name, nbytes, format_bytes(nbytes)) for name, nbytes in parts.items()]


def _limit_bar(limit: KindEstimate | None) -> Bar | None:
    if limit is None:
        return None
    return Bar(limit.kind.name, limit.kind.memory_nbytes, format_bytes(limit.kind.memory_nbytes))


def _context_chart(plan: TrainingPlan, limit: KindEstimate | None, replan: Replan) -> str:
    """Draw the peak by context length, and the memory of the device."""
    seq_length = plan.inputs.seq_length
    # A set, because short plans give equal lengths: for 256 tokens the factors 0.125, 0.25 and 0.5 all give 128.
    lengths = sorted({max(MIN_LENGTH, int(seq_length * factor)) for factor in LENGTH_FACTORS})
    peaks = []
    for length in lengths:
        peak = replan({"data.seq_length": length}).memory.peak
        peaks.append((length / 1000, peak / GIB))
    curves = [Curve(name="peak", points=peaks, width=2.0)]
    if limit is not None:
        memory = limit.kind.memory_nbytes / GIB
        line = [(0.0, memory), (lengths[-1] / 1000, memory)]
        name = f"memory of {limit.kind.name}"
        curves.append(Curve(name=name, points=line, color=1, width=2.0))
    return line_chart(
        curves,
        "peak memory by context length",
        marks=[(seq_length / 1000, "this plan")],
        from_zero=True,
    )
