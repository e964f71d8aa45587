"""Train with a recipe, from the recipe's checkpoint or from the last step of the run.

`train` is the table of contents of a run. The other functions are in the order of their calls. The number of a step is
the number of steps taken after it: 0 is the start, and `steps` the number of the last one. Only orders of rows and
schedules count steps from 0.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from prepcli.core.errors import (
    INTERRUPTED,
    RESUME_HINT,
    STOPPED,
    Command,
    Key,
    PrepError,
    UsageError,
    text,
)
from prepcli.core.observer import RunObserver
from prepcli.core.signals import (
    exit_with_report,
    note_durable_work,
    raise_on_signal,
    raise_stop,
    remember_signal,
)
from prepcli.core.unexpected import label_errors
from prepcli.engine.budget import free_memory
from prepcli.execution.checkpoint_manager import CheckpointManager, KeepRule, StepExports
from prepcli.execution.training_storage import RunStorage, joint_work
from prepcli.formats.manifest import RECIPE_FILE
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.open_folder import make_access
from trainer.data.find_files import DataFinder
from trainer.data.store import has_shard, is_complete
from trainer.recipe import LoadedRecipe, recipe_to_toml
from trainer.run.checks import (
    check_before_steps,
    check_devices,
    check_inputs,
    check_start,
)
from trainer.run.display import open_display
from trainer.run.exports import (
    check_repository,
    describe_missing_exports,
    make_missing_exports,
    push_last_step,
    remove_exports,
    step_exports,
)
from trainer.run.logs import WatchdogLog, check_logs, open_logs, write_run_file
from trainer.run.machine import check_config
from trainer.run.prepare import build_loop_config, load_state, make_sampler, with_base_facts
from trainer.run.recipe_data import tokenize_data
from trainer.run.resume import (
    check_resumable_step,
    find_lowest_cost,
    find_missing_events,
    find_patience,
    read_changed_keys,
)
from trainer.run.run import (
    ExportStep,
    Run,
    TrainResult,
    TrainSettings,
    compare_settings,
    connect_processes,
    process_number,
    run_together,
)
from trainer.run.start import (
    StartCheckpoint,
    open_last_step,
    open_model_start,
    with_adapters,
)
from trainer.run.storage import (
    TOKENS_FOLDER,
    check_last_step,
    check_shared_folder,
    hold_run,
    open_run_storage,
)
from trainer.run.summary import note_summary, write_environment
from trainer.training.metrics import RunLog

if TYPE_CHECKING:
    from prepcli.models.rules import Rules
    from trainer.distributed.sharding import ShardingContext
    from trainer.training.eval_metrics import Patience
    from trainer.training.events import LoopConfig, MissingEvents, StepProfiler
    from trainer.training.loop import Loop
    from trainer.training.step import TrainState


def train(
    loaded: LoadedRecipe, options: TrainSettings, observer: RunObserver, export: ExportStep
) -> TrainResult:
    """Train until the recipe's last step or a signal, and save the last step.

    In a job of several processes, all of them call it. Process 0 writes the recipe, the environment and, without
    `log.all_workers`, the metrics, and prints the lines of the run.

    Args:
        loaded: The recipe, with its overrides.
        options: The options of the user.
        observer: Receives notes, warnings and progress.
        export: Exports a step, if the recipe asks for it.

    Returns:
        The last step and its metrics. It has an error if the run was stopped before its last step.

    Raises:
        PrepError: The checkpoint, the data or the devices are invalid, or training failed.
    """
    with connect(loaded, options, observer, export) as run, ExitStack() as displays:
        with (
            raise_on_signal(),
            note_durable_work(lambda: describe_durable(options, run.storage)),
            ExitStack() as stack,
        ):
            saved_steps = list_steps(run)
            changed = read_changed_keys(run, saved_steps)
            start, sharding = open_start(run, saved_steps, stack)
            model, kernel, memory = check_start(run, start, sharding)
            sampler = make_sampler(run, start, model, sharding)
            data = tokenize_data(run, start, model, changed=changed, stack=stack)
            config = build_loop_config(
                run, start, model, sharding=sharding, kernel=kernel, data=data, sampler=sampler
            )
            check_before_steps(run, start, config, changed)
            step = start.steps_taken
            patience = find_patience(run, config, start)
            missing_events = find_missing_events(run, config, start, patience)
            is_finished = config.has_ended(step, patience) and not missing_events
            note_summary(run, start, config, kernel, is_finished=is_finished)
            if not is_finished:
                check_resumable_step(run, start, config)
            if options.dry_run:
                return make_result(run, config, step=step, memory=memory, is_finished=is_finished)
            if is_finished:
                return finish_exports(run, config, step, patience)
            check_unread(run, start)
            display = displays.enter_context(
                open_display(run, start.state_step(run.recipe), steps=config.steps, memory=memory)
            )
            state = load_state(run, start, config)
            config = with_base_facts(run, start, config, state)
        exports = step_exports(run)
        last_step = config.steps
        with (
            raise_on_signal(),
            note_durable_work(lambda: describe_saved_progress(run.storage)),
            note_durable_work(lambda: describe_missing_exports(run, last_step)),
        ):
            with open_checkpoints(run, start, config, exports) as checkpoints:
                begin_writing(run, config, step=step, checkpoints=checkpoints, exports=exports)
                with open_logs(run, step, has_sampler=config.sampler is not None) as logs:
                    loop = make_loop(
                        run,
                        config,
                        state,
                        checkpoints=checkpoints,
                        logs=[*logs, display],
                        patience=patience,
                        missing_events=missing_events,
                    )
                    stop_signal = take_steps(run, loop)
                last_step = find_last_step(loop)
                end_exports(run, loop, exports, stop_signal=stop_signal)
            displays.close()
            return finish(run, loop, resumed_at=step)


@contextmanager
def connect(
    loaded: LoadedRecipe, options: TrainSettings, observer: RunObserver, export: ExportStep
) -> Iterator[Run]:
    """Connect the processes of a run, compare their settings, and hold the run until the end of the block.

    A failure, a stop or a loss of one process ends all of them.
    """
    from trainer.distributed.agreement import processes_per_host
    from trainer.distributed.exact_reduction import start_exact_backend
    from trainer.distributed.processes import check_local_devices
    from trainer.distributed.sharding import catch_out_of_memory

    recipe = loaded.recipe
    group = connect_processes(recipe)
    process = process_number(group)
    observer = observer.for_process(process, all_print=recipe.log.all_workers)
    storage = open_run_storage(options.out, recipe, observer)
    together = run_together(
        group,
        recipe.cluster,
        observer,
        has_saved_step=lambda: bool(storage.steps(refresh=False)),
        describe_durable=lambda: describe_durable(options, storage),
    )
    with label_errors(process), together as enter_phase, catch_out_of_memory():
        enter_phase("load")
        compare_settings(group, recipe, options, observer)
        # Both must come before the first use of a device: jax then starts its backend with these settings.
        if recipe.train.reduction == "exact":
            start_exact_backend()
        if recipe.cluster.n_local_devices is not None:
            check_local_devices(recipe.cluster.n_local_devices)
        run = Run(
            loaded,
            options,
            storage=storage,
            group=group,
            observer=observer,
            export=export,
            enter_phase=enter_phase,
            processes_per_host=processes_per_host(group),
        )
        check_storage(run)
        with ExitStack() as stack:
            # A dry run writes nothing to the run, and may be asked for while another process trains it.
            if not options.dry_run:
                lock_error = stack.enter_context(hold_run(storage, group, observer.warn))
                run = replace(run, lock_error=lock_error)
            yield run


def describe_durable(options: TrainSettings, storage: RunStorage) -> str:
    """Describe what the next start continues from, for the message of a signal. Empty in a dry run."""
    if options.dry_run:
        return ""
    return describe_saved_progress(storage)


def check_storage(run: Run) -> None:
    """Check that the storage of the run is empty or a run, that all processes see it, and that it can have the logs."""
    storage = run.storage
    if run.is_process_0:
        storage.check()
        check_logs(run.recipe.log, storage)
    if run.group.count > 1 and storage.is_on_disk and not run.options.dry_run:
        check_shared_folder(run.folder, run.group)
    if not storage.is_on_disk:
        run.observer.note(
            f"tokens and metrics are written to {run.folder} first; `data.cache` names a folder for tokens"
        )


def list_steps(run: Run) -> list[int]:
    """Return the saved steps that the run may resume from, as process 0 sees them. Empty for a restart."""
    # Another host may list the folder from a cache of its file system. Processes that start from
    # different steps would compute different gradients, so that only process 0 decides.
    steps: list[int] = []
    if run.is_process_0 and not run.options.restart:
        steps = run.storage.steps()
    return json.loads(run.group.broadcast("saved steps", json.dumps(steps)))


def open_start(
    run: Run, saved_steps: Sequence[int], stack: ExitStack
) -> tuple[StartCheckpoint, ShardingContext]:
    """Open the run's last step, or else the recipe's checkpoint. Only headers are read.

    Args:
        run: The run.
        saved_steps: Steps of the run, ascending. Without one, the recipe's checkpoint is opened.
        stack: Closes the checkpoint.

    Returns:
        The checkpoint, and the sharding of the run.
    """
    from prepcli.models.rules import merge_rules
    from trainer.training.setup import partition_rules

    options = run.options
    recipe = run.recipe
    recipe_sharding = _make_sharding(run, merge_rules(recipe.rules or (), origin=Key("rules")))
    access = make_access(run.observer, offline=options.offline)
    # A missing data file or a mesh that the devices do not fill is found before a model is located,
    # which may download it.
    check_inputs(recipe, DataFinder(access, run.observer.note))
    check_devices(recipe, recipe_sharding)
    # A step of a run with LoRA has only the adapters. Its frozen parameters come from the recipe's
    # model at every start.
    if saved_steps and not recipe.lora.is_enabled:
        start = open_last_step(run.storage, saved_steps, verify=options.verify)
    else:
        start = open_model_start(
            recipe,
            sharding=recipe_sharding,
            access=make_access(
                run.observer, offline=options.offline, stream=options.stream, allow_urls=True
            ),
            verify=options.verify,
            check_config=partial(check_config, run=run, sharding=recipe_sharding),
        )
    if recipe.lora.is_enabled:
        start = with_adapters(
            start, recipe.lora, run.storage, saved_steps=saved_steps, verify=options.verify
        )
    stack.enter_context(start.model_reader)
    if start.adapter_reader is not None:
        stack.enter_context(start.adapter_reader)
    # The rules of the checkpoint apply if the recipe has none. They are known only now.
    return start, _make_sharding(run, partition_rules(recipe, start.manifest))


def _make_sharding(run: Run, rules: Rules) -> ShardingContext:
    """Return the sharding of the recipe's mesh and slices."""
    # In a dry run with too few devices, the error suggests `prep plan`, which needs none.
    from prepcli.models.mesh import parse_mesh, parse_slice_counts
    from trainer.distributed.sharding import make_sharding_context

    mesh = parse_mesh(run.recipe.mesh, Key("mesh"))
    slices = parse_slice_counts(run.recipe.cluster.dcn_mesh)
    try:
        return make_sharding_context(mesh, rules, slices=slices)
    except UsageError as error:
        if not run.options.dry_run:
            raise
        plan_command = Command("plan", str(run.options.recipe))
        hint = text("{}, or without devices: {}", error.hint, plan_command)
        raise error.with_texts(hint=hint) from None


def finish_exports(run: Run, config: LoopConfig, step: int, patience: Patience) -> TrainResult:
    """Make the missing exports and the missing push of a finished run, and return its result."""
    end_reason = config.end_reason(step, patience)
    _note_early_end(run, config, step=step, end_reason=end_reason)
    with note_durable_work(lambda: describe_missing_exports(run, step)):
        make_missing_exports(run)
        result = make_result(run, config, step=step, resumed_at=step, end_reason=end_reason)
        return push_last_step(run, result)


def _note_early_end(run: Run, config: LoopConfig, *, step: int, end_reason: str) -> None:
    """Tell the user why a run ended before its last step, if it did."""
    if end_reason:
        run.observer.note(f"ended early at step {step}/{config.steps}: {end_reason}")


def check_unread(run: Run, start: StartCheckpoint) -> None:
    """Check what is not read while the state is loaded: the hub's repository, and tensors without checksums."""
    if start.steps_taken:
        # Only now it is known whether the run is finished: a finished run without a repository needs no check.
        check_repository(run)
    if run.options.verify:
        reads_state = start.steps_taken > 0 or run.recipe.model.training_state
        start.check_remaining(run.observer, reads_state=reads_state)


def open_checkpoints(
    run: Run, start: StartCheckpoint, config: LoopConfig, exports: StepExports | None
) -> CheckpointManager:
    """Open the checkpoints of a run, which `hold_run` has locked."""
    table = run.recipe.checkpoint
    model_path = run.recipe.model.path or ""
    changes = Manifest(
        config=start.model_manifest(run.recipe)["config"],
        mesh=str(config.setup.sharding.mesh),
        origin=start.origin(model_path),
        # The start checkpoint may have another one.
        storage=table.storage,
    )
    if run.recipe.rules is not None:
        changes |= Manifest(rules=run.recipe.rules)
    if start.lora is not None:
        changes |= Manifest(lora=start.lora)
    towers = start.towers_facts(model_path)
    if towers is not None:
        changes |= Manifest(towers=towers)

    def free_nbytes_per_process() -> int | None:
        free_nbytes = free_memory()
        if free_nbytes is None:
            return None
        return free_nbytes // run.processes_per_host

    return CheckpointManager(
        run.storage,
        start.model,
        name=run.recipe.name,
        keep=KeepRule(table.keep, table.milestones, best=table.best is not None),
        exports=exports,
        manifest_changes=changes,
        group=run.group,
        free_memory_nbytes=free_nbytes_per_process,
    )


def begin_writing(
    run: Run,
    config: LoopConfig,
    *,
    step: int,
    checkpoints: CheckpointManager,
    exports: StepExports | None,
) -> None:
    """Make the first changes of the run, after all checks: remove old steps, and write recipe and environment."""
    restart = run.options.restart
    # All processes wait here for the check of process 0, before any of them changes its file of metrics.
    with joint_work(run.group, "last-step"):
        if run.lock_error is not None:
            raise run.lock_error
        if run.is_process_0 and not restart:
            check_last_step(run.storage, step)
    if restart:
        # A lock, where the storage has one, excludes other starts. A kill after the removal leaves a run without steps,
        # and the next start begins at step 0.
        checkpoints.remove_all_steps()
        remove_exports(run)
    # A kill between the save of a step and the end of its export leaves the step without one.
    if exports is not None:
        exports.start_missing(checkpoints.steps())
    # The recipe is written before the first step is taken, so each saved step has the recipe of its run beside it.
    if run.is_process_0:
        write_run_file(run, RECIPE_FILE, recipe_to_toml(run.recipe, run.loaded.origins))
        write_environment(run, config, step)


def make_profiler(run: Run) -> StepProfiler | None:
    """Return the profiler of process 0. None if the recipe records no steps."""
    from trainer.training.events import PROFILE_FOLDER, StepProfiler

    profile = run.recipe.train.profile
    if profile is None or not run.is_process_0:
        return None
    return StepProfiler(
        profile["start"], profile["steps"], run.folder / PROFILE_FOLDER, run.observer.warn
    )


def make_loop(
    run: Run,
    config: LoopConfig,
    state: TrainState,
    *,
    checkpoints: CheckpointManager,
    logs: Sequence[RunLog],
    patience: Patience,
    missing_events: MissingEvents,
) -> Loop:
    """Create the loop of a run that continues after a saved step, or begins."""
    from trainer.training.loop import Loop

    return Loop(
        config,
        state,
        checkpoints=checkpoints,
        logs=[*logs, WatchdogLog(run)],
        lowest_cost=find_lowest_cost(run, config, checkpoints),
        patience=patience,
        missing_events=missing_events,
        profiler=make_profiler(run),
        warn=run.observer.warn,
    )


def take_steps(run: Run, loop: Loop) -> str:
    """Compile and run the loop. Return the name of the signal that arrived meanwhile, or an empty text."""
    loop.compile()
    # From here on, a signal is only remembered. The loop asks for it before each step and each batch of an evaluation,
    # so that the step in progress is completed and saved.
    with remember_signal(
        lambda _: run.observer.note("stopping after this step; again to quit"),
        lambda: quit_run(run),
    ) as stop_signal:
        loop.run(stop_signal)
    return stop_signal()


def end_exports(run: Run, loop: Loop, exports: StepExports | None, *, stop_signal: str) -> None:
    """Abandon the exports of a stopped run. The next start makes them."""
    if stop_signal and not loop.stop_reason and describe_missing_exports(run, loop.step):
        # The signal came too late to stop the steps. It stops the exports and the push instead.
        raise_stop(stop_signal)
    if exports is not None and loop.stop_reason:
        exports.abandon()


def find_last_step(loop: Loop) -> int:
    """Return the last step of a run: the recipe's, or the one with which `eval.patience` ends it."""
    if loop.config.end_reason(loop.step, loop.patience):
        return loop.step
    return loop.config.steps


def finish(run: Run, loop: Loop, *, resumed_at: int) -> TrainResult:
    """Return the result of a run after its last step, and upload this step if the recipe names a repository."""
    config = loop.config
    error = None
    if loop.stop_reason:
        error = stopped_error(run, loop.stop_reason, step=loop.step, steps=find_last_step(loop))
    _note_early_end(run, config, step=loop.step, end_reason=loop.end_reason)
    result = make_result(
        run,
        config,
        step=loop.step,
        resumed_at=resumed_at,
        metrics=loop.metrics,
        end_reason=loop.end_reason,
        error=error,
    )
    return push_last_step(run, result)


def make_result(
    run: Run, config: LoopConfig, *, step: int, resumed_at: int | None = None, **fields: Any
) -> TrainResult:
    """Return the result of a run at a step, with further fields. Without `resumed_at`, no step was taken."""
    steps = run.storage.steps(refresh=False)
    output = None
    if steps:
        output = run.storage.step_name(steps[-1])
    return TrainResult(
        run=run.storage.name,
        output=output,
        step=step,
        steps=config.steps,
        resumed_at=step if resumed_at is None else resumed_at,
        mesh=str(config.setup.sharding.mesh),
        attention_kernel=config.setup.forward_config.attention_options.kernel,
        process=process_number(run.group),
        **fields,
    )


def quit_run(run: Run) -> NoReturn:
    """Report a second Ctrl-C, and end the process without the steps since the last saved one."""

    def report() -> int:
        why = describe_saved_progress(run.storage)
        error = PrepError("interrupted", why, RESUME_HINT, INTERRUPTED)
        return run.observer.show_final_error(error)

    exit_with_report(report)


def stopped_error(run: Run, reason: str, *, step: int, steps: int) -> PrepError:
    """Return the error of a run stopped before its end.

    Args:
        run: The run.
        reason: The name of a signal, or a text.
        step: The last step taken.
        steps: Number of the last step of the run.
    """
    why = "no step was completed"
    if run.storage.steps(refresh=False):
        why = f"step {step} is saved"
    if missing := describe_missing_exports(run, steps):
        why = f"{why}; {missing}"
    # 75 asks a launcher to start the job again. After Ctrl-C, the user does not want a restart.
    if reason == signal.Signals.SIGINT.name:
        return PrepError("interrupted", why, RESUME_HINT, INTERRUPTED)
    # Other reasons than signals are texts, e.g. the limit of `stop_after`.
    form = "stopped by {}" if reason.startswith("SIG") else "stopped: {}"
    return PrepError(text(form, reason), why, RESUME_HINT, STOPPED)


def describe_saved_progress(storage: RunStorage) -> str:
    """Describe what the next start of a run continues from.

    Empty without steps and tokens. For example `kept in runs/a: step 40, the tokens`, or for a bucket
    `kept in gs://b/a: step 40; kept in runs/gs/b/a: the tokens`.
    """
    kept: dict[str, list[str]] = {storage.name: []}
    steps = storage.steps(refresh=False)
    if steps:
        kept[storage.name].append(f"step {steps[-1]}")
    tokens = _describe_tokens(storage.local_folder / TOKENS_FOLDER)
    if tokens:
        kept.setdefault(str(storage.local_folder), []).append(tokens)
    texts = [f"kept in {where}: {', '.join(names)}" for where, names in kept.items() if names]
    return "; ".join(texts)


def _describe_tokens(folder: Path) -> str:
    """Describe the tokens in a folder: all, a part of them after a kill, or none (empty)."""
    stores = [path for path in folder.glob("*") if path.is_dir()]
    if any(map(is_complete, stores)):
        return "the tokens"
    if any(map(has_shard, stores)):
        return "a part of the tokens"
    return ""
