"""The compiled plan of a training step as text and as fields of a JSON object."""

from __future__ import annotations

from collections.abc import Iterator

from prepcli.commands.pages.plan_page import (
    COLLECTIVE_HEADER,
    CompiledStep,
    collective_rows,
    compiled_memory_rows,
    compiled_note,
    compiled_title,
)
from prepcli.core.tables import format_table, wrap_line


def compiled_lines(step: CompiledStep, *, columns: int | None) -> Iterator[str]:
    """Yield the sections of the text: memory, collectives, and a line about the compilation.

    Args:
        step: The compiled step.
        columns: Width of the terminal. None means unlimited.
    """
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
