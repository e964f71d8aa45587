"""Plan a training step: memory, operations, communication and time, without accelerator, weights or data."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Unpack

from prepcli.commands.operations.inspection_options import PlanOptions
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.plan_target import PlanTarget, resolve_target
from prepcli.commands.operations.results import StepPlan
from prepcli.commands.pages.html_page import check_page_path
from prepcli.commands.pages.plan_page import CompiledStep, change_text, write_plan_page
from prepcli.core.errors import Key, Option, text, usage_error
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike, as_tuple
from prepcli.models.attention_kernels import ANY_ACCELERATOR
from prepcli.models.mesh import parse_mesh, resolve_mesh
from prepcli.sources.mapped import read_map
from trainer.planning.accelerators import ACCELERATORS, Accelerator, parse_devices
from trainer.planning.memory_changes import MemoryChange, find_memory_change
from trainer.planning.mesh_search import MeshSearch, search_meshes
from trainer.planning.step_inputs import context_warnings
from trainer.planning.training_plan import (
    TrainingPlan,
    plan_training,
    with_overrides,
)
from trainer.recipe.description import recipe_lines


@dataclass(frozen=True, slots=True)
class FittingMeshes:
    """The meshes of a number of devices on which a step fits, the fastest first."""

    kind: Accelerator
    num_devices: int
    search: MeshSearch


@dataclass(frozen=True, slots=True)
class _Devices:
    """Kind and number of the requested accelerators. Each is None if the request omits it."""

    kind: Accelerator | None
    number: int | None


@public
def plan(
    target: PathLike,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[PlanOptions],
) -> StepPlan:
    """Plan a training step on one mesh. No accelerator, weights or data are needed.

    Args:
        target: A recipe (a TOML file, or the name of a shipped one), or a checkpoint (folder, alias, hub id or URL).
            A checkpoint is planned with a default recipe.
        progress: Receives notes and warnings, if it is an `Observer`. Default: none.
        **options: See `PlanOptions`.

    Returns:
        The estimates, and with `compile=True` the plan of the compiler.

    Raises:
        UsageError: An argument or the recipe is invalid.
        PrepError: The model is unknown, the mesh does not divide it, or the step does not compile.
    """
    observer = observer_of(progress)
    devices = _parse_devices(options)
    _check_compile_timeout(options)
    html = options["html"]
    if html is not None:
        check_page_path(Path(html))
    planned = _resolve_plan_target(target, options, devices, observer=observer)
    recipe = with_overrides(
        planned.recipe, {"mesh": _fill_open_mesh_axis(planned.recipe.mesh, devices)}
    )
    device = devices.kind.device if devices.kind else ANY_ACCELERATOR

    def replan(values: Mapping[str, object]) -> TrainingPlan:
        changed = with_overrides(recipe, values)
        return plan_training(changed, planned.model, planned.rules, device=device)

    training_plan = replan({})
    for warning in context_warnings(recipe, training_plan.inputs):
        observer.warn(warning)
    compiled = None
    if options["compile"]:
        limit_s = options["compile_timeout"]
        compiled = _compile_step(
            planned, training_plan, devices.kind, limit_s=limit_s, observer=observer
        )
    shown_kinds = [devices.kind] if devices.kind else ACCELERATORS.values()
    kinds = tuple(training_plan.estimate_on(kind) for kind in shown_kinds)
    step = StepPlan(
        training_plan,
        kinds,
        change=_find_memory_change(training_plan, planned, devices.kind),
        is_too_large=devices.kind is not None and not kinds[0].fits,
        compiled=compiled,
        settings=tuple(recipe_lines(recipe)) if planned.is_recipe else (),
    )
    if html is not None:
        write_plan_page(
            Path(html),
            str(target),
            training_plan,
            kinds=kinds,
            replan=replan,
            advice=change_text(step.change) if step.is_too_large else "",
            compiled=compiled,
            settings=step.settings,
        )
        observer.note(f"wrote {html}")
    return step


@public
def fitting_meshes(
    target: PathLike,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[PlanOptions],
) -> FittingMeshes:
    """Search the meshes on which a training step fits into the memory of a kind of device.

    Args:
        target: A recipe or a checkpoint. See `plan`.
        progress: Receives notes, if it is an `Observer`. Default: none.
        **options: See `PlanOptions`. `devices` is required, and names a kind.

    Raises:
        UsageError: An argument or the recipe is invalid.
        PrepError: The model is unknown.
    """
    observer = observer_of(progress)
    devices = _parse_devices(options)
    _check_compile_timeout(options)
    if devices.kind is None:
        needed = Option("devices", "KIND")
        raise usage_error(
            text("{} has no effect without {}", Option("search"), needed),
            "a mesh fits into the memory of a kind of device",
            text("add {}, or remove {}", needed, Option("search")),
        )
    _check_search_options(options, devices)
    planned = _resolve_plan_target(target, options, devices, observer=observer)
    num_devices = devices.number
    if not num_devices:
        mesh = _fill_open_mesh_axis(planned.recipe.mesh, devices)
        # `--devices v5p` names no number, so the recipe's mesh decides.
        num_devices = parse_mesh(mesh).n_devices
    search = search_meshes(
        planned.recipe,
        planned.model,
        planned.rules,
        kind=devices.kind,
        num_devices=num_devices,
    )
    return FittingMeshes(devices.kind, num_devices, search)


def _check_compile_timeout(options: PlanOptions) -> None:
    """Raise UsageError for a time limit without a compilation."""
    if options["compile_timeout"] is not None and not options["compile"]:
        timeout = Option("compile_timeout")
        needed = Option("compile", True)
        raise usage_error(
            text("{} has no effect without {}", timeout, needed),
            "it limits the time of a compilation",
            text("add {}, or remove {}", needed, timeout),
        )


def _check_search_options(options: PlanOptions, devices: _Devices) -> None:
    """Raise UsageError for options without effect on a search."""
    if options["compile"]:
        _raise_search_conflict("compile", "a compilation is of one mesh", "remove one of them")
    if options["html"] is not None:
        _raise_search_conflict("html", "a page shows one plan", "remove one of them")
    if options["mesh"] is not None and devices.number:
        why = "a search tries every mesh of the devices"
        _raise_search_conflict("mesh", why, text("remove {}", Option("mesh")))


def _raise_search_conflict(name: str, why: str, hint: str) -> NoReturn:
    what = text("{} has no effect with {}", Option(name), Option("search"))
    raise usage_error(what, why, hint)


def _parse_devices(options: PlanOptions) -> _Devices:
    """Return the accelerators of a request."""
    devices = options["devices"]
    if devices is None:
        return _Devices(None, None)
    kind, number = parse_devices(devices)
    return _Devices(kind, number)


def _resolve_plan_target(
    target: PathLike, options: PlanOptions, devices: _Devices, *, observer: Observer
) -> PlanTarget:
    """Return the recipe and the model to plan."""
    overrides = as_tuple(options["overrides"])
    mesh = options["mesh"]
    if mesh is not None:
        # The error of an invalid mesh would otherwise name `overrides`.
        parse_mesh(mesh)
        overrides += (f"mesh={mesh}",)
    config = options["config"]
    planned = resolve_target(
        str(target),
        overrides,
        config=None if config is None else Path(config),
        tensor_map=None if options["map"] is None else read_map(Path(options["map"])),
        # Without a recipe, fsdp takes all devices: it splits parameters, moments and the batch.
        default_mesh="1,-1,1" if devices.number else "1,1,1",
        offline=options["offline"],
        observer=observer,
    )
    observer.note(f"shapes from {planned.origin}")
    return planned


def _compile_step(
    target: PlanTarget,
    training_plan: TrainingPlan,
    kind: Accelerator | None,
    *,
    limit_s: float | None,
    observer: Observer,
) -> CompiledStep:
    """Compile the step. Only then JAX is imported."""
    from prepcli.commands.operations.plan_compile import compile_step

    return compile_step(target, training_plan, kind, limit_s=limit_s, observer=observer)


def _fill_open_mesh_axis(mesh: str, devices: _Devices) -> str:
    """Return a mesh without -1. The number of devices determines the size of that axis."""
    parsed = parse_mesh(mesh, Key("mesh"))
    if devices.number is not None:
        kind = f"{devices.kind.name}:" if devices.kind else ""
        origin = text("{}", Option("devices", f"{kind}{devices.number}"))
        return str(resolve_mesh(parsed, devices.number, origin))
    if -1 in parsed.sizes:
        devices_option = Option("devices", "256")
        hint = text("{} or `v5p:256`, or {} without -1", devices_option, Option("mesh"))
        why = "its size follows from the number of devices, which is unknown"
        raise usage_error(f"mesh {parsed} has an axis of size -1", why, hint)
    return str(parsed)


def _find_memory_change(
    training_plan: TrainingPlan, target: PlanTarget, kind: Accelerator | None
) -> MemoryChange | None:
    """Return changes that make the step fit on a kind of device, or None if it fits or no kind is given."""
    if kind is None or training_plan.memory.peak <= kind.memory_nbytes:
        return None
    return find_memory_change(
        training_plan, target.model, target.rules, limit_nbytes=kind.memory_nbytes
    )
