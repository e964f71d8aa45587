"""The preparation of a training run: checks of the recipe, the model and the machine, tokens, and the job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.conversion import make_access
from prepcli.commands.train_checks import check_machine, disk_warnings
from prepcli.commands.train_data import DataFinder
from prepcli.commands.train_files import changed_keys
from prepcli.commands.train_folder import TOKENS_FOLDER
from prepcli.commands.train_report import tokenize_progress
from prepcli.commands.train_run import Run, TrainRequest
from prepcli.commands.train_start import StartCheckpoint
from prepcli.console.ui import Ui
from prepcli.targets.training_step import StartModel
from trainer.planning.model_shapes import model_of_manifest
from trainer.planning.step_inputs import run_dropout
from trainer.planning.training_plan import with_values
from trainer.recipe import LoadedRecipe, recipe_to_toml

if TYPE_CHECKING:
    from trainer.distributed.process_group import ProcessGroup
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ModelSpec


def prepare_run(
    loaded: LoadedRecipe,
    folder: Path,
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
        folder: Folder of the run.
        start: Open start checkpoint.
        sharding: Devices and rules of the run.
        scratch_dir: Folder for missing tokens in a dry run, which must not write to the run's folder; else None.
        request: Request of the command.
        ui: Receives notes, warnings and progress.
        group: Processes of the run.

    Raises:
        PrepError: The recipe does not fit the model, the machine, the data or the run so far.
    """
    from trainer.training import setup
    from trainer.training.attention_choice import choose_kernel
    from trainer.training.datasets import build_datasets

    recipe, step = loaded.recipe, _resume_step(folder, start)
    manifest = start.manifest if step else setup.override_config(start.manifest, recipe)
    model = setup.model_from_manifest(manifest)
    setup.check_model_layout(recipe, model, sharding)
    setup.check_seq_length(recipe.data, model)
    dropout = run_dropout(recipe, manifest["config"])
    kernel = choose_kernel(recipe, model, sharding, warn=ui.warn, dropout=dropout)
    memory = check_machine(
        with_values(recipe, {"model.attention_kernel": kernel.name}),
        model_of_manifest(manifest),
        sharding,
        folder=folder,
        group=group,
        ui=ui,
        is_dry_run=request.dry_run,
        force=request.force,
    )
    folders = {"tokenizer": start.tokenizer_folder, "cache": folder / TOKENS_FOLDER}
    if scratch_dir is not None:
        folders["spare"] = scratch_dir
    datasets = build_datasets(
        recipe,
        model,
        manifest=manifest,
        folders=folders,
        group=group,
        remote=DataFinder(make_access(ui, offline=request.offline), ui.note),
        progress=tokenize_progress(ui),
        note=ui.note,
    )
    job = setup.build_job(
        recipe,
        model,
        sharding=sharding,
        kernel=kernel.name,
        datasets=datasets,
        dropout=dropout,
        manifest_fields={"recipe": recipe_to_toml(recipe, loaded.origins)},
        stop_after=request.stop_after,
    )
    run = Run(
        loaded,
        folder,
        start_checkpoint=start.model,
        step=step,
        config=manifest["config"],
        job=job,
        kernel=kernel,
        memory=memory,
        group=group,
    )
    if group.index == 0:  # the others may not see the run's folder
        _check_job(run, manifest, model, ui)
    return run


def _check_job(run: Run, manifest: Mapping[str, Any], model: ModelSpec, ui: Ui) -> None:
    """Check that the job may continue the run, and print warnings about the recipe and the disk."""
    from trainer.training.preflight import run_warnings
    from trainer.training.resume import check_resumable

    folder, recipe, job, step = run.folder, run.recipe, run.job, run.step
    if step:
        check_resumable(manifest, job, changed=changed_keys(folder, recipe), step=step)
    for warning in (*run_warnings(recipe, job), *disk_warnings(folder, recipe, model.leaves, job.steps - step)):
        ui.warn(warning)


def _resume_step(folder: Path, start: StartCheckpoint) -> int:
    """Return the step to resume from; 0 if the checkpoint is not a step of this run."""
    if isinstance(start.model, StartModel) or folder.resolve() not in start.model.resolve().parents:
        return 0
    return int(start.manifest["step"]) if start.manifest.get("kind") == "train" else 0
