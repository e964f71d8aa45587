"""`prep train`: train with a recipe, from the recipe's checkpoint or from the last step of the run."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prepcli.commands.train_checks import check_config, check_machine, disk_warnings
from prepcli.commands.train_report import TrainReporter, run_summary_lines, tokenize_progress
from prepcli.commands.train_start import (
    INIT_FOLDER,
    check_restart_source,
    check_without_checksums,
    damage_hint,
    resolve_init,
)
from prepcli.commands.train_together import run_together
from prepcli.console.ui import SLABS, Report, Ui
from prepcli.engine.files import io_error
from prepcli.errors import INTERRUPTED, RESUME_HINT, STOPPED, PrepError
from prepcli.execution.run_folder import LOCK, RunFolder
from prepcli.execution.signals import note_durable_work, raise_on_signal, remember_signal
from prepcli.formats.run_steps import saved_steps, step_folder
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.source import HF_FOLDER
from trainer.models.process_address import process_address
from trainer.planning.model_shapes import model_of_manifest
from trainer.planning.step_inputs import run_dropout
from trainer.planning.training_plan import with_values
from trainer.recipe import LoadedRecipe, Recipe, load_recipe, recipe_to_toml, schema
from trainer.recipe.tables import keys_of, value_of

if TYPE_CHECKING:
    from trainer.distributed.process_group import ProcessGroup
    from trainer.distributed.sharding import ShardingContext
    from trainer.models.attention_kernels import KernelChoice
    from trainer.training.loop import Job
    from trainer.training.step import TrainState

RECIPE_FILE = "recipe.toml"
RUNS_FOLDER = Path("runs")
TOKENS_FOLDER = "data"  # in a run's folder: the tokens of the datasets


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """Request of `prep train`."""

    recipe: Path
    overrides: tuple[str, ...] = ()  # `KEY=VALUE`
    out: Path | None = None  # folder of the run; None: `runs/NAME`
    restart: bool = False  # delete the run's steps and start again
    stop_after: int = 0  # steps in this process; 0: all
    dry_run: bool = False
    offline: bool = False
    verify: bool = True  # check the start checkpoint against its checksums
    force: bool = False  # start even if a step is estimated not to fit into memory


@dataclass(frozen=True, slots=True)
class _Run:
    """Run that is ready to start, or to resume at `step`."""

    loaded: LoadedRecipe
    folder: Path
    start_checkpoint: Path  # initial parameters, or the state to resume from
    step: int
    config: Mapping[str, Any]  # config.json of the model, with the recipe's rotary embedding
    job: Job
    kernel: KernelChoice
    memory: dict[str, Any]  # estimate in bytes
    group: ProcessGroup

    @property
    def recipe(self) -> Recipe:
        """Recipe of the run."""
        return self.loaded.recipe


def train(request: TrainRequest, ui: Ui) -> Report:
    """Train until the recipe's last step or a signal, and save the last step.

    Args:
        request: Recipe, overrides and folder of the run.
        ui: Receives notes, warnings and progress.

    Returns:
        Report with the last step's folder and metrics. It has an error if the run was stopped before its last step.

    Raises:
        PrepError: The recipe, the checkpoint, the data or the devices are invalid, or training failed.
    """
    loaded = load_recipe(request.recipe, request.overrides)
    folder = request.out or RUNS_FOLDER / loaded.recipe.name
    _check_run_folder(folder)
    silence_jax(ui)
    from trainer.distributed.sharding import catch_out_of_memory
    from trainer.distributed.start import start_processes

    cluster = loaded.recipe.cluster
    group = start_processes(
        process_address(cluster.process_settings, os.environ),
        start_timeout_s=cluster.start_timeout,
        heartbeat_timeout_s=cluster.heartbeat_timeout,
    )
    together = run_together(group, cluster, ui, has_saved_step=lambda: bool(saved_steps(folder)))
    with together as enter_phase, catch_out_of_memory():
        enter_phase("load")
        with (
            raise_on_signal(),
            note_durable_work(lambda: "" if request.dry_run else _kept_note(folder)),
            ExitStack() as stack,
        ):
            reader, sharding = _open_start_checkpoint(loaded, folder, request, ui)
            stack.enter_context(reader)
            scratch_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prep-"))) if request.dry_run else None
            run = _prepare_run(
                loaded,
                folder,
                reader=reader,
                sharding=sharding,
                scratch_dir=scratch_dir,
                request=request,
                ui=ui,
                group=group,
            )
            for line in run_summary_lines(run.job, run.recipe, run.step, kernel=run.kernel):
                ui.note(line)
            fields = _run_fields(run, run.step)
            if request.dry_run:
                text = f"would train to step {run.job.steps} in {folder}"
                return Report(text, fields | {"memory": run.memory, "dry_run": True})
            if run.step == run.job.steps:
                return _finished_report(run, fields)
            if request.verify and not reader.is_checked:
                source = open_source(locate(str(reader.folder)))
                tensors = source.all_tensors if run.step else source.tensors
                check_without_checksums(source, tensors, ui, hint=damage_hint(folder, run.start_checkpoint))
            state = _load_train_state(run, reader)
        return _run_training(run, state, restart=request.restart, ui=ui, enter_phase=enter_phase)


def recipe_schema() -> Report:
    """Report the JSON schema of recipes."""
    return Report(json.dumps(schema(), indent=2))


def _kept_note(folder: Path) -> str:
    """Describe the data in a run's folder that the next start uses; empty if there is none."""
    kept = [f"step {step}" for step in saved_steps(folder)[-1:]]
    for name, description in ((TOKENS_FOLDER, "the tokens"), (INIT_FOLDER, "the converted checkpoint")):
        complete_folders = [
            path for path in (folder / name).glob("*") if path.is_dir() and not path.name.endswith(".partial")
        ]
        kept += [description] if complete_folders else []
    return f"kept in {folder}: {', '.join(kept)}" if kept else ""


def silence_jax(ui: Ui) -> None:
    """Hide the log messages of jax, such as warnings about missing accelerators, unless `-vv` is set."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if ui.level >= SLABS else "3")
    logging.getLogger("jax").setLevel(logging.INFO if ui.level >= SLABS else logging.ERROR)


def _check_run_folder(folder: Path) -> None:
    """Raise PrepError if the path is a file, or a folder that is neither empty nor a run.

    The folder of a failed or killed start may contain only an init, tokens or a lock.
    """
    from trainer.data.store import LOCK_FILE as TOKENS_LOCK

    run_files = (RECIPE_FILE, LOCK, f"{TOKENS_FOLDER}/{TOKENS_LOCK}", INIT_FOLDER)
    is_run = bool(saved_steps(folder)) or any((folder / name).exists() for name in run_files)
    if folder.is_dir() and any(folder.iterdir()) and not is_run:
        raise PrepError(f"{folder} already exists and is not a run", f"it has no {RECIPE_FILE}", "`--out NAME`")
    if folder.exists() and not folder.is_dir():
        raise PrepError(f"{folder} already exists", "it is a file, and a run is a folder", "`--out NAME`")


def _open_start_checkpoint(
    loaded: LoadedRecipe, folder: Path, request: TrainRequest, ui: Ui
) -> tuple[ItemReader, ShardingContext]:
    """Open the run's last step, or else the recipe's checkpoint; return its reader and the sharding of the run."""
    from trainer.distributed.sharding import make_sharding_context
    from trainer.models.mesh import parse_mesh
    from trainer.models.rule_text import merge_rules
    from trainer.training.preflight import check_batch, check_devices, check_inputs
    from trainer.training.setup import partition_rules

    mesh = parse_mesh(loaded.recipe.mesh, "mesh")
    recipe_sharding = make_sharding_context(mesh, merge_rules(loaded.recipe.rules or (), origin="rules"))
    check_inputs(loaded.recipe)
    check_devices(loaded.recipe, recipe_sharding)
    steps = [] if request.restart else saved_steps(folder)
    if steps:
        path = step_folder(folder, steps[-1])
    else:
        path = resolve_init(
            loaded.recipe,
            folder,
            sharding=recipe_sharding,
            offline=request.offline,
            dry_run=request.dry_run,
            check_config=partial(
                check_config, recipe=loaded.recipe, sharding=recipe_sharding, ui=ui, force=request.force
            ),
            ui=ui,
        )
    reader = open_reader(path, request.verify, damage_hint(folder, path))
    if request.restart:
        check_restart_source(reader, folder)
    sharding = make_sharding_context(mesh, partition_rules(loaded.recipe, reader.manifest))
    check_batch(loaded.recipe, sharding)
    return reader, sharding


def _prepare_run(
    loaded: LoadedRecipe,
    folder: Path,
    *,
    reader: ItemReader,
    sharding: ShardingContext,
    scratch_dir: Path | None,
    request: TrainRequest,
    ui: Ui,
    group: ProcessGroup,
) -> _Run:
    """Check the recipe against the model and the machine, tokenize the data, and build the job.

    Args:
        loaded: Recipe and the origins of its values.
        folder: Folder of the run.
        reader: Open start checkpoint.
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
    from trainer.training.preflight import run_warnings
    from trainer.training.resume import check_resumable

    recipe, step = loaded.recipe, _resume_step(folder, reader)
    manifest = reader.manifest if step else setup.override_config(reader.manifest, recipe)
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
        ui=ui,
        is_dry_run=request.dry_run,
        force=request.force,
    )
    folders = {"tokenizer": reader.folder / HF_FOLDER, "cache": folder / TOKENS_FOLDER}
    if scratch_dir is not None:
        folders["spare"] = scratch_dir
    datasets = setup.build_datasets(
        recipe, model, manifest=manifest, folders=folders, progress=tokenize_progress(ui), note=ui.note
    )
    manifest_fields = {"recipe": recipe_to_toml(recipe, loaded.origins)}
    job = setup.build_job(
        recipe,
        model,
        sharding=sharding,
        kernel=kernel.name,
        datasets=datasets,
        dropout=dropout,
        manifest_fields=manifest_fields,
        stop_after=request.stop_after,
    )
    if step:
        check_resumable(manifest, job, changed=_changed_keys(folder, recipe), step=step)
    for warning in (*run_warnings(recipe, job), *disk_warnings(folder, recipe, model.leaves, job.steps - step)):
        ui.warn(warning)
    return _Run(
        loaded,
        folder,
        start_checkpoint=reader.folder,
        step=step,
        config=manifest["config"],
        job=job,
        kernel=kernel,
        memory=memory,
        group=group,
    )


def _resume_step(folder: Path, reader: ItemReader) -> int:
    """Return the step to resume from; 0 if the checkpoint is not a step of this run."""
    is_own_step = folder.resolve() in reader.folder.resolve().parents and reader.manifest.get("kind") == "train"
    return int(reader.manifest["step"]) if is_own_step else 0


def _changed_keys(folder: Path, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the recipe keys whose values have changed since the run began, as (value then, value now)."""
    earlier_recipe = load_recipe(folder / RECIPE_FILE).recipe
    shared_keys = sorted({*keys_of(earlier_recipe)} & {*keys_of(recipe)})
    pairs = {key: (value_of(earlier_recipe, key), value_of(recipe, key)) for key in shared_keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _load_train_state(run: _Run, reader: ItemReader) -> TrainState:
    """Read the state to resume from, or initialize it from the start checkpoint's parameters."""
    from trainer.training.checkpoint import init_state, restore_state

    if not run.step:
        return init_state(reader, run.job.setup)
    if not any(name.startswith("opt_state.") for name in reader.leaves):
        why = "it was saved with `checkpoint.optimizer_state = false`"
        hint = f"`--restart`, or another `name` and `--set model.path={step_folder(run.folder, run.step)}`"
        raise PrepError(f"step {run.step} has no optimizer state to resume from", why, hint)
    return restore_state(reader, run.job.setup)


def _run_training(run: _Run, state: TrainState, *, restart: bool, ui: Ui, enter_phase: Callable[[str], None]) -> Report:
    """Train in the run's folder, which is locked meanwhile."""
    from trainer.training.loop import Loop
    from trainer.training.metrics import METRICS_FILE, MetricsWriter

    recipe, sharding = run.recipe, run.job.setup.forward_config.sharding
    reporter = TrainReporter(ui, run.job.steps, run.job.tokens_per_step)
    keep = recipe.checkpoint.keep
    with _open_store(run, keep, str(sharding.mesh)) as store:
        if restart:  # only after all checks, and while the lock keeps other processes out
            store.clear()
        if run.group.index == 0:
            _write_recipe(run)
        metrics_file = METRICS_FILE if run.group.index == 0 else f"{run.group.index}-{METRICS_FILE}"
        metrics = MetricsWriter(run.folder / metrics_file, run.step)
        with remember_signal() as stop_signal:
            result = Loop(
                run.job,
                state,
                store=store,
                metrics=metrics,
                callbacks=reporter,
                poll_stop_reason=stop_signal,
                enter_phase=enter_phase,
            ).run()
    fields = _run_fields(run, result.step) | reporter.fields
    if result.stop_reason:
        has_saved_step = bool(saved_steps(run.folder))
        return Report(fields=fields, error=_stopped_error(result.stop_reason, result.step, has_saved_step))
    return _finished_report(run, fields)


def _open_store(run: _Run, keep: Any, mesh: str) -> Any:
    if run.group.index:
        return FollowerStore(run.folder)
    return RunFolder(
        run.folder,
        run.start_checkpoint,
        name=run.recipe.name,
        keep=keep,
        config=run.config,
        mesh=mesh,
        rules=run.recipe.rules,
    )


class FollowerStore:
    """Placeholder of the store of a process that does not write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> FollowerStore:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def clear(self) -> None:
        """Do nothing."""

    def steps(self) -> list[int]:
        """Return the saved steps."""
        return saved_steps(self.folder)

    def open(self, step: int) -> ItemReader:
        """Open a step."""
        return open_reader(step_folder(self.folder, step))

    def save(self, step: int, leaves: Mapping[str, Any], manifest_fields: Mapping[str, Any]) -> None:
        """Do nothing."""


def _finished_report(run: _Run, fields: dict[str, Any]) -> Report:
    """Report the folder of the last step."""
    return Report(str(step_folder(run.folder, run.job.steps)), fields, f"prep export {run.folder}")


def _write_recipe(run: _Run) -> None:
    path = run.folder / RECIPE_FILE
    new_path = path.with_name(f"{RECIPE_FILE}.new")
    try:
        new_path.write_text(recipe_to_toml(run.recipe, run.loaded.origins))
        os.replace(new_path, path)
    except OSError as error:
        raise io_error(path, error) from error


def _run_fields(run: _Run, step: int) -> dict[str, Any]:
    steps = saved_steps(run.folder)
    return {
        "output": str(step_folder(run.folder, steps[-1])) if steps else None,
        "run": str(run.folder),
        "step": step,
        "steps": run.job.steps,
        "resumed_at": run.step,
        "mesh": str(run.job.setup.forward_config.sharding.mesh),
        "attention_kernel": run.kernel.name,
    }


def _stopped_error(reason: str, step: int, has_saved_step: bool) -> PrepError:
    code = INTERRUPTED if reason == signal.Signals.SIGINT.name else STOPPED
    why = f"step {step} is saved" if has_saved_step else "no step was completed"
    what = f"stopped by {reason}" if reason.startswith("SIG") else f"stopped: {reason}"
    return PrepError(what, why, RESUME_HINT, code)
