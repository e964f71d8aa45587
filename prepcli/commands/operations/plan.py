"""Plan a training step: memory, operations, communication and time, without accelerator, weights or data."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.inspection_options import PlanOptions
from prepcli.commands.operations.operation import public, reject_without
from prepcli.commands.operations.recipes import find_recipe, recipes_folder, similar_recipe
from prepcli.commands.operations.run_results import StepPlan
from prepcli.commands.pages.html_page import check_page_path
from prepcli.commands.pages.plan_page import MEMORY_ADVICE, CompiledStep, write_plan_page
from prepcli.core.errors import Key, Option, PrepError, text, usage_error
from prepcli.core.formatting import format_duration
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike, as_tuple
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.inspection.contents import CheckpointContents, read_contents, read_mapped_contents
from prepcli.launch.hardware import TPU_GENERATIONS, find_topology
from prepcli.models.architecture import ArchConfig
from prepcli.models.attention_kernels import ANY_ACCELERATOR
from prepcli.models.mesh import num_slices, parse_mesh, resolve_mesh
from prepcli.models.presets import PRESETS, preset_name
from prepcli.models.registry import family_of
from prepcli.models.rules import Rules, merge_rules
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.aliases import ALIASES_BY_NAME
from prepcli.sources.locate import locate
from prepcli.sources.mapped import read_map
from prepcli.sources.open_folder import make_access
from prepcli.sources.source import read_config
from trainer.planning.memory_estimate import estimate_memory
from trainer.planning.memory_inputs import FLOAT32
from trainer.planning.model_shapes import PlannedModel, model_of_config, model_of_manifest
from trainer.planning.step_inputs import context_warnings
from trainer.planning.step_time import ACCELERATORS, Accelerator, parse_devices
from trainer.planning.training_plan import (
    MeshSearch,
    TrainingPlan,
    plan_training,
    search_meshes,
    with_overrides,
)
from trainer.recipe import Recipe, complete_recipe, load_recipe
from trainer.recipe.description import recipe_lines
from trainer.recipe.key_types import TomlTable
from trainer.recipe.loading import RawRecipe
from trainer.recipe.model_table import Model
from trainer.run.checks import check_inputs, check_model
from trainer.run.start import random_config

RECIPE_SUFFIX = ".toml"
NAME_SIGNS = frozenset("/@:~")  # signs of paths, hub ids, revisions and URLs
DEFAULT_MAX_LENGTH = 2048  # tokens of a sequence in the plan of a checkpoint without a recipe
DEFAULT_SOURCE_LENGTH = 512


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """A recipe with its model and rules.

    Attributes:
        recipe: The recipe. Its mesh may have an axis of size -1.
        model: The model, with the recipe's rotary embedding.
        rules: Partition rules.
        rule_texts: The same as text.
        is_recipe: Whether the user has named the recipe. The recipe of a checkpoint has default settings.
    """

    recipe: Recipe
    model: PlannedModel
    rules: Rules
    rule_texts: tuple[str, ...]
    is_recipe: bool


# The model of a start checkpoint, its name, and its manifest, which is empty if prep did not write the checkpoint.
_Start = tuple[PlannedModel, str, Manifest]


def _resolve_target(
    target: str, options: PlanOptions, number: int | None, observer: Observer
) -> PlanTarget:
    """Return a recipe with its model and rules. A checkpoint gets a recipe with default settings.

    Args:
        target: The recipe or the checkpoint.
        options: Options of the plan.
        number: Requested number of devices.
        observer: Receives a note about the model.
    """
    overrides = as_tuple(options["overrides"])
    if options["mesh"] is not None:
        # The error of an invalid mesh would otherwise name `overrides`.
        parse_mesh(options["mesh"])
        overrides += (f"mesh={options['mesh']}",)
    path = find_recipe(Path(target))
    shipped = recipes_folder() / path.name
    is_recipe = path.suffix == RECIPE_SUFFIX
    if is_recipe:
        if options["map"] is not None:
            what = text("{} has no effect for {}", Option("map"), target)
            hint = text("remove {}, or name a checkpoint", Option("map"))
            raise usage_error(what, "a recipe starts from a converted model", hint)
        is_shipped = not path.exists() and shipped.is_file()
        recipe = load_recipe(shipped if is_shipped else path, overrides).recipe
        model, origin, manifest = _read_start(recipe.model, options, observer)
    else:
        if options["config"] is None:
            _check_name(target)
        model, origin, manifest = _read_checkpoint(target, options, observer)
        # Without a recipe, fsdp takes all devices: it splits parameters, moments and the batch.
        mesh = manifest.mesh or ("1,-1,1" if number else "1,1,1")
        recipe = complete_recipe(_default_recipe(target, model, mesh), overrides).recipe
    model = model.of_recipe(recipe.model)
    if is_recipe:
        # Its data and tokenizer may be on another machine. The recipe of a checkpoint has a placeholder.
        check_inputs(recipe, may_be_absent=True)
    check_model(recipe, model)
    rule_texts = recipe.rules if recipe.rules is not None else manifest.rules
    observer.note(f"shapes from {origin}")
    return PlanTarget(
        recipe=recipe,
        model=model,
        rules=merge_rules(rule_texts, origin=Key("rules")),
        rule_texts=tuple(rule_texts),
        is_recipe=is_recipe,
    )


def _check_name(name: str) -> None:
    """Raise UsageError for a misspelled name of a shipped recipe, but no path, alias, hub id or preset."""
    if (
        NAME_SIGNS & {*name}
        or os.path.exists(name)
        or name in ALIASES_BY_NAME
        or preset_name(name) is not None
    ):
        return
    folders = [path.name for path in Path().iterdir() if path.is_dir()]
    if similar := similar_recipe(name, [*ALIASES_BY_NAME, *folders]):
        why = "not a folder here, not a shipped recipe, not an alias, and a hub id has the form owner/name"
        raise usage_error(
            f"no recipe or checkpoint called `{name}`", why, f"did you mean `{similar}`?"
        )


def _read_start(table: Model, options: PlanOptions, observer: Observer) -> _Start:
    """Read the start model of a recipe."""
    if table.path is not None:
        return _read_checkpoint(table.path, options, observer)
    if options["config"] is not None:
        config = Path(options["config"])
        return model_of_config(read_config(config)), str(config), NO_MANIFEST
    origin = f"{table.preset or table.config}, random start"
    return model_of_config(random_config(table)), origin, NO_MANIFEST


def _read_checkpoint(name: str, options: PlanOptions, observer: Observer) -> _Start:
    """Read the model from `config`, the checkpoint's headers, or the published configs if the path does not exist."""
    access = make_access(observer, offline=options["offline"], stream=True, allow_urls=True)
    config = None if options["config"] is None else Path(options["config"])
    if options["map"] is not None:
        tensor_map = read_map(Path(options["map"]))
        contents = read_mapped_contents(locate(name, access=access), config, tensor_map)
        return _stored_model(contents), contents.display_name, NO_MANIFEST
    if config is not None:
        path = config / "config.json" if config.is_dir() else config
        return model_of_config(read_config(path)), str(path), NO_MANIFEST
    # An existing folder wins over a preset of the same name, because its shapes may differ from the published config.
    preset = None if os.path.exists(os.path.expanduser(name)) else preset_name(name)
    if preset is not None:
        origin = f"the published config of {preset}"
        return model_of_config(PRESETS[preset]), origin, NO_MANIFEST
    contents = read_contents(locate(name, access=access))
    if not contents.config:
        why = f"{contents.display_name} has no config.json"
        hint = text("{}", Option("config", "CONFIG.json"))
        raise PrepError("the shapes of the model are unknown", why, hint)
    if contents.manifest.is_tree:
        model = model_of_manifest(contents.manifest)
        return model, contents.display_name, contents.manifest
    return _stored_model(contents), contents.display_name, NO_MANIFEST


def _stored_model(contents: CheckpointContents) -> PlannedModel:
    """Return the model of the config and the tensors of a checkpoint without a manifest."""
    head_tensor = family_of(contents.config).tying.head_tensor
    # Some families use a stored head although the config ties it. It then counts as a parameter of its own.
    has_stored_head = head_tensor in {entry.name for entry in contents.entries}
    return model_of_config(contents.config, has_stored_head=has_stored_head)


def _default_recipe(name: str, model: PlannedModel, mesh: str) -> RawRecipe:
    """Return a recipe with default settings for a model."""
    arch_config = family_of(model.config).arch_config(model.config)
    tables = {
        "mesh": mesh,
        "model": {
            "path": name,
            "dtype": "bfloat16",
            "remat_policy": "nothing_saveable",
            "attention_kernel": "blockwise",
            "scan_layers": model.scan,
        },
        "data": _default_data(arch_config),
        "batch": {"per_replica": 1},
        # Recipes require a learning rate and a number of steps. The plan of one step depends on neither.
        "optimizer": {"lr": 1e-4},
        "train": {"steps": 1},
    }
    return RawRecipe(Path("plan.toml"), tables)


def _default_data(arch_config: ArchConfig) -> TomlTable:
    """Return the `[data]` table of the default recipe."""
    # `max_positions` is 0 for T5, which has relative positions and no limit.
    length = min(arch_config.max_positions or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    if arch_config.encoder is None:
        return {"type": "text", "path": "data", "seq_length": length}
    source = {"fields": "[source], target", "source_length": DEFAULT_SOURCE_LENGTH}
    return {"type": "json", "path": "data", "seq_length": length, **source}


# --- Compilation


def compile_step(
    target: PlanTarget,
    training_plan: TrainingPlan,
    kind: Accelerator | None,
    *,
    limit_s: float | None,
    observer: Observer,
) -> CompiledStep:
    """Compile the training step of a plan.

    Raises:
        PrepError: libtpu is missing, no slice has the number of chips, or the step does not compile within the limit.
    """
    # Only a compilation needs jax.
    from trainer.distributed.compilation import CompileWatch
    from trainer.training.compiled_plan import compiled_plan

    mesh = training_plan.mesh
    recipe = training_plan.recipe
    count = num_slices(training_plan.slices)
    topology = None
    hardware = f"{mesh.n_devices:,} simulated CPU devices"
    if kind is not None and kind.name in TPU_GENERATIONS:
        # The compiler needs the topology of each slice: 64 chips of v4 in 2 slices are two times `2x4x4`.
        topology = find_topology(kind.name, mesh.n_devices // count)
        hardware = topology if count == 1 else f"{count} x {topology}"
    observer.note(f"compiling for {hardware}")
    manifest = {**target.model.manifest(mesh, target.rules), "rules": list(target.rule_texts)}

    def note_phase(phase: str, elapsed_s: float) -> None:
        observer.note(f"{phase}, {format_duration(elapsed_s)} since the start")

    plan = compiled_plan(recipe, manifest, mesh, topology, watch=CompileWatch(note_phase, limit_s))
    inputs = training_plan.inputs
    if plan.is_upper_bound:
        # CPUs compute in float32, and keep several layers at once.
        inputs = replace(inputs, itemsize=FLOAT32, plans_for_cpu=True)
    return CompiledStep(plan, estimate_memory(inputs).peak)


@dataclass(frozen=True, slots=True)
class FittingMeshes:
    """The meshes of a number of devices on which a step fits, the fastest first."""

    kind: Accelerator
    num_devices: int
    search: MeshSearch


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
    kind, number = _parse_devices(options)
    _check_compile_timeout(options)
    html = options["html"]
    if html is not None:
        check_page_path(Path(html))
    planned = _resolve_target(str(target), options, number, observer)
    mesh = _fill_open_mesh_axis(planned.recipe.mesh, kind, number)
    recipe = with_overrides(planned.recipe, {"mesh": mesh})
    device = kind.device if kind else ANY_ACCELERATOR

    def replan(values: Mapping[str, object]) -> TrainingPlan:
        changed = with_overrides(recipe, values)
        return plan_training(changed, planned.model, planned.rules, device=device)

    training_plan = replan({})
    for warning in context_warnings(recipe, training_plan.inputs):
        observer.warn(warning)
    compiled = None
    if options["compile"]:
        limit_s = options["compile_timeout"]
        compiled = compile_step(planned, training_plan, kind, limit_s=limit_s, observer=observer)
    shown_kinds = [kind] if kind else ACCELERATORS.values()
    kinds = tuple(map(training_plan.estimate_on, shown_kinds))
    step = StepPlan(
        training_plan,
        kinds,
        is_too_large=kind is not None and not kinds[0].fits,
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
            advice=MEMORY_ADVICE if step.is_too_large else "",
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

    Raises:
        UsageError: An argument or the recipe is invalid.
        PrepError: The model is unknown.
    """
    observer = observer_of(progress)
    kind, num_devices = _parse_devices(options)
    _check_compile_timeout(options)
    if kind is None:
        needed = Option("devices", "KIND")
        raise usage_error(
            text("{} has no effect without {}", Option("search"), needed),
            "a mesh fits into the memory of a kind of device",
            text("add {}, or remove {}", needed, Option("search")),
        )
    _check_search_options(options, num_devices)
    planned = _resolve_target(str(target), options, num_devices, observer)
    if not num_devices:
        # `--devices v5p` names no number, so the recipe's mesh decides.
        mesh = _fill_open_mesh_axis(planned.recipe.mesh, kind, num_devices)
        num_devices = parse_mesh(mesh).n_devices
    search = search_meshes(
        planned.recipe, planned.model, planned.rules, kind=kind, num_devices=num_devices
    )
    return FittingMeshes(kind, num_devices, search)


def _check_compile_timeout(options: PlanOptions) -> None:
    """Raise UsageError for a time limit without a compilation."""
    if not options["compile"]:
        why = "it limits the time of a compilation"
        timeout = options["compile_timeout"]
        reject_without(Option("compile_timeout"), timeout, Option("compile", True), why)


def _check_search_options(options: PlanOptions, number: int | None) -> None:
    """Raise UsageError for options without effect on a search."""
    conflicts = (
        ("compile", options["compile"], "a compilation is of one mesh"),
        ("html", options["html"] is not None, "a page shows one plan"),
        (
            "mesh",
            options["mesh"] is not None and number,
            "a search tries every mesh of the devices",
        ),
    )
    for name, is_set, why in conflicts:
        if is_set:
            what = text("{} has no effect with {}", Option(name), Option("search"))
            raise usage_error(what, why, text("remove {}", Option(name)))


def _parse_devices(options: PlanOptions) -> tuple[Accelerator | None, int | None]:
    """Return kind and number of the requested accelerators. Each is None if the request omits it."""
    devices = options["devices"]
    return (None, None) if devices is None else parse_devices(devices)


def _fill_open_mesh_axis(mesh: str, kind: Accelerator | None, number: int | None) -> str:
    """Return a mesh without -1. The number of devices determines the size of that axis."""
    parsed = parse_mesh(mesh, Key("mesh"))
    if number is not None:
        prefix = f"{kind.name}:" if kind else ""
        origin = text("{}", Option("devices", f"{prefix}{number}"))
        return str(resolve_mesh(parsed, number, origin))
    if -1 in parsed.sizes:
        devices_option = Option("devices", "256")
        hint = text("{} or `v5p:256`, or {} without -1", devices_option, Option("mesh"))
        why = "an axis of size -1 takes all devices that the other axes leave"
        raise usage_error(f"mesh {parsed} needs the number of devices", why, hint)
    return str(parsed)
