"""The plan of a training step as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from prepcli.commands.compiled_report import (
    COLLECTIVE_HEADER,
    CompiledStep,
    caveat,
    collective_rows,
    memory_rows,
    title,
)
from prepcli.commands.plan_report import (
    CAVEAT,
    KIND_HEADER,
    flops_rows,
    kind_rows,
    title_lines,
    traffic_header,
    traffic_rows,
)
from prepcli.console.formatting import format_bytes
from prepcli.demo.svg import Bar, Curve, line_chart, stacked_bar
from prepcli.inspection.html_page import html_table, write_html_page
from trainer.planning.training_plan import KindEstimate, TrainingPlan

GIB = 1 << 30
LENGTH_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # context lengths of the curve, as multiples of the plan's
MIN_LENGTH = 128

Replan = Callable[[Mapping[str, Any]], TrainingPlan]


def write_plan_page(
    path: Path,
    name: str,
    plan: TrainingPlan,
    *,
    kinds: Sequence[KindEstimate],
    replan: Replan,
    advice: str,
    compiled: CompiledStep | None,
) -> None:
    """Write the page of a plan.

    Args:
        path: The HTML file.
        name: Name of the recipe or the checkpoint.
        plan: The plan.
        kinds: The step on each kind of accelerator to show; the memory of a single one is drawn as the limit.
        replan: Returns the plan with other values of dotted keys.
        advice: Sentence about fitting into memory; empty for none.
        compiled: The compiled step; None if it was not compiled.

    Raises:
        PrepError: The file cannot be written.
    """
    body = (*_body(name, plan, kinds, replan=replan, advice=advice), *(_compiled_section(compiled) if compiled else ()))
    write_html_page(path, f"prep plan {name}", body)


def _body(
    name: str, plan: TrainingPlan, kinds: Sequence[KindEstimate], *, replan: Replan, advice: str
) -> Iterator[str]:
    """Yield the elements of the estimates."""
    limit = kinds[0] if len(kinds) == 1 else None
    yield f"<h1>Plan of {escape(name)}</h1>"
    yield from (f"<p>{escape(line)}</p>" for line in (*title_lines(plan), *filter(None, [advice])))
    yield "<h2>Memory of one device</h2>"
    yield stacked_bar(_memory_parts(plan), _limit_bar(limit), title="memory of one device by part")
    yield from html_table(["part", "bytes"], [(part.name, part.text) for part in [*_memory_parts(plan), _peak(plan)]])
    yield "<h2>Memory by context length</h2><p>The peak in GiB by thousands of tokens per sequence.</p>"
    yield _context_chart(plan, limit, replan)
    yield "<h2>Devices</h2>"
    yield from html_table(KIND_HEADER, kind_rows(plan, kinds))
    yield "<h2>Operations of a step</h2>"
    yield from html_table(["part", "PFLOP"], flops_rows(plan.flops))
    if plan.traffic:
        yield "<h2>Communication</h2>"
        yield from html_table(traffic_header(plan), traffic_rows(plan))
    yield f"<p>{escape(CAVEAT)}</p>"


def _compiled_section(step: CompiledStep) -> Iterator[str]:
    """Yield the elements of a compiled step."""
    yield f"<h2>The step {escape(title(step))}</h2>"
    yield from html_table(["memory of one device", ""], memory_rows(step))
    if step.plan.collectives:
        yield from html_table(COLLECTIVE_HEADER, collective_rows(step))
    yield f"<p>{escape(caveat(step))}</p>"


def _memory_parts(plan: TrainingPlan) -> list[Bar]:
    """Return the parts of the peak."""
    memory = plan.memory
    working_set = "head and loss" if memory.head > memory.layer else "one layer at work"
    parts = {
        "parameters": memory.parameters,
        "moments": memory.moments,
        "gradients and updates": memory.gradients,
        "saved activations": memory.saved,
        working_set: max(memory.head, memory.layer),
        "batch": memory.batch,
    }
    return [Bar(name, nbytes, format_bytes(nbytes)) for name, nbytes in parts.items()]


def _peak(plan: TrainingPlan) -> Bar:
    return Bar("peak", plan.memory.peak, format_bytes(plan.memory.peak))


def _limit_bar(limit: KindEstimate | None) -> Bar | None:
    if limit is None:
        return None
    return Bar(limit.kind.name, limit.kind.memory_nbytes, format_bytes(limit.kind.memory_nbytes))


def _context_chart(plan: TrainingPlan, limit: KindEstimate | None, replan: Replan) -> str:
    """Draw the peak against the context length, and the memory of the device."""
    lengths = sorted({max(MIN_LENGTH, int(plan.inputs.seq_length * factor)) for factor in LENGTH_FACTORS})
    peaks = [(length / 1000, replan({"data.seq_length": length}).memory.peak / GIB) for length in lengths]
    curves = [Curve("peak", peaks)]
    if limit is not None:
        memory = limit.kind.memory_nbytes / GIB
        curves.append(Curve(f"memory of {limit.kind.name}", [(0, memory), (lengths[-1] / 1000, memory)]))
    mark = (plan.inputs.seq_length / 1000, "this plan")
    return line_chart(curves, [mark], title="peak memory by context length", from_zero=True)
