"""The compiled plan of a training step as text and as fields of a JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prepcli.console.formatting import format_bytes, format_duration
from prepcli.console.tables import wrap_line
from prepcli.console.ui import format_table
from trainer.models.compiled_plan import CompiledPlan

COLLECTIVE_HEADER = ("collective", "operations", "bytes")


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
        return self.estimated_nbytes / self.plan.peak_nbytes


def compiled_lines(step: CompiledStep, *, columns: int | None) -> Iterator[str]:
    """Yield the sections of the text: memory, collectives, and a line about the compilation.

    Args:
        step: The compiled step.
        columns: Width of the terminal; None for unlimited.
    """
    yield format_table(
        memory_rows(step), (f"memory of one device, {title(step)}", ""), right_aligned=[""], width=columns
    )
    yield ""
    if step.plan.collectives:
        yield format_table(collective_rows(step), COLLECTIVE_HEADER, right_aligned=COLLECTIVE_HEADER[1:], width=columns)
        yield ""
    yield wrap_line(caveat(step), columns)


def title(step: CompiledStep) -> str:
    """Return what the step was compiled for."""
    return f"compiled for {step.plan.target}{', an upper bound' * step.plan.is_upper_bound}"


def memory_rows(step: CompiledStep) -> list[tuple[str, str]]:
    """Return the memory of one device as rows of name and size."""
    plan = step.plan
    sizes = {
        "temporary arrays": plan.temp_nbytes,
        "state and batch": plan.argument_nbytes,
        "outputs not in place": plan.output_nbytes - plan.alias_nbytes,
        "in all": plan.peak_nbytes,
        "estimated": step.estimated_nbytes,
    }
    return [
        *((name, format_bytes(nbytes)) for name, nbytes in sizes.items()),
        ("estimated / in all", f"{step.ratio:.2f}"),
    ]


def collective_rows(step: CompiledStep) -> list[tuple[str, str, str]]:
    """Return the collective operations as rows below COLLECTIVE_HEADER."""
    return [
        (collective.kind, f"{collective.count:,}", format_bytes(collective.nbytes))
        for collective in step.plan.collectives
    ]


def caveat(step: CompiledStep) -> str:
    """Return the sentence about the compilation and the limits of its figures."""
    cost = f"{format_duration(step.plan.compile_s)} with {format_bytes(step.plan.host_nbytes)} of host memory"
    bound = " XLA computes bfloat16 in float32 on CPUs: accelerators need less memory." * step.plan.is_upper_bound
    return f"Attention kernel {step.plan.kernel}; compiled in {cost}. An operation in a loop counts once.{bound}"


def compiled_fields(step: CompiledStep | None) -> dict[str, Any] | None:
    """Return the compiled step as fields of the JSON object; None if the step was not compiled."""
    if step is None:
        return None
    plan = step.plan
    return {
        "target": plan.target,
        "is_upper_bound": plan.is_upper_bound,
        "kernel": plan.kernel,
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
