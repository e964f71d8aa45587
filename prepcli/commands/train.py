"""`prep train`: train with a recipe, from the recipe's checkpoint or from the last step of the run."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import signal
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prepcli.commands.conversion import make_access
from prepcli.commands.machine import free_memory
from prepcli.commands.random_start import RandomReader
from prepcli.commands.recipes import find_training_recipe
from prepcli.commands.train_checks import check_config
from prepcli.commands.train_data import DataFinder
from prepcli.commands.train_display import open_display
from prepcli.commands.train_environment import write_environment
from prepcli.commands.train_exports import (
    check_repository,
    make_missing_exports,
    missing_note,
    push_last_step,
    remove_exports,
    step_exports,
)
from prepcli.commands.train_files import kept_note, write_recipe
from prepcli.commands.train_folder import (
    check_last_step,
    check_shared_folder,
    explain_removed_step,
    hold_run,
    run_place,
)
from prepcli.commands.train_lora import base_facts, check_base, with_adapters
from prepcli.commands.train_metrics import check_logs, open_metrics
from prepcli.commands.train_prepare import prepare_run
from prepcli.commands.train_processes import JobContext, compare_settings, compare_start, connect_processes
from prepcli.commands.train_report import TrainReporter, rounding_text, run_summary_lines
from prepcli.commands.train_result import dry_run_report, finished_report, stopped_report
from prepcli.commands.train_run import Run, TrainRequest
from prepcli.commands.train_samples import open_sample_log
from prepcli.commands.train_start import StartCheckpoint, check_restart_source, open_last_step, open_model_start
from prepcli.commands.train_together import run_together
from prepcli.console.job_errors import label_errors
from prepcli.console.ui import SLABS, Report, Ui
from prepcli.errors import PrepError, UsageError
from prepcli.execution.joint_work import joint_work
from prepcli.execution.kept_steps import KeepRule
from prepcli.execution.run_folder import RunFolder
from prepcli.execution.run_place import RunPlace
from prepcli.execution.signals import note_durable_work, raise_on_signal, remember_signal
from prepcli.execution.step_exports import StepExports
from prepcli.formats.run_steps import EVAL_SEQUENCES
from trainer.recipe import LoadedRecipe, load_recipe, schema

if TYPE_CHECKING:
    from trainer.distributed.process_group import ProcessGroup
    from trainer.distributed.sharding import ShardingContext
    from trainer.training.loop import RunResult
    from trainer.training.profiling import StepProfiler
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
    loaded = load_recipe(find_training_recipe(request.recipe), request.overrides)
    request.token_functions.check(loaded.recipe)
    silence_jax(ui)
    from trainer.distributed.exact_backend import start_exact_backend
    from trainer.distributed.sharding import catch_out_of_memory
    from trainer.distributed.start import check_local_devices

    group = connect_processes(loaded.recipe)
    process = group.index if group.count > 1 else None
    process_ui = ui.for_process(process, all_print=loaded.recipe.log.all_workers)
    place = run_place(request.out, loaded.recipe, process_ui)
    together = run_together(
        group,
        loaded.recipe.cluster,
        process_ui,
        has_saved_step=lambda: bool(place.known_steps()),
        describe_durable=lambda: "" if request.dry_run else kept_note(place),
    )
    with label_errors(process), together as enter_phase, catch_out_of_memory():
        enter_phase("load")
        compare_settings(group, loaded.recipe, _shared_options(request), process_ui)
        if loaded.recipe.train.reduction == "exact":
            start_exact_backend()
        if loaded.recipe.cluster.n_local_devices is not None:
            check_local_devices(loaded.recipe.cluster.n_local_devices)
        job = JobContext(group, process_ui, enter_phase)
        return replace(_train_in_group(loaded, place, request, job=job), process=process)


def _train_in_group(loaded: LoadedRecipe, place: RunPlace, request: TrainRequest, *, job: JobContext) -> Report:
    """Check the place of the run, and train with its lock held."""
    group, ui = job.group, job.ui
    if group.index == 0:
        place.check(group.count)
        check_logs(loaded.recipe.log, place)
    if group.count > 1 and place.is_on_disk and not request.dry_run:
        check_shared_folder(place.local_folder, group)
    if not place.is_on_disk:
        ui.note(f"tokens and metrics are written to {place.local_folder} first; `data.cache` names a folder for tokens")
    lock = nullcontext() if request.dry_run else hold_run(place, group, ui.warn)
    with lock:
        return _train_locked(loaded, place, request, job=job)


def _train_locked(loaded: LoadedRecipe, place: RunPlace, request: TrainRequest, *, job: JobContext) -> Report:
    """Prepare the run, load its state and train. No other process changes the run, unless its place has no lock."""
    group, ui = job.group, job.ui
    with (
        raise_on_signal(),
        note_durable_work(lambda: "" if request.dry_run else kept_note(place)),
        ExitStack() as stack,
    ):
        start, sharding = _open_start_checkpoint(loaded, place, request, group=group, ui=ui)
        stack.enter_context(start.reader)
        if start.adapters is not None:
            stack.enter_context(start.adapters)
        if not (request.dry_run or start.resume_step):
            check_repository(loaded.recipe.checkpoint, group, ui)  # before the data is tokenized
        scratch_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prep-"))) if request.dry_run else None
        run = prepare_run(
            loaded,
            place,
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
            with note_durable_work(lambda: missing_note(run)):
                make_missing_exports(run, ui)
                return push_last_step(run, finished_report(run), ui)
        if run.step:  # only now it is known whether the run is finished
            check_repository(run.recipe.checkpoint, group, ui)
        if request.verify:
            start.check_remaining(ui, has_state=bool(run.step))
        with explain_removed_step(place, run.step), start.rename_in_errors():
            state = _load_train_state(run, start, ui)
        if start.lora is not None:
            assert run.recipe.model.path is not None
            facts = base_facts(state, run.job.setup.model, start, name=run.recipe.model.path)
            if run.step:
                check_base(start.state_reader.manifest, facts)
            job_fields = {**run.job.manifest_fields, **facts}
            run = replace(run, job=replace(run.job, manifest_fields=job_fields))
    with (
        raise_on_signal(),
        note_durable_work(lambda: kept_note(place)),
        note_durable_work(lambda: missing_note(run)),
    ):
        return _run_training(run, state, restart=request.restart, job=job)


def _shared_options(request: TrainRequest) -> dict[str, object]:
    """Return the options that all processes of a run must share."""
    return {
        "--restart": request.restart,
        "--stop-after": request.stop_after,
        "--dry-run": request.dry_run,
        "--stream": request.stream,
        "--no-verify": not request.verify,
        **request.token_functions.manifest_fields,
    }


def recipe_schema() -> Report:
    """Report the JSON schema of recipes."""
    return Report(json.dumps(schema(), indent=2))


def silence_jax(ui: Ui) -> None:
    """Hide the log messages of jax, such as warnings about missing accelerators, unless `-vv` is set."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if ui.level >= SLABS else "3")
    logging.getLogger("jax").setLevel(logging.INFO if ui.level >= SLABS else logging.ERROR)


def _open_start_checkpoint(
    loaded: LoadedRecipe, place: RunPlace, request: TrainRequest, *, group: ProcessGroup, ui: Ui
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
    try:
        recipe_sharding = make_sharding_context(mesh, recipe_rules, slices=slices)
    except UsageError as error:
        if not request.dry_run:
            raise
        plan_command = f"prep plan {shlex.quote(str(request.recipe))}"
        raise replace(error, hint=f"{error.hint}, or without devices: `{plan_command}`") from None
    check_inputs(loaded.recipe, DataFinder(make_access(ui, offline=request.offline), ui.note))
    check_devices(loaded.recipe, recipe_sharding)
    lora, last_step = loaded.recipe.lora, _last_step(place, request, group)
    if last_step and not lora.is_enabled:
        start = open_last_step(place, last_step, verify=request.verify)
    else:
        start = open_model_start(
            loaded.recipe,
            sharding=recipe_sharding,
            access=make_access(ui, offline=request.offline, stream=request.stream, allow_urls=True),
            verify=request.verify,
            check_config=partial(
                check_config, recipe=loaded.recipe, sharding=recipe_sharding, ui=ui, force=request.force
            ),
        )
    if lora.is_enabled:
        start = with_adapters(start, lora, place, last_step=last_step, verify=request.verify)
    if request.restart:
        check_restart_source(start, place, loaded.recipe)
    sharding = make_sharding_context(mesh, partition_rules(loaded.recipe, start.manifest), slices=slices)
    check_batch(loaded.recipe, sharding)
    return start, sharding


def _last_step(place: RunPlace, request: TrainRequest, group: ProcessGroup) -> int:
    """Return the step to resume from, as process 0 sees the run; 0 to start from the recipe's checkpoint."""
    steps = [] if request.restart else place.steps()
    return int(group.broadcast("last step", str(steps[-1] if steps else 0)))


def _load_train_state(run: Run, start: StartCheckpoint, ui: Ui) -> TrainState:
    """Read the state to resume from, or initialize it with the start checkpoint's parameters or random ones."""
    from trainer.training.loading import init_state, random_state, restore_state
    from trainer.training.step import has_optimizer_state

    base, reader = start.reader, start.state_reader
    if isinstance(base, RandomReader) or isinstance(reader, RandomReader):
        return random_state(run.job.setup, run.recipe.seed)
    if not run.step:
        return init_state(
            base, run.job.setup, start.adapters, on_rounding=lambda counts: ui.note(rounding_text(counts))
        )
    is_saved = any(name.startswith("opt_state.") for name in reader.leaves)
    if not is_saved and has_optimizer_state(run.job.setup):
        why = "it was saved with `checkpoint.optimizer_state = false`"
        raise PrepError(f"step {run.step} has no optimizer state to resume from", why, _new_run_hint(run))
    cast = reader.manifest.get("param_cast")
    if cast is not None and cast["to"] != run.recipe.model.param_dtype:
        why = f"they were cast to {cast['to']}, the `checkpoint.dtype` of the run"
        raise PrepError(f"step {run.step} has no exact parameters to resume from", why, _new_run_hint(run))
    return restore_state(reader, run.job.setup, None if start.adapters is None else base)


def _new_run_hint(run: Run) -> str:
    """Return the hint for a step to start from, but not to resume from."""
    return f"`--restart`, or another `name` and `--set model.path={run.place.step_name(run.step)}`"


def _run_training(run: Run, state: TrainState, *, restart: bool, job: JobContext) -> Report:
    """Train, and save to the place of the run under its lock."""
    sharding = run.job.setup.forward_config.sharding
    with open_display(job.ui, run) as display:
        reporter, exports = TrainReporter(display), step_exports(run, job.ui)
        with _open_store(run, str(sharding.mesh), job.ui, exports=exports) as store:
            with joint_work(run.group, "last-step"):  # before any process changes its file of metrics
                if run.group.index == 0 and not restart:
                    check_last_step(run.place, run.step)
            if restart:  # only after all checks, and while the lock keeps other processes out
                store.clear()
                remove_exports(run)
            if exports is not None:
                exports.start_missing(store.steps())
            if run.group.index == 0:
                write_recipe(run)
                write_environment(run)
            result = _take_steps(run, state, store, job=job, reporter=reporter)
            if exports is not None and result.stop_reason:
                exports.abandon()
    if result.stop_reason:
        return stopped_report(run, result, reporter.fields)
    return push_last_step(run, finished_report(run, reporter.fields), job.ui)


def _take_steps(
    run: Run, state: TrainState, store: RunFolder, *, job: JobContext, reporter: TrainReporter
) -> RunResult:
    """Take the remaining steps of a run."""
    from trainer.training.loop import Loop

    def enter_phase(phase: str) -> None:
        reporter.display.on_phase(phase)
        job.enter_phase(phase)

    with (
        open_metrics(run, job.ui.warn) as metrics,
        open_sample_log(run) as sample_log,
        remember_signal() as stop_signal,
    ):
        result = Loop(
            run.job,
            state,
            store=store,
            metrics=metrics,
            sample_log=sample_log,
            callbacks=reporter,
            poll_stop_reason=stop_signal,
            enter_phase=enter_phase,
            best_eval_loss=_best_eval_loss(run, store),
            profiler=_profiler(run, job.ui),
            warn=job.ui.warn,
        ).run()
    if stop_signal() and not result.stop_reason and missing_note(run):
        signal.raise_signal(signal.Signals[stop_signal()])  # it came too late to stop the steps
    return result


def _best_eval_loss(run: Run, store: RunFolder) -> float:
    """Return the lowest comparable loss of a saved step, as process 0 sees the run; infinity without one."""
    if not run.job.saves_best:
        return math.inf
    num_sequences = run.job.manifest_fields.get(EVAL_SEQUENCES)
    best = store.best_eval_loss(num_sequences) if run.group.index == 0 else math.inf
    return float(run.group.broadcast("best loss", repr(best)))


def _profiler(run: Run, ui: Ui) -> StepProfiler | None:
    """Return the profiler of process 0; None if the recipe records no steps."""
    from trainer.training.profiling import PROFILE_FOLDER, StepProfiler

    profile = run.recipe.train.profile
    if profile is None or run.group.index > 0:
        return None
    return StepProfiler(profile["start"], profile["steps"], run.folder / PROFILE_FOLDER, ui.warn)


def _open_store(run: Run, mesh: str, ui: Ui, *, exports: StepExports | None) -> RunFolder:
    checkpoint = run.recipe.checkpoint
    return RunFolder(
        run.place,
        run.start_checkpoint,
        name=run.recipe.name,
        keep=KeepRule(checkpoint.keep, checkpoint.milestones, checkpoint.best is not None),
        exports=exports,
        config=run.config,
        mesh=mesh,
        rules=run.recipe.rules,
        lora=run.lora,
        group=run.group,
        free_memory_nbytes=lambda: None if (free := free_memory()) is None else free // run.processes_per_host,
        note=ui.warn,
    )
