"""Plans of training steps as text and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.pages.plan_page import (
    CAVEAT,
    COLLECTIVE_HEADER,
    KIND_HEADER,
    CompiledStep,
    change_text,
    collective_rows,
    compiled_memory_rows,
    compiled_note,
    compiled_title,
    device_kind_rows,
    flops_table,
    speed_cells,
    title_lines,
    traffic_header,
    traffic_rows,
)
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.observer import LEAVES
from prepcli.core.tables import format_table, wrap_line
from trainer.planning.training_plan import memory_fields, memory_table

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence

    from prepcli.commands.operations.plan import FittingMeshes
    from prepcli.commands.operations.results import StepPlan
    from trainer.planning.memory_changes import MemoryChange
    from trainer.planning.mesh_search import MeshOption, MeshSearch
    from trainer.planning.training_plan import KindEstimate, TrainingPlan


def compiled_lines(step: CompiledStep, *, columns: int | None) -> Iterator[str]:
    """Yield the sections of the text: memory, collectives, and a line about the compilation."""
    yield format_table(
        compiled_memory_rows(step),
        (f"memory of one device, {compiled_title(step)}", ""),
        right_aligned=[""],
        width=columns,
    )
    yield ""
    if step.plan.collectives:
        yield format_table(
            collective_rows(step),
            COLLECTIVE_HEADER,
            right_aligned=COLLECTIVE_HEADER[1:],
            width=columns,
        )
        yield ""
    yield wrap_line(compiled_note(step), columns)


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
# Columns that a narrow terminal leaves out, the first one first.
OPTIONAL_COLUMNS = ("MFU causal", "MFU full", "bound by", "memory", "tokens/s")


def step_plan_report(step: StepPlan, columns: int | None) -> Report:
    """Return the report of a plan of one mesh."""
    advice = change_text(step.change) if step.is_too_large else ""
    lines = plan_lines(
        step.training_plan,
        step.kinds,
        settings=step.settings,
        advice=advice,
        compiled=step.compiled,
        columns=columns,
    )
    fields = {
        **plan_fields(step.training_plan),
        "settings": list(step.settings),
        "kinds": [kind_fields(estimate) for estimate in step.kinds],
        "changes": _change_fields(step.change),
        "compiled": compiled_fields(step.compiled),
    }
    return Report("\n".join(lines), fields)


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
    text = search_text(search, columns=ui.columns, show_all=show_all)
    return Report(f"{title}\n{text}", fields)


def _change_fields(change: MemoryChange | None) -> dict[str, object] | None:
    if change is None:
        return None
    return {"set": dict(change.values), "peak": change.plan.memory.peak}


def plan_lines(
    plan: TrainingPlan,
    kinds: Sequence[KindEstimate],
    *,
    settings: Sequence[str],
    advice: str,
    compiled: CompiledStep | None,
    columns: int | None,
) -> Iterator[str]:
    """Yield the sections of the text, from shapes, settings and memory to the compiled step."""
    for line in (*title_lines(plan), *settings):
        yield wrap_line(line, columns)
    yield ""
    yield memory_table(plan.inputs, plan.memory)
    yield ""
    unit, rows = flops_table(plan.flops)
    yield format_table(rows, ("operations of a step", unit), right_aligned=[unit])
    yield ""
    if plan.traffic:
        header = traffic_header(plan)
        yield format_table(traffic_rows(plan), header, right_aligned=header[1:-1], width=columns)
        yield ""
    yield format_table(
        device_kind_rows(plan, kinds),
        KIND_HEADER,
        right_aligned=KIND_HEADER[1:-1],
        width=columns,
        optional=OPTIONAL_COLUMNS,
    )
    if advice:
        yield wrap_line(advice, columns)
    yield wrap_line(CAVEAT, columns)
    if compiled is not None:
        yield ""
        yield from compiled_lines(compiled, columns=columns)


def search_text(search: MeshSearch, *, columns: int | None, show_all: bool) -> str:
    """Return the table of a search, and lines about the other meshes and the best one."""
    table: list[str] = []
    options = search.options if show_all else search.options[:MAX_MESHES]
    if options:
        header = ("mesh", "peak", "step", "tokens/s", "MFU full", "MFU causal", "bound by")
        rows = [_option_row(option) for option in options]
        table.append(
            format_table(
                rows, header, right_aligned=header[1:-1], width=columns, optional=OPTIONAL_COLUMNS
            )
        )
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
    return "\n".join([*table, *(wrap_line(line, columns) for line in lines)])


def _option_row(option: MeshOption) -> tuple[str, ...]:
    """Return a mesh as a row of a search."""
    peak = format_bytes(option.plan.memory.peak)
    return str(option.plan.mesh), peak, *speed_cells(option.estimate), option.estimate.time.bound


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
        "flops": {
            "matmul": plan.flops.matmul,
            "attention_full": plan.flops.attention_full,
            "attention_causal": plan.flops.attention_causal,
            "masked": plan.flops.masked,
            "recomputed": plan.flops.recomputed,
            "executed": plan.flops.executed,
        },
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
        "step_s": time.step_s,
        "compute_s": time.compute_s,
        "memory_s": time.memory_s,
        "overlapped_s": time.overlapped_s,
        "exposed_s": time.exposed_s,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu_full": estimate.mfu_full,
        "mfu_causal": estimate.mfu_causal,
        "bound": time.bound,
    }
