"""`prep plan`: memory, operations, communication and time of a training step, without accelerator, weights or data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.commands.compiled_report import compiled_fields
from prepcli.commands.plan_report import (
    change_text,
    kind_fields,
    plan_fields,
    plan_lines,
    search_text,
)
from prepcli.commands.plan_target import PlanTarget, resolve_target
from prepcli.console.observer import LEAVES
from prepcli.console.ui import Report, Ui
from prepcli.errors import Option, usage_error
from prepcli.operations.conflicts import check_needs
from prepcli.pages.html_page import check_page_path
from prepcli.pages.plan_page import write_plan_page
from prepcli.pages.plan_rows import CompiledStep
from trainer.models.attention_kernels import ANY_ACCELERATOR
from trainer.models.mesh import parse_mesh, resolve_mesh
from trainer.planning.accelerators import ACCELERATORS, Accelerator, parse_devices
from trainer.planning.memory_changes import MemoryChange, find_memory_change
from trainer.planning.mesh_search import search_meshes
from trainer.planning.step_inputs import context_warnings
from trainer.planning.training_plan import TrainingPlan, plan_training, with_overrides


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Request of `prep plan`."""

    target: str  # a recipe or a checkpoint
    overrides: tuple[str, ...] = ()  # `KEY=VALUE`
    mesh: str | None = None  # instead of the recipe's
    devices: str | None = None  # `KIND`, `KIND:NUMBER` or `NUMBER`; None: all kinds
    search: bool = False  # list the meshes on which the step fits
    compile_step: bool = False  # compile the step, and show the compiler's plan
    compile_timeout_s: float | None = None  # after which the compilation is ended
    html: Path | None = None  # file of a page
    config: Path | None = None  # config.json, instead of the checkpoint's
    offline: bool = False


@dataclass(frozen=True, slots=True)
class _Devices:
    """The accelerators of a request, or None where it does not say."""

    kind: Accelerator | None
    number: int | None


def plan(request: PlanRequest, ui: Ui) -> Report:
    """Plan a training step.

    Args:
        request: Recipe or checkpoint, mesh and devices.
        ui: Receives notes and warnings.

    Returns:
        Report with the estimates, or with the meshes that a search found.

    Raises:
        PrepError: The options conflict, the recipe is invalid, the model is unknown, or the mesh does not divide it.
    """
    devices = (
        _Devices(*parse_devices(request.devices))
        if request.devices is not None
        else _Devices(None, None)
    )
    _check_request(request, devices)
    mesh_override = () if request.mesh is None else (f"mesh={request.mesh}",)
    target = resolve_target(
        request.target,
        (*request.overrides, *mesh_override),
        config=request.config,
        default_mesh="1,-1,1" if devices.number else "1,1,1",
        offline=request.offline,
        ui=ui,
    )
    ui.note(f"shapes from {target.origin}")
    return (
        _search_report(target, devices, ui)
        if request.search
        else _plan_report(request, target, devices, ui)
    )


def _check_request(request: PlanRequest, devices: _Devices) -> None:
    """Raise UsageError for options that conflict or have no effect."""
    if not request.compile_step and request.compile_timeout_s is not None:
        check_needs(
            Option("compile_timeout"),
            True,
            Option("compile"),
            "it limits the time of a compilation",
        )
    if request.search:
        if devices.kind is None:
            check_needs(
                Option("search"),
                True,
                Option("devices", "KIND"),
                "a mesh fits into the memory of a kind of device",
            )
        if request.compile_step:
            why = "a compilation is of one mesh"
            raise usage_error(
                "`--compile` has no effect with `--search`", why, "remove one of them"
            )
        if request.html is not None:
            raise usage_error(
                "`--html` has no effect with `--search`",
                "a page shows one plan",
                "remove one of them",
            )
        if request.mesh is not None and devices.number:
            why = "a search tries every mesh of the devices"
            raise usage_error("`--mesh` has no effect with `--search`", why, "remove `--mesh`")
    if request.html is not None:
        check_page_path(request.html)


def _plan_report(request: PlanRequest, target: PlanTarget, devices: _Devices, ui: Ui) -> Report:
    """Report the plan of one mesh."""
    recipe = with_overrides(
        target.recipe, {"mesh": _fill_open_mesh_axis(target.recipe.mesh, devices)}
    )

    device = devices.kind.device if devices.kind else ANY_ACCELERATOR

    def replan(values: Mapping[str, Any]) -> TrainingPlan:
        return plan_training(
            with_overrides(recipe, values), target.model, target.rules, device=device
        )

    training_plan = replan({})
    for warning in context_warnings(recipe, training_plan.inputs):
        ui.warn(warning)
    compiled = None
    if request.compile_step:
        compiled = _compile(
            target, training_plan, devices.kind, limit_s=request.compile_timeout_s, ui=ui
        )
    kinds = [
        training_plan.on(kind)
        for kind in ([devices.kind] if devices.kind else ACCELERATORS.values())
    ]
    change = _find_change(training_plan, target, devices.kind)
    does_not_fit = devices.kind is not None and not kinds[0].fits
    advice = change_text(change) if does_not_fit else ""
    if request.html is not None:
        write_plan_page(
            request.html,
            request.target,
            training_plan,
            kinds=kinds,
            replan=replan,
            advice=advice,
            compiled=compiled,
        )
        ui.note(f"wrote {request.html}")
    fields = {
        **plan_fields(training_plan),
        "kinds": list(map(kind_fields, kinds)),
        "changes": _change_fields(change),
        "compiled": compiled_fields(compiled),
    }
    lines = plan_lines(training_plan, kinds, advice=advice, compiled=compiled, columns=ui.columns)
    return Report("\n".join(lines), fields)


def _compile(
    target: PlanTarget,
    training_plan: TrainingPlan,
    kind: Accelerator | None,
    *,
    limit_s: float | None,
    ui: Ui,
) -> CompiledStep:
    """Compile the step. Only then JAX is imported."""
    from prepcli.commands.plan_compile import compile_step

    return compile_step(target, training_plan, kind, limit_s=limit_s, ui=ui)


def _fill_open_mesh_axis(mesh: str, devices: _Devices) -> str:
    """Return a mesh without an open axis: the number of devices fills it."""
    parsed = parse_mesh(mesh, "mesh")
    if devices.number is not None:
        kind = f"{devices.kind.name}:" if devices.kind else ""
        return str(resolve_mesh(parsed, devices.number, f"`--devices {kind}{devices.number}`"))
    if -1 in parsed.sizes:
        why = "the number of devices is unknown"
        raise usage_error(
            f"mesh {parsed} has an open axis",
            why,
            "`--devices 256` or `v5p:256`, or `--mesh` without -1",
        )
    return str(parsed)


def _find_change(
    training_plan: TrainingPlan, target: PlanTarget, kind: Accelerator | None
) -> MemoryChange | None:
    """Return changes that make the step fit on a kind of device, or None if it fits or no kind is given."""
    if kind is None or training_plan.memory.peak <= kind.memory_nbytes:
        return None
    return find_memory_change(
        training_plan, target.model, target.rules, limit_nbytes=kind.memory_nbytes
    )


def _change_fields(change: MemoryChange | None) -> dict[str, Any] | None:
    return None if change is None else {"set": dict(change.values), "peak": change.plan.memory.peak}


def _search_report(target: PlanTarget, devices: _Devices, ui: Ui) -> Report:
    """Report the meshes on which the step fits, the fastest first."""
    assert devices.kind is not None
    number = (
        devices.number or parse_mesh(_fill_open_mesh_axis(target.recipe.mesh, devices)).n_devices
    )
    search = search_meshes(
        target.recipe, target.model, target.rules, kind=devices.kind, num_devices=number
    )
    entries = [plan_fields(option.plan) | kind_fields(option.estimate) for option in search.options]
    title = f"{len(entries)} meshes of {number} x {devices.kind.name} fit"
    fields = {
        "devices": number,
        "kind": devices.kind.name,
        "meshes": entries,
        "too_large": search.num_too_large,
        "invalid": dict(search.refusals),
    }
    show_all = ui.columns is None or ui.level >= LEAVES
    text = search_text(search, columns=ui.columns, show_all=show_all)
    return Report(f"{title}\n{text}", fields)
