"""Train with a recipe, from the recipe's checkpoint or from the last step of the run.

`train_run` connects the processes and takes the lock. `_train_locked` has all stages of the run in their order. The
other functions are in the order of their calls.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prepcli.core.errors import Command, Key, Option, PrepError, UsageError, text
from prepcli.core.observer import RunObserver
from prepcli.core.unexpected import label_errors
from prepcli.engine.machine import free_memory
from prepcli.execution.checkpoint_manager import CheckpointManager, KeepRule, StepExports
from prepcli.execution.signals import (
    note_durable_work,
    raise_on_signal,
    raise_stop,
    remember_signal,
)
from prepcli.execution.training_storage import joint_work
from prepcli.formats.run_steps import RECIPE_FILE
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.folders import make_access
from trainer.recipe import LoadedRecipe, recipe_to_toml
from trainer.run.checks import check_config
from trainer.run.continued_state import load_continued_state
from trainer.run.display import RunDisplay, make_profiler, open_display
from trainer.run.environment import write_environment
from trainer.run.export import (
    check_repository,
    describe_missing_exports,
    make_missing_exports,
    push_last_step,
    remove_exports,
    step_exports,
)
from trainer.run.metrics import (
    check_logs,
    find_lowest_cost,
    find_missing_events,
    find_patience,
    open_metrics,
    open_sample_log,
)
from trainer.run.prepare import prepare_run
from trainer.run.processes import (
    compare_settings,
    compare_start,
    connect_processes,
    run_together,
)
from trainer.run.random_start import RandomReader
from trainer.run.recipe_data import DataFinder
from trainer.run.run import PreparedRun, Run, StepExporter, TrainRequest, TrainResult
from trainer.run.start import (
    StartCheckpoint,
    base_facts,
    check_base,
    check_restart_source,
    open_last_step,
    open_model_start,
    with_adapters,
)
from trainer.run.stops import quit_run, stopped_error
from trainer.run.storage import (
    check_last_step,
    check_shared_folder,
    describe_saved_progress,
    explain_removed_step,
    hold_run,
    open_run_storage,
    write_run_file,
)
from trainer.run.summary import rounding_text, run_summary_lines

if TYPE_CHECKING:
    from trainer.distributed.sharding import ShardingContext
    from trainer.training.eval_metrics import Patience
    from trainer.training.events import MissingEvents
    from trainer.training.loop import LoopResult
    from trainer.training.step import TrainState


def train_run(
    loaded: LoadedRecipe, request: TrainRequest, observer: RunObserver, exporter: StepExporter
) -> TrainResult:
    """Train until the recipe's last step or a signal, and save the last step.

    In a job of several processes, all of them call it. Process 0 writes the recipe, the environment and, without
    `log.all_workers`, the metrics, and prints the lines of the run.

    Args:
        loaded: Recipe of the request, with its overrides.
        request: Options and folder of the run.
        observer: Receives notes, warnings and progress.
        exporter: Exports steps, if the recipe asks for it.

    Returns:
        The last step and its metrics. It has an error if the run was stopped before its last step.

    Raises:
        PrepError: The checkpoint, the data or the devices are invalid, or training failed.
    """
    from trainer.distributed.exact_backend import start_exact_backend
    from trainer.distributed.sharding import catch_out_of_memory
    from trainer.distributed.start import check_local_devices

    recipe = loaded.recipe
    group = connect_processes(recipe)
    process = group.index if group.count > 1 else None
    process_observer = observer.for_process(process, all_print=recipe.log.all_workers)
    storage = open_run_storage(request.out, recipe, process_observer)
    run = Run(loaded, request, storage, group, process_observer, exporter)
    together = run_together(
        group,
        recipe.cluster,
        process_observer,
        has_saved_step=lambda: bool(storage.steps(refresh=False)),
        describe_durable=lambda: _describe_durable(run),
    )
    with label_errors(process), together as enter_phase, catch_out_of_memory():
        run = replace(run, enter_phase=enter_phase)
        run.enter_phase("load")
        compare_settings(group, recipe, _shared_options(request), process_observer)
        # Both must come before the first use of a device: jax then starts its backend with these settings.
        if recipe.train.reduction == "exact":
            start_exact_backend()
        if recipe.cluster.n_local_devices is not None:
            check_local_devices(recipe.cluster.n_local_devices)
        _check_storage(run)
        if request.dry_run:
            # A dry run writes nothing to the run, and may be asked for while another process trains it.
            result = _train_locked(run)
        else:
            with hold_run(storage, group, process_observer.warn):
                result = _train_locked(run)
        return replace(result, process=process)


def _describe_durable(run: Run) -> str:
    """Describe what the next start continues from, for the message of a signal. Empty in a dry run."""
    if run.request.dry_run:
        return ""
    return describe_saved_progress(run.storage)


def _shared_options(request: TrainRequest) -> dict[str, object]:
    """Return the options that all processes of a run must share."""
    # If one process had another value, the others would wait for it in a collective forever. For example,
    # a dry run ends before the first step.
    return {
        "restart": request.restart,
        "stop_after": request.stop_after,
        "dry_run": request.dry_run,
        "stream": request.stream,
        "no_verify": not request.verify,
        **request.token_functions.manifest_fields,
    }


def _check_storage(run: Run) -> None:
    """Check that the storage of the run is empty or a run, that all processes see it, and that it can have the logs."""
    storage = run.storage
    if run.is_first:
        storage.check()
        check_logs(run.recipe.log, storage)
    if run.group.count > 1 and storage.is_on_disk and not run.request.dry_run:
        check_shared_folder(run.folder, run.group)
    if not storage.is_on_disk:
        run.observer.note(
            f"tokens and metrics are written to {run.folder} first; `data.cache` names a folder for tokens"
        )


def _train_locked(run: Run) -> TrainResult:
    """Open the start checkpoint, prepare the run, load its state and train, while process 0 holds the lock."""
    with ExitStack() as display_stack:
        with (
            raise_on_signal(),
            note_durable_work(lambda: _describe_durable(run)),
            ExitStack() as stack,
        ):
            prepared = _open_and_prepare(run, stack)
            if run.request.dry_run:
                return _make_result(prepared, prepared.step, memory=prepared.memory)
            patience = find_patience(
                run, prepared.loop, prepared.start.step_reader.manifest, prepared.step
            )
            end_reason = ""
            if prepared.step < prepared.loop.steps:
                end_reason = patience.end_reason(
                    run.recipe.eval.patience, prepared.loop.best_metric
                )
            missing_events = find_missing_events(
                run, prepared.loop, prepared.step, ends_early=bool(end_reason)
            )
            is_finished = bool(end_reason) or prepared.step == prepared.loop.steps
            if is_finished and not missing_events:
                return _make_exports_and_push(prepared, end_reason)
            if prepared.step:
                # Only now it is known whether the run is finished: a finished run without a repository needs no check.
                check_repository(run.recipe.checkpoint, run.group, run.observer)
            if run.request.verify:
                prepared.start.check_remaining(run.observer, has_state=bool(prepared.step))
            display = display_stack.enter_context(open_display(prepared))
            prepared, state = _load_state(prepared)
        with (
            raise_on_signal(),
            note_durable_work(lambda: describe_saved_progress(run.storage)),
            note_durable_work(lambda: describe_missing_exports(run, prepared.loop.steps)),
        ):
            exports = step_exports(run)
            with _open_checkpoints(prepared, exports) as checkpoints:
                _begin_writing(prepared, checkpoints, exports)
                end = _take_steps(
                    prepared,
                    state,
                    checkpoints,
                    display=display,
                    missing_events=missing_events,
                    patience=patience,
                )
                if exports is not None and end.stop_reason:
                    exports.abandon()
            display_stack.close()
            if end.stop_reason:
                error = stopped_error(prepared, end)
                return _make_result(prepared, end.step, metrics=end.metrics, error=error)
            _note_early_end(prepared, end.end_reason, end.step)
            result = _make_result(
                prepared, end.step, metrics=end.metrics, end_reason=end.end_reason
            )
            return push_last_step(run, result)


def _open_and_prepare(run: Run, stack: ExitStack) -> PreparedRun:
    """Open the start checkpoint, prepare the run, and describe it to the user. `stack` closes the checkpoint."""
    start, sharding = _open_start_checkpoint(run)
    stack.enter_context(start.model_reader)
    if start.adapter_reader is not None:
        stack.enter_context(start.adapter_reader)
    if not (run.request.dry_run or start.resume_step):
        # Before the data is tokenized, which may take hours
        check_repository(run.recipe.checkpoint, run.group, run.observer)
    scratch_dir: Path | None = None
    if run.request.dry_run:
        # A dry run must not write to the run's folder, so missing tokens go to a temporary one.
        scratch_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prep-")))
    prepared = prepare_run(run, start, sharding, scratch_dir=scratch_dir)
    compare_start(
        run.group,
        start.manifest,
        step=prepared.step,
        data_identity=prepared.loop.manifest_fields.data,
        kernel=prepared.kernel.name,
    )
    for line in run_summary_lines(prepared):
        run.observer.note(line)
    return prepared


def _open_start_checkpoint(run: Run) -> tuple[StartCheckpoint, ShardingContext]:
    """Open the run's last step, or else the recipe's checkpoint.

    The second result is the sharding of the run.
    """
    from prepcli.models.mesh import parse_mesh
    from prepcli.models.slices import parse_slice_counts
    from trainer.distributed.sharding import make_sharding_context
    from trainer.training.preflight import check_batch, check_devices
    from trainer.training.recipe_checks import check_inputs
    from trainer.training.setup import partition_rules

    request = run.request
    recipe = run.recipe
    recipe_sharding = _recipe_sharding(run)
    access = make_access(run.observer, offline=request.offline)
    # A missing data file or a mesh that the devices do not fill is found before a model is located,
    # which may download it.
    check_inputs(recipe, DataFinder(access, run.observer.note))
    check_devices(recipe, recipe_sharding)
    last_step = _last_step(run)
    # A step of a run with LoRA has only the adapters. Its frozen parameters come from the recipe's
    # model at every start.
    if last_step and not recipe.lora.is_enabled:
        start = open_last_step(run.storage, last_step, verify=request.verify)
    else:
        start = open_model_start(
            recipe,
            sharding=recipe_sharding,
            access=make_access(
                run.observer, offline=request.offline, stream=request.stream, allow_urls=True
            ),
            verify=request.verify,
            check_config=partial(
                check_config,
                recipe=recipe,
                sharding=recipe_sharding,
                observer=run.observer,
                force=request.force,
            ),
        )
    if recipe.lora.is_enabled:
        start = with_adapters(
            start, recipe.lora, run.storage, last_step=last_step, verify=request.verify
        )
    if request.restart:
        check_restart_source(start, run.storage, recipe)
    # The rules of the checkpoint apply if the recipe has none. They are known only now.
    sharding = make_sharding_context(
        parse_mesh(recipe.mesh, Key("mesh")),
        partition_rules(recipe, start.manifest),
        slices=parse_slice_counts(recipe.cluster.dcn_mesh),
    )
    check_batch(recipe, sharding)
    return start, sharding


def _recipe_sharding(run: Run) -> ShardingContext:
    """Return the sharding of the recipe's mesh, slices and rules.

    In a dry run with too few devices, the error suggests `prep plan`, which needs none.
    """
    from prepcli.models.mesh import parse_mesh
    from prepcli.models.rule_text import merge_rules
    from prepcli.models.slices import parse_slice_counts
    from trainer.distributed.sharding import make_sharding_context

    recipe = run.recipe
    mesh = parse_mesh(recipe.mesh, Key("mesh"))
    slices = parse_slice_counts(recipe.cluster.dcn_mesh)
    rules = merge_rules(recipe.rules or (), origin=Key("rules"))
    try:
        return make_sharding_context(mesh, rules, slices=slices)
    except UsageError as error:
        if not run.request.dry_run:
            raise
        plan_command = Command("plan", str(run.request.recipe))
        hint = text("{}, or without devices: {}", error.hint, plan_command)
        raise error.with_texts(hint=hint) from None


def _last_step(run: Run) -> int:
    """Return the step to resume from, as process 0 sees the run.

    0 starts from the recipe's checkpoint.
    """
    # Another host may list the folder from a cache of its file system. Processes that start from
    # different steps would compute different gradients, so that only process 0 decides.
    last_step = 0
    if not run.request.restart:
        last_step = max(run.storage.steps(), default=0)
    return int(run.group.broadcast("last step", str(last_step)))


def _make_exports_and_push(prepared: PreparedRun, end_reason: str) -> TrainResult:
    """Make the missing exports and the missing push of a finished run, and return its result."""
    run = prepared.run
    _note_early_end(prepared, end_reason, prepared.step)
    with note_durable_work(lambda: describe_missing_exports(run, prepared.step)):
        make_missing_exports(run)
        return push_last_step(run, _make_result(prepared, prepared.step, end_reason=end_reason))


def _note_early_end(prepared: PreparedRun, end_reason: str, step: int) -> None:
    """Tell the user why a run ended before its last step, if it did."""
    if end_reason:
        prepared.run.observer.note(
            f"ended early at step {step}/{prepared.loop.steps}: {end_reason}"
        )


def _load_state(prepared: PreparedRun) -> tuple[PreparedRun, TrainState]:
    """Read the state to train from. A LoRA run then records its base in each manifest."""
    start = prepared.start
    with explain_removed_step(prepared.run.storage, prepared.step):
        state = _load_train_state(prepared)
    if start.lora is not None:
        prepared = _with_base_facts(prepared, state)
    return prepared, state


def _load_train_state(prepared: PreparedRun) -> TrainState:
    """Read the state to resume from, or initialize it with the start checkpoint's parameters or random ones."""
    from trainer.training.loading import init_state, random_state, restore_state

    run = prepared.run
    start = prepared.start
    setup = prepared.loop.setup
    if isinstance(start.model_reader, RandomReader):
        return random_state(setup, run.recipe.seed)
    if not prepared.step and run.recipe.model.training_state:
        return load_continued_state(start, setup)
    if not prepared.step:
        return init_state(
            start.model_reader,
            setup,
            start.adapter_reader,
            on_rounding=lambda counts: run.observer.note(rounding_text(counts)),
        )
    _check_resumable_step(prepared)
    if start.adapter_reader is None:
        return restore_state(start.model_reader, setup, None)
    return restore_state(start.adapter_reader, setup, start.model_reader)


def _check_resumable_step(prepared: PreparedRun) -> None:
    """Check that the step to resume from has the optimizer state, and parameters in the run's dtype.

    Raises:
        PrepError: It has no optimizer state, or its parameters were cast.
    """
    from trainer.training.step import has_optimizer_state

    run = prepared.run
    reader = prepared.start.step_reader
    step_name = run.storage.step_name(prepared.step)
    hint = text(
        "pass {}, or start another run: set another {}, and {}",
        Option("restart", True),
        Key("name"),
        Key("model.path", step_name, is_override=True),
    )
    is_saved = any(name.startswith("opt_state.") for name in reader.leaves)
    if not is_saved and has_optimizer_state(prepared.loop.setup):
        what = f"step {prepared.step} has no optimizer state to resume from"
        why = text("it was saved with {}", Key("checkpoint.optimizer_state", False))
        raise PrepError(what, why, hint)
    cast = reader.manifest.param_cast
    if cast is not None and cast["to"] != run.recipe.model.param_dtype:
        what = f"step {prepared.step} has no exact parameters to resume from"
        why = text("they were cast to {}, the {} of the run", cast["to"], Key("checkpoint.dtype"))
        raise PrepError(what, why, hint)


def _with_base_facts(prepared: PreparedRun, state: TrainState) -> PreparedRun:
    """Return a LoRA run that records its base in each manifest.

    Check the base of a resumed run.
    """
    start = prepared.start
    loop = prepared.loop
    base_path = prepared.run.recipe.model.path
    assert base_path is not None
    base = base_facts(state, loop.setup.model, start, name=base_path)
    if prepared.step:
        check_base(start.step_reader.manifest, base)
    loop = replace(loop, manifest_fields=loop.manifest_fields | Manifest(base=base))
    return replace(prepared, loop=loop)


def _open_checkpoints(prepared: PreparedRun, exports: StepExports | None) -> CheckpointManager:
    """Open the checkpoints of a run. Lock the run if this process has not locked it yet."""
    run = prepared.run
    table = run.recipe.checkpoint
    sharding = prepared.loop.setup.forward_config.sharding

    model_path = run.recipe.model.path or ""
    changes = Manifest(
        config=prepared.model_config,
        mesh=str(sharding.mesh),
        origin=prepared.start.origin(model_path),
        # The start checkpoint may have another one.
        storage=table.storage,
    )
    if run.recipe.rules is not None:
        changes |= Manifest(rules=run.recipe.rules)
    if prepared.start.lora is not None:
        changes |= Manifest(lora=prepared.start.lora)
    towers = prepared.start.towers_facts(model_path)
    if towers is not None:
        changes |= Manifest(towers=towers)

    def free_nbytes_per_process() -> int | None:
        free_nbytes = free_memory()
        if free_nbytes is None:
            return None
        return free_nbytes // prepared.processes_per_host

    return CheckpointManager(
        run.storage,
        prepared.start.model,
        name=run.recipe.name,
        keep=KeepRule(table.keep, table.milestones, best=table.best is not None),
        exports=exports,
        manifest_changes=changes,
        group=run.group,
        free_memory_nbytes=free_nbytes_per_process,
        note=run.observer.warn,
    )


def _begin_writing(
    prepared: PreparedRun, checkpoints: CheckpointManager, exports: StepExports | None
) -> None:
    """Make the first changes of the run, after all checks: remove old steps, and write recipe and environment."""
    run = prepared.run
    restart = run.request.restart
    # All processes wait here for the check of process 0, before any of them changes its file of metrics.
    with joint_work(run.group, "last-step"):
        if run.is_first and not restart:
            check_last_step(run.storage, prepared.step)
    if restart:
        # A lock, where the storage has them, excludes other starts. A kill after `clear` leaves a run without steps:
        # the next start begins at step 0.
        checkpoints.remove_all_steps()
        remove_exports(run)
    # A kill between the save of a step and the end of its export leaves the step without one.
    if exports is not None:
        exports.start_missing(checkpoints.steps())
    # The recipe is written before the first step is taken, so each saved step has the recipe of its run beside it.
    if run.is_first:
        write_run_file(run, RECIPE_FILE, recipe_to_toml(run.recipe, run.loaded.origins))
        write_environment(prepared)


def _take_steps(
    prepared: PreparedRun,
    state: TrainState,
    checkpoints: CheckpointManager,
    *,
    display: RunDisplay,
    missing_events: MissingEvents,
    patience: Patience,
) -> LoopResult:
    """Take the remaining steps of a run, after the missing events of its start step."""
    from trainer.training.loop import Loop

    run = prepared.run
    loop = prepared.loop

    def enter_phase(phase: str) -> None:
        display.on_phase(phase)
        run.enter_phase(phase)

    has_sampler = loop.sampler is not None
    with (
        open_metrics(run, prepared.step) as metrics,
        open_sample_log(run, prepared.step, has_sampler=has_sampler) as sample_log,
    ):
        training = Loop(
            loop,
            state,
            store=checkpoints,
            metrics=metrics,
            sample_log=sample_log,
            callbacks=display,
            poll_stop_reason=lambda: stop_signal(),
            enter_phase=enter_phase,
            lowest_cost=find_lowest_cost(run, loop, checkpoints),
            patience=patience,
            missing_events=missing_events,
            profiler=make_profiler(run),
            warn=run.observer.warn,
        )
        training.compile()
        # From here on, a signal is only remembered. The loop asks for it before each step and each batch of an
        # evaluation, so that the step in progress is completed and saved.
        with remember_signal(
            lambda _: run.observer.note("stopping after this step; again to quit"),
            lambda: quit_run(run),
        ) as stop_signal:
            result = training.run()
    if stop_signal() and not result.stop_reason and describe_missing_exports(run, result.step):
        # The signal came too late to stop the steps. It stops the exports and the push instead.
        raise_stop(stop_signal())
    return result


def _make_result(prepared: PreparedRun, step: int, **fields: Any) -> TrainResult:
    """Return the result of a run at a step, with further fields."""
    storage = prepared.run.storage
    steps = storage.steps(refresh=False)
    output = None
    if steps:
        output = storage.step_name(steps[-1])
    return TrainResult(
        run=storage.name,
        output=output,
        step=step,
        steps=prepared.loop.steps,
        resumed_at=prepared.step,
        mesh=str(prepared.loop.setup.sharding.mesh),
        attention_kernel=prepared.kernel.name,
        **fields,
    )
