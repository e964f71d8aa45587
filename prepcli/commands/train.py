"""`prep train`: train with a recipe, from the recipe's checkpoint or from the last step of the run."""

from __future__ import annotations

import json
import logging
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prepcli.commands.conversion import make_access
from prepcli.commands.machine import free_memory
from prepcli.commands.random_start import RandomReader
from prepcli.commands.train_checks import check_config
from prepcli.commands.train_display import open_display
from prepcli.commands.train_environment import write_environment
from prepcli.commands.train_files import RUNS_FOLDER, kept_note, write_recipe
from prepcli.commands.train_folder import check_run_folder, check_shared_folder
from prepcli.commands.train_metrics import open_metrics
from prepcli.commands.train_prepare import prepare_run
from prepcli.commands.train_processes import JobContext, compare_settings, compare_start, connect_processes
from prepcli.commands.train_report import TrainReporter, run_summary_lines
from prepcli.commands.train_result import dry_run_report, finished_report, stopped_report
from prepcli.commands.train_run import Run, TrainRequest
from prepcli.commands.train_start import StartCheckpoint, check_restart_source, open_model_start, open_orbax_start
from prepcli.commands.train_together import run_together
from prepcli.console.job_errors import label_errors
from prepcli.console.ui import SLABS, Report, Ui
from prepcli.errors import PrepError
from prepcli.execution.run_folder import RunFolder
from prepcli.execution.signals import note_durable_work, raise_on_signal, remember_signal
from prepcli.formats.run_steps import saved_steps, step_folder
from prepcli.restore.item_reader import ItemReader
from prepcli.restore.weights_reader import WeightsReader
from trainer.recipe import LoadedRecipe, load_recipe, schema

if TYPE_CHECKING:
    from trainer.distributed.process_group import ProcessGroup
    from trainer.distributed.sharding import ShardingContext
    from trainer.training.step import TrainState


def train(request: TrainRequest, ui: Ui) -> Report:
    """Train until the recipe's last step or a signal, and save the last step.

    In a job of several processes, all of them call it. Process 0 alone writes the run's files and prints its lines.

    Args:
        request: Recipe, overrides and folder of the run.
        ui: Receives notes, warnings and progress.

    Returns:
        Report with the last step's folder and metrics. It has an error if the run was stopped before its last step.

    Raises:
        PrepError: The recipe, the checkpoint, the data or the devices are invalid, or training failed.
    """
    loaded = load_recipe(request.recipe, request.overrides)
    silence_jax(ui)
    from trainer.distributed.sharding import catch_out_of_memory

    group = connect_processes(loaded.recipe)
    folder = request.out or RUNS_FOLDER / loaded.recipe.name
    process = group.index if group.count > 1 else None
    process_ui = ui.for_process(process, all_print=loaded.recipe.log.all_workers)
    together = run_together(group, loaded.recipe.cluster, process_ui, has_saved_step=lambda: bool(saved_steps(folder)))
    with label_errors(process), together as enter_phase, catch_out_of_memory():
        enter_phase("load")
        compare_settings(group, loaded.recipe, _shared_options(request), process_ui)
        job = JobContext(group, process_ui, enter_phase)
        return replace(_train_in_group(loaded, folder, request, job=job), process=process)


def _train_in_group(loaded: LoadedRecipe, folder: Path, request: TrainRequest, *, job: JobContext) -> Report:
    """Prepare the run, load its state and train."""
    group, ui = job.group, job.ui
    if group.index == 0:
        check_run_folder(folder)
    if group.count > 1 and not request.dry_run:
        check_shared_folder(folder, group)
    with (
        raise_on_signal(),
        note_durable_work(lambda: "" if request.dry_run else kept_note(folder)),
        ExitStack() as stack,
    ):
        start, sharding = _open_start_checkpoint(loaded, folder, request, group=group, ui=ui)
        stack.enter_context(start.reader)
        scratch_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prep-"))) if request.dry_run else None
        run = prepare_run(
            loaded,
            folder,
            start=start,
            sharding=sharding,
            scratch_dir=scratch_dir,
            request=request,
            ui=ui,
            group=group,
        )
        compare_start(
            group,
            start.manifest,
            step=run.step,
            data_identity=run.job.manifest_fields["data"],
            kernel=run.kernel.name,
        )
        for line in run_summary_lines(run.job, run.recipe, run.step, kernel=run.kernel):
            ui.note(line)
        if request.dry_run:
            return dry_run_report(run)
        if run.step == run.job.steps:
            return finished_report(run)
        if request.verify:
            start.check_remaining(folder, ui, has_state=bool(run.step))
        state = _load_train_state(run, start.reader)
    return _run_training(run, state, restart=request.restart, job=job)


def _shared_options(request: TrainRequest) -> dict[str, object]:
    """Return the options that all processes of a run must share."""
    return {
        "--restart": request.restart,
        "--stop-after": request.stop_after,
        "--dry-run": request.dry_run,
        "--stream": request.stream,
        "--no-verify": not request.verify,
    }


def recipe_schema() -> Report:
    """Report the JSON schema of recipes."""
    return Report(json.dumps(schema(), indent=2))


def silence_jax(ui: Ui) -> None:
    """Hide the log messages of jax, such as warnings about missing accelerators, unless `-vv` is set."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if ui.level >= SLABS else "3")
    logging.getLogger("jax").setLevel(logging.INFO if ui.level >= SLABS else logging.ERROR)


def _open_start_checkpoint(
    loaded: LoadedRecipe, folder: Path, request: TrainRequest, *, group: ProcessGroup, ui: Ui
) -> tuple[StartCheckpoint, ShardingContext]:
    """Open the run's last step, or else the recipe's checkpoint; return it and the sharding of the run."""
    from trainer.distributed.sharding import make_sharding_context
    from trainer.models.mesh import parse_mesh
    from trainer.models.rule_text import merge_rules
    from trainer.models.slices import parse_slice_counts
    from trainer.training.preflight import check_batch, check_devices, check_inputs
    from trainer.training.setup import partition_rules

    mesh = parse_mesh(loaded.recipe.mesh, "mesh")
    slices = parse_slice_counts(loaded.recipe.cluster.dcn_mesh)
    recipe_rules = merge_rules(loaded.recipe.rules or (), origin="rules")
    recipe_sharding = make_sharding_context(mesh, recipe_rules, slices=slices)
    check_inputs(loaded.recipe)
    check_devices(loaded.recipe, recipe_sharding)
    if last_step := _last_step(folder, request, group):
        start = open_orbax_start(step_folder(folder, last_step), folder, verify=request.verify)
    else:
        start = open_model_start(
            loaded.recipe,
            folder,
            sharding=recipe_sharding,
            access=make_access(ui, offline=request.offline, stream=request.stream, allow_urls=True),
            verify=request.verify,
            check_config=partial(
                check_config, recipe=loaded.recipe, sharding=recipe_sharding, ui=ui, force=request.force
            ),
        )
    if request.restart:
        check_restart_source(start, folder)
    sharding = make_sharding_context(mesh, partition_rules(loaded.recipe, start.manifest), slices=slices)
    check_batch(loaded.recipe, sharding)
    return start, sharding


def _last_step(folder: Path, request: TrainRequest, group: ProcessGroup) -> int:
    """Return the step to resume from, as process 0 sees the run's folder; 0 to start from the recipe's checkpoint."""
    steps = [] if request.restart else saved_steps(folder)
    return int(group.broadcast("last step", str(steps[-1] if steps else 0)))


def _load_train_state(run: Run, reader: ItemReader | WeightsReader | RandomReader) -> TrainState:
    """Read the state to resume from, or initialize it with the start checkpoint's parameters or random ones."""
    from trainer.training.loading import init_state, random_state, restore_state

    if isinstance(reader, RandomReader):
        return random_state(run.job.setup, run.recipe.seed)
    if not run.step:
        return init_state(reader, run.job.setup)
    if not any(name.startswith("opt_state.") for name in reader.leaves):
        why = "it was saved with `checkpoint.optimizer_state = false`"
        hint = f"`--restart`, or another `name` and `--set model.path={step_folder(run.folder, run.step)}`"
        raise PrepError(f"step {run.step} has no optimizer state to resume from", why, hint)
    return restore_state(reader, run.job.setup)


def _run_training(run: Run, state: TrainState, *, restart: bool, job: JobContext) -> Report:
    """Train in the run's folder, which is locked meanwhile."""
    from trainer.training.loop import Loop

    sharding = run.job.setup.forward_config.sharding
    with (
        open_display(job.ui, run) as (ui, display),
        _open_store(run, str(sharding.mesh), ui) as store,
    ):
        reporter = TrainReporter(display)

        def enter_phase(phase: str) -> None:
            display.on_phase(phase)
            job.enter_phase(phase)

        if restart:  # only after all checks, and while the lock keeps other processes out
            store.clear()
        if run.group.index == 0:
            write_recipe(run)
            write_environment(run)
        with open_metrics(run) as metrics, remember_signal() as stop_signal:
            result = Loop(
                run.job,
                state,
                store=store,
                metrics=metrics,
                callbacks=reporter,
                poll_stop_reason=stop_signal,
                enter_phase=enter_phase,
            ).run()
    if result.stop_reason:
        return stopped_report(run, result, reporter.fields)
    return finished_report(run, reporter.fields)


def _open_store(run: Run, mesh: str, ui: Ui) -> RunFolder:
    return RunFolder(
        run.folder,
        run.start_checkpoint,
        name=run.recipe.name,
        keep=run.recipe.checkpoint.keep,
        config=run.config,
        mesh=mesh,
        rules=run.recipe.rules,
        group=run.group,
        free_memory_nbytes=lambda: None if (free := free_memory()) is None else free // run.processes_per_host,
        note=ui.warn,
    )
