"""Plans of training steps as text and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.pages.plan_page import (
    CAVEAT,
    MEMORY_ADVICE,
    OPTIONAL_COLUMNS,
    SPEED_HEADER,
    CompiledStep,
    compiled_blocks,
    flops_table,
    kinds_table,
    speed_cells,
    title_lines,
    traffic_table,
)
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.json_values import json_fields
from prepcli.core.observer import LEAVES
from prepcli.core.tables import Block, Paragraph, Table
from trainer.planning.training_plan import memory_fields, memory_table

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from prepcli.commands.operations.plan import FittingMeshes
    from prepcli.commands.operations.run_results import StepPlan
    from trainer.planning.training_plan import KindEstimate, MeshSearch, TrainingPlan


def compiled_fields(step: CompiledStep | None) -> dict[str, object] | None:
    """Return the compiled step as fields of the JSON object, or None if the step was not compiled."""
    if step is None:
        return None
    plan = step.plan
    return {
        "target": plan.target,
        "is_upper_bound": plan.is_upper_bound,
        "kernel": plan.kernel,
        "jax": plan.jax_version,
        "libtpu": plan.libtpu_version,
        "temporary": plan.temp_nbytes,
        "arguments": plan.argument_nbytes,
        "outputs": plan.output_nbytes - plan.alias_nbytes,
        "peak": plan.peak_nbytes,
        "estimated": step.estimated_nbytes,
        "ratio": step.ratio,
        "collectives": [
            {"kind": collective.kind, "operations": collective.count, "bytes": collective.nbytes}
            for collective in plan.collectives
        ],
        "compile_s": plan.compile_s,
        "host_memory": plan.host_nbytes,
    }


# Meshes that a search lists without -v, so that the best one stays on the screen.
MAX_MESHES = 10
# Listed reasons for invalid meshes.
MAX_REASONS = 5
# Operations of a step in the JSON object.
FLOPS = ("matmul", "attention_full", "attention_causal", "masked", "recomputed", "executed")


def step_plan_report(step: StepPlan) -> Report:
    """Return the report of a plan of one mesh, from shapes, settings and memory to the compiled step."""
    plan = step.training_plan
    blocks: list[Block] = [Paragraph(line) for line in (*title_lines(plan), *step.settings)]
    blocks += ["", memory_table(plan.inputs, plan.memory), "", flops_table(plan.flops), ""]
    if plan.traffic:
        blocks += [traffic_table(plan), ""]
    blocks.append(kinds_table(plan, step.kinds))
    if step.is_too_large:
        blocks.append(Paragraph(MEMORY_ADVICE))
    blocks.append(Paragraph(CAVEAT))
    if step.compiled is not None:
        blocks += ["", *compiled_blocks(step.compiled)]
    fields = {
        **plan_fields(plan),
        "settings": step.settings,
        "kinds": [kind_fields(estimate) for estimate in step.kinds],
        "compiled": compiled_fields(step.compiled),
    }
    return Report(blocks, fields)


def meshes_report(meshes: FittingMeshes, ui: Ui) -> Report:
    """Return the report of a search."""
    search = meshes.search
    entries: list[dict[str, object]] = []
    for option in search.options:
        entries.append(plan_fields(option.plan) | kind_fields(option.estimate))
    fields = {
        "devices": meshes.num_devices,
        "kind": meshes.kind.name,
        "meshes": entries,
        "too_large": search.num_too_large,
        "invalid": dict(search.refusals),
    }
    verb = "fits" if len(entries) == 1 else "fit"
    title = f"{count_text(len(entries), 'mesh', 'meshes')} of {meshes.num_devices} x {meshes.kind.name} {verb}"
    # A pipe has no width: a program that reads the text gets all meshes.
    show_all = ui.columns is None or ui.level >= LEAVES
    return Report([title, *search_blocks(search, show_all=show_all)], fields)


def search_blocks(search: MeshSearch, *, show_all: bool) -> list[Block]:
    """Return the table of a search, and lines about the other meshes and the best one."""
    blocks: list[Block] = []
    options = search.options if show_all else search.options[:MAX_MESHES]
    if options:
        rows: list[tuple[str, ...]] = []
        for option in options:
            peak = format_bytes(option.plan.memory.peak)
            rows.append((str(option.plan.mesh), peak, *speed_cells(option.estimate)))
        header = ("mesh", "peak", *SPEED_HEADER)
        blocks.append(Table(header, rows, right_aligned=header[1:-1], optional=OPTIONAL_COLUMNS))
    lines: list[str] = []
    num_slower = len(search.options) - len(options)
    if num_slower:
        lines.append(
            f"and {count_text(num_slower, 'slower one that fits', 'slower ones that fit')}; `-v` lists all"
        )
    if search.num_too_large:
        lines.append(
            f"{count_text(search.num_too_large, 'other mesh exceeds', 'other meshes exceed')} the memory"
        )
    lines += _refusal_lines(search.refusals)
    lines.append(CAVEAT)
    if search.options:
        lines.append(f"best: `--mesh {search.options[0].plan.mesh}`")
    return [*blocks, *map(Paragraph, lines)]


def _refusal_lines(refusals: Counter[str]) -> Iterator[str]:
    """Yield why meshes are invalid, the most frequent reason first."""
    if not refusals:
        return
    yield f"{refusals.total()} are invalid:"
    for reason, count in refusals.most_common(MAX_REASONS):
        yield f"  {count} x {reason}"
    if len(refusals) > MAX_REASONS:
        rest = refusals.total() - sum(count for _, count in refusals.most_common(MAX_REASONS))
        yield f"  {rest} x another reason"


def plan_fields(plan: TrainingPlan) -> dict[str, object]:
    """Return the plan as fields of a JSON object, without the memory of each kind of accelerator."""
    return {
        "mesh": str(plan.mesh),
        "devices": plan.mesh.n_devices,
        "tokens": plan.tokens,
        "memory": memory_fields(plan.memory, None),
        "flops": json_fields(plan.flops, *FLOPS),
        "traffic": [
            {
                "axis": axis.axis,
                "size": axis.size,
                "bytes": axis.nbytes,
                "slices": axis.num_slices,
                "bytes_between_slices": axis.slow_nbytes,
                "overlaps": axis.overlaps,
            }
            for axis in plan.traffic
        ],
    }


def kind_fields(estimate: KindEstimate) -> dict[str, object]:
    """Return the estimated time, memory and MFU of a step on one kind of accelerator as fields of a JSON object."""
    time = estimate.time
    return {
        "kind": estimate.kind.name,
        "memory": estimate.kind.memory_nbytes,
        "fits": estimate.fits,
        **json_fields(time, "step_s", "compute_s", "memory_s", "overlapped_s", "exposed_s"),
        **json_fields(estimate, "tokens_per_s", "mfu_full", "mfu_causal"),
        "bound": time.bound,
    }
