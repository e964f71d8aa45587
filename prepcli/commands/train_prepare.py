"""The preparation of a training run: checks of the recipe, the model and the machine, tokens, and the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.conversion import make_access
from prepcli.commands.train_checks import check_machine, disk_warnings
from prepcli.commands.train_data import DataFinder
from prepcli.commands.train_environment import ENVIRONMENT_KEY, environment_warning, rounding_environment
from prepcli.commands.train_files import changed_keys
from prepcli.commands.train_lora import frozen_dtypes
from prepcli.commands.train_report import tokenize_progress
from prepcli.commands.train_run import Run, TrainRequest
from prepcli.commands.train_samples import build_sampler
from prepcli.commands.train_start import StartCheckpoint
from prepcli.console.ui import Ui
from prepcli.execution.run_place import TOKENS_FOLDER, RunPlace
from trainer.planning.model_shapes import model_of_manifest
from trainer.planning.step_inputs import run_dropout
from trainer.planning.training_plan import with_values
from trainer.recipe import LoadedRecipe, Recipe, recipe_to_toml

if TYPE_CHECKING:
    from trainer.distributed.process_group import ProcessGroup
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ModelSpec
    from trainer.training.source_datasets import Datasets


def prepare_run(
    loaded: LoadedRecipe,
    place: RunPlace,
    *,
    start: StartCheckpoint,
    sharding: ShardingContext,
    scratch_dir: Path | None,
    request: TrainRequest,
    ui: Ui,
    group: ProcessGroup,
) -> Run:
    """Check the recipe against the model and the machine, tokenize the data, and build the job.

    Args:
        loaded: Recipe and the origins of its values.
        place: Place of the run.
        start: Open start checkpoint.
        sharding: Devices and rules of the run.
        scratch_dir: Folder for missing tokens in a dry run, which must not write to the run's folder; else None.
        request: Request of the command.
        ui: Receives notes, warnings and progress.
        group: Processes of the run.

    Raises:
        PrepError: The recipe does not fit the model, the machine, the data or the run so far.
    """
    from trainer.distributed import hosts
    from trainer.training import setup
    from trainer.training.attention_choice import choose_kernel
    from trainer.training.datasets import build_datasets

    recipe = loaded.recipe
    manifest, model = _start_model(recipe, start, sharding)
    dropout = run_dropout(recipe, manifest["config"])
    kernel = choose_kernel(recipe, model, sharding, warn=ui.warn, dropout=dropout)
    processes_per_host = hosts.processes_per_host(group)
    memory = check_machine(
        with_values(recipe, {"model.attention_kernel": kernel.name}),
        model_of_manifest(manifest),
        sharding,
        place=place,
        group=group,
        processes_per_host=processes_per_host,
        ui=ui,
        is_dry_run=request.dry_run,
        force=request.force,
    )
    sampler = build_sampler(recipe, model, manifest["config"], files=start.tokenizer_folder, sharding=sharding)
    build = partial(build_datasets, recipe, model, manifest=manifest, group=group)
    datasets = _tokenize(build, _token_folders(start, place, scratch_dir), ui, offline=request.offline)
    job = setup.build_job(
        recipe,
        model,
        sharding=sharding,
        kernel=kernel.name,
        datasets=datasets,
        dropout=dropout,
        manifest_fields=_manifest_fields(loaded, sharding),
        token_functions=request.token_functions,
        stop_after=request.stop_after,
        frozen_dtypes={} if start.lora is None else frozen_dtypes(start, model, recipe.lora.base_dtype),
        sampler=sampler,
    )
    run = Run(
        loaded,
        place,
        start_checkpoint=start.model,
        step=start.resume_step,
        config=manifest["config"],
        job=job,
        kernel=kernel,
        memory=memory,
        group=group,
        processes_per_host=processes_per_host,
        lora=start.lora,
    )
    if group.index == 0:  # the others may not see the run's folder
        _check_job(run, start.state_reader.manifest, model, ui)
    return run


def _start_model(
    recipe: Recipe, start: StartCheckpoint, sharding: ShardingContext
) -> tuple[Mapping[str, Any], ModelSpec]:
    """Return the manifest of the start checkpoint, with the recipe's changes, and its model; check the model."""
    from trainer.training import setup

    is_own_step = start.resume_step > 0 and start.lora is None  # its manifest has the changes already
    manifest = start.manifest if is_own_step else setup.override_config(start.manifest, recipe)
    model = setup.model_from_manifest(manifest)
    setup.check_model_layout(recipe, model, sharding)
    setup.check_seq_length(recipe.data, model)
    return manifest, model


def _manifest_fields(loaded: LoadedRecipe, sharding: ShardingContext) -> dict[str, Any]:
    """Return the entries of the manifests of steps that do not depend on the step."""
    text = recipe_to_toml(loaded.recipe, loaded.origins)
    return {"recipe": text, ENVIRONMENT_KEY: rounding_environment(sharding)}


def _tokenize(build: Callable[..., Datasets], folders: Mapping[str, Path], ui: Ui, *, offline: bool) -> Datasets:
    """Tokenize the data with progress; `build` is `build_datasets` with its other arguments."""
    remote = DataFinder(make_access(ui, offline=offline), ui.note)
    return build(folders=folders, remote=remote, progress=tokenize_progress(ui), note=ui.note)


def _token_folders(start: StartCheckpoint, place: RunPlace, scratch_dir: Path | None) -> dict[str, Path]:
    """Return the folders of the tokenizer and of tokens; see `build_datasets`."""
    folders = {"tokenizer": start.tokenizer_folder, "cache": place.local_folder / TOKENS_FOLDER}
    return folders if scratch_dir is None else {**folders, "spare": scratch_dir}


def _check_job(run: Run, manifest: Mapping[str, Any], model: ModelSpec, ui: Ui) -> None:
    """Check that the job may continue the run, and print warnings about the recipe and the disk."""
    from trainer.training.preflight import run_warnings
    from trainer.training.resume import check_resumable

    recipe, job, step = run.recipe, run.job, run.step
    if step:
        check_resumable(manifest, job, changed=changed_keys(run.place.recipe_file(), recipe), step=step)
    if 0 < step < job.steps:
        before, now = manifest.get(ENVIRONMENT_KEY), job.manifest_fields[ENVIRONMENT_KEY]
        if warning := environment_warning(before, now, step=step):
            ui.warn(warning)
    for warning in run_warnings(recipe, job, last_step=step):
        ui.warn(warning)
    num_steps = job.steps - step
    for warning in disk_warnings(run.folder, recipe, model.trained_leaves, num_steps) if run.place.is_on_disk else ():
        ui.warn(warning)
