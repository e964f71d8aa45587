"""The plan of a training step: tables and sentences for a terminal, and a self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from prepcli.commands.pages.charts import Curve, line_chart
from prepcli.commands.pages.html_page import (
    Bar,
    Markup,
    chip,
    html_blocks,
    html_table,
    legend,
    stacked_bar,
    write_html_page,
)
from prepcli.core.errors import Key, Option, text
from prepcli.core.formatting import count_text, format_bytes, format_duration
from prepcli.core.tables import Block, Paragraph, Table
from prepcli.models.mesh import num_slices
from trainer.planning.step_flops import StepFlops
from trainer.planning.step_time import COMPUTE_EFFICIENCY, Accelerator
from trainer.planning.training_plan import CompiledPlan, KindEstimate, TrainingPlan

GIB = 1 << 30
# Context lengths of the curve, as multiples of the plan's.
LENGTH_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
MIN_LENGTH = 128

Replan = Callable[[Mapping[str, object]], TrainingPlan]
# Largest first.
FLOP_UNITS = (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
# Columns of speeds that a narrow terminal leaves out, the first one first.
OPTIONAL_COLUMNS = ("MFU causal", "MFU full", "bound by", "memory", "tokens/s")
SPEED_HEADER = ("step", "tokens/s", "MFU full", "MFU causal", "bound by")
MEMORY_ADVICE = text(
    "the step does not fit: {} lists meshes on which it does; {}, {} and {} need less memory,"
    " and so does a shorter {}",
    Option("search", True),
    Key("model.remat_policy", "nothing_saveable"),
    Key("model.attention_kernel", "blockwise"),
    Key("model.ffn_chunk_size", 512),
    Key("data.seq_length"),
)
CAVEAT = (
    "All figures above are estimates from shapes."
    f" Matrix products run at {COMPUTE_EFFICIENCY:.0%} of the bfloat16 peak; communication over mp waits,"
    " other communication overlaps; elementwise work, input and checkpoints are ignored."
)


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """A compiled training step.

    Attributes:
        plan: The compiler's plan.
        estimated_nbytes: Peak of the estimate for the same devices.
    """

    plan: CompiledPlan
    estimated_nbytes: int

    @property
    def ratio(self) -> float:
        """The estimate as a multiple of the compiler's plan."""
        # Below 1 the compiler needs more than the estimate: a step that seems to fit may not.
        return self.estimated_nbytes / self.plan.peak_nbytes


def title_lines(plan: TrainingPlan) -> list[str]:
    """Return a line about the model and the mesh, and a line about the batch."""
    num_parameters = sum(math.prod(leaf.shape) for leaf in plan.inputs.leaves.values())
    axes = " x ".join(f"{name} {size}" for name, size in zip(plan.mesh.names, plan.mesh.sizes))
    model = f"{count_text(num_parameters, 'parameter')}; mesh {axes} = {count_text(plan.mesh.n_devices, 'device')}"
    count = num_slices(plan.slices)
    if count > 1:
        split = ", ".join(f"{axis} over {number}" for axis, number in plan.slices.items())
        model += f" in {count} slices ({split})"
    num_sequences = plan.inputs.accumulate * plan.inputs.micro_batch_size
    length = plan.tokens // num_sequences
    batch = f"batch {num_sequences:,} x {length:,} = {count_text(plan.tokens, 'token')} per step"
    if plan.inputs.accumulate > 1:
        batch += f" in {plan.inputs.accumulate} parts"
    return [model, batch]


def flops_table(flops: StepFlops) -> Table:
    """Return the table of the operations of a step, in a unit such as `TFLOP`."""
    counts = {
        "products with parameters": flops.matmul,
        "attention, visible pairs": flops.attention_causal,
        "attention, all pairs": flops.attention_full,
        "masked pairs that are computed": flops.masked,
        "repeated by the backward pass": flops.recomputed,
        "executed": flops.executed,
    }
    unit, scale = next(
        ((name, size) for name, size in FLOP_UNITS if flops.executed >= size), FLOP_UNITS[-1]
    )
    digits = 1 if flops.executed >= 100 * scale else 2
    rows = [(name, f"{count / scale:,.{digits}f}") for name, count in counts.items()]
    return Table(("operations of a step", unit), rows, right_aligned=[unit])


def traffic_table(plan: TrainingPlan) -> Table:
    """Return the table of the communication of one device, with a row per mesh axis."""
    header = ["one device sends in a step", "bytes", "other work"]
    if plan.slices:
        header.insert(2, "between slices")
    rows: list[list[str]] = []
    for axis in plan.traffic:
        row = [f"{axis.axis} {axis.size}", format_bytes(axis.nbytes)]
        if plan.slices:
            row.append(format_bytes(axis.slow_nbytes))
        row.append("overlaps" if axis.overlaps else "waits")
        rows.append(row)
    return Table(header, rows, right_aligned=header[1:-1])


def kinds_table(plan: TrainingPlan, kinds: Sequence[KindEstimate]) -> Table:
    """Return the table of the estimated time, memory and MFU of a step on each kind of accelerator."""
    rows: list[tuple[str, ...]] = []
    for estimate in kinds:
        device = f"{plan.mesh.n_devices} x {estimate.kind.name}"
        memory = format_bytes(estimate.kind.memory_nbytes)
        rows.append((device, memory, "yes" if estimate.fits else "no", *speed_cells(estimate)))
    header = ("devices", "memory", "fits", *SPEED_HEADER)
    return Table(header, rows, right_aligned=header[1:-1], optional=OPTIONAL_COLUMNS)


def speed_cells(estimate: KindEstimate) -> tuple[str, ...]:
    """Return the cells below SPEED_HEADER."""
    return (
        f"{estimate.time.step_s:.3g} s",
        f"{estimate.tokens_per_s:,.0f}",
        f"{estimate.mfu_full:.0%}",
        f"{estimate.mfu_causal:.0%}",
        estimate.time.bound,
    )


def compiled_blocks(step: CompiledStep) -> list[Block]:
    """Return the tables of the memory of one device and of the collective operations, and a note."""
    plan = step.plan
    title = f"compiled for {plan.target}"
    if plan.is_upper_bound:
        title += ", an upper bound"
    memory = [
        ("temporary arrays", format_bytes(plan.temp_nbytes)),
        ("state and batch", format_bytes(plan.argument_nbytes)),
        # Donated arguments and their outputs share memory.
        ("outputs not in place", format_bytes(plan.output_nbytes - plan.alias_nbytes)),
        ("in all", format_bytes(plan.peak_nbytes)),
        ("estimated", format_bytes(step.estimated_nbytes)),
        ("estimated / in all", f"{step.ratio:.2f}"),
    ]
    blocks: list[Block] = [Table((f"memory of one device, {title}", ""), memory, [""]), ""]
    if plan.collectives:
        rows = [(each.kind, each.count, format_bytes(each.nbytes)) for each in plan.collectives]
        header = ("collective", "operations", "bytes")
        blocks += [Table(header, rows, right_aligned=header[1:]), ""]
    return [*blocks, Paragraph(compiled_note(step))]


def compiled_note(step: CompiledStep) -> str:
    """Return the note below the figures of a compiled step: the cost of the compilation, and what the figures omit.

    E.g. `Attention kernel blockwise; compiled by jax 0.12.0.1, libtpu 0.0.50.1 in 12 s with 3.1 GB of host memory. An
    operation in a loop counts once.`
    """
    plan = step.plan
    cost = f"{format_duration(plan.compile_s)} with {format_bytes(plan.host_nbytes)} of host memory"
    note = (
        f"Attention kernel {plan.kernel}; compiled by {plan.compiler} in {cost}."
        " An operation in a loop counts once."
    )
    if plan.is_upper_bound:
        note += " XLA computes bfloat16 in float32 on CPUs: accelerators need less memory."
    return note


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
        body += ["<h2>The compiled step</h2>", *html_blocks(compiled_blocks(compiled))]
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
    limit = kinds[0].kind if len(kinds) == 1 else None
    limit_bar = None
    if limit is not None:
        limit_bar = Bar(limit.name, limit.memory_nbytes, format_bytes(limit.memory_nbytes))
    parts = _memory_parts(plan)
    yield f"<h1>Plan of {escape(name)}</h1>"
    yield from html_blocks([*lines, advice])
    yield "<h2>Memory of one device</h2>"
    yield stacked_bar(parts, "memory of one device by part", limit=limit_bar)
    memory_rows: list[tuple[str, str]] = []
    for number, part in enumerate(parts):
        memory_rows.append((Markup(chip(number) + escape(part.name)), part.text))
    memory_rows.append(("peak", format_bytes(plan.memory.peak)))
    if limit_bar is not None:
        memory_rows.append((f"memory of {limit_bar.name}", limit_bar.text))
    yield from html_table(Table(["part", "bytes"], memory_rows, right_aligned=["bytes"]))
    yield "<h2>Memory by context length</h2>"
    yield from _context_chart(plan, limit, replan)
    yield "<h2>Devices</h2>"
    yield from html_blocks([kinds_table(plan, kinds)])
    yield "<h2>Operations of a step</h2>"
    yield from html_blocks([flops_table(plan.flops)])
    if plan.traffic:
        yield "<h2>Communication</h2>"
        yield from html_blocks([traffic_table(plan)])
    yield f"<p>{escape(CAVEAT)}</p>"


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


def _context_chart(plan: TrainingPlan, limit: Accelerator | None, replan: Replan) -> Iterator[str]:
    """Yield a chart of the peak by context length, and of the memory of the device."""
    seq_length = plan.inputs.seq_length
    # A set, because short plans give equal lengths: for 256 tokens the factors 0.125, 0.25 and 0.5 all give 128.
    lengths = sorted({max(MIN_LENGTH, int(seq_length * factor)) for factor in LENGTH_FACTORS})
    peaks = []
    for length in lengths:
        peak = replan({"data.seq_length": length}).memory.peak
        peaks.append((float(length), peak / GIB))
    curves = [Curve(name="peak", points=peaks, width=2.0)]
    if limit is not None:
        memory = limit.memory_nbytes / GIB
        line = [(0.0, memory), (float(lengths[-1]), memory)]
        name = f"memory of {limit.name}"
        curves.append(Curve(name=name, points=line, color=1, width=2.0))
    yield legend([curve.name for curve in curves])
    yield line_chart(
        curves,
        "peak memory by context length",
        x_name="tokens per sequence",
        y_name="GiB",
        marks=[(seq_length, "this plan")],
        from_zero=True,
        has_legend=False,
    )
