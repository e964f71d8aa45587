"""`prep train`: a recipe carried out, from the checkpoint that it names or from where an earlier start left off."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prepcli.commands.conversion import CommonOptions
from prepcli.commands.save_init import SaveInitRequest as SaveInit
from prepcli.commands.save_init import save_init
from prepcli.commands.train_checks import check_machine, disk_warnings
from prepcli.commands.train_report import TrainReporter, run_summary_lines
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import SLABS, Report, Ui
from prepcli.engine.files import io_error
from prepcli.errors import INTERRUPTED, STOPPED, PrepError, usage_error
from prepcli.execution.run_folder import LOCK, RunFolder, saved_steps, step_folder
from prepcli.execution.signals import note_durable_work, raise_on_signal, remember_signal
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import read_manifest
from prepcli.planning.shares import launcher_share
from prepcli.remote.retries import retry_policy_from_env
from prepcli.restore.digest_checks import RECREATE_HINT, check_tensors
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.source import HF_FOLDER, Source, SourceTensor
from trainer.recipe import LoadedRecipe, Recipe, load_recipe, recipe_to_toml, schema
from trainer.recipe.tables import KEY_SCHEMAS, value_of

RECIPE_FILE = "recipe.toml"
RUNS_FOLDER = Path("runs")
INIT_FOLDER, TOKENS_FOLDER = "init", "data"  # in a run's folder: the init made of a Hugging Face folder, and the token store
CONVERSION_MEMORY_NBYTES = 512 << 20  # for that conversion


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """A recipe, changes to it, and where the run goes (default: `runs/NAME`)."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    out: Path | None = None
    restart: bool = False
    stop_after: int = 0
    dry_run: bool = False
    offline: bool = False
    verify: bool = True


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that is about to begin, or to go on from `step`."""

    loaded: LoadedRecipe
    folder: Path
    start_checkpoint: Path  # the checkpoint whose state, or parameters, it begins with
    step: int
    job: Any  # trainer.training.loop.Job, which brings jax along
    memory: dict[str, Any]  # estimated

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe


def train(request: TrainRequest, ui: Ui) -> Report:
    """Train until the recipe is done or a signal comes; either way the last step is saved."""
    _check_one_process(os.environ)
    loaded = load_recipe(request.recipe, request.overrides)
    folder = request.out or RUNS_FOLDER / loaded.recipe.name
    _check_run_folder(folder)
    silence_jax(ui)
    from trainer.distributed.sharding import catch_out_of_memory

    with catch_out_of_memory():
        with (
            raise_on_signal(),
            note_durable_work(lambda: "" if request.dry_run else _kept_note(folder)),
            ExitStack() as stack,
        ):
            reader, on = _open_start_checkpoint(loaded, folder, request, ui)
            stack.enter_context(reader)
            spare = Path(stack.enter_context(TemporaryDirectory(prefix="prep-"))) if request.dry_run else None
            run = _prepare_run(loaded, folder, reader, on, spare, request, ui)
            for line in run_summary_lines(run.job, run.recipe, run.step):
                ui.note(line)
            fields = _run_fields(run, run.step)
            if request.dry_run:
                return Report(
                    f"would train to step {run.job.steps} in {folder}", fields | {"memory": run.memory, "dry_run": True}
                )
            if run.step == run.job.steps:
                return _finished_report(run, fields)
            if request.verify and not reader.is_checked:
                source = open_source(reader.folder, str(reader.folder))
                check_without_checksums(
                    source, source.all_tensors if run.step else source.tensors, ui, _damage_hint(folder, run.start_checkpoint)
                )
            state = _load_train_state(run, reader)
        return _run_training(run, state, request.restart, ui)


def _check_one_process(environ: Mapping[str, str]) -> None:
    """Usage PrepError where a launcher runs this command in several processes: each would write the same run."""
    share, launcher = launcher_share(environ)
    if share.count > 1:
        why = f"{launcher} says that this is process {share.index} of {share.count}"
        hint = "`srun --ntasks 1 prep train RECIPE`" if launcher == "SLURM" else f"unset {launcher}"
        raise usage_error("`prep train` runs in one process", why, f"{hint}; it uses all devices of its host")


def recipe_schema() -> Report:
    """The JSON schema of recipes."""
    return Report(json.dumps(schema(), indent=2))


def _kept_note(folder: Path) -> str:
    """What a run's folder has that the next start goes on from; empty for nothing."""
    found = [f"step {step}" for step in saved_steps(folder)[-1:]]
    for name, what in ((TOKENS_FOLDER, "the tokens"), (INIT_FOLDER, "the converted checkpoint")):
        whole = [path for path in (folder / name).glob("*") if path.is_dir() and not path.name.endswith(".partial")]
        found += [what] if whole else []
    return f"kept in {folder}: {', '.join(found)}" if found else ""


def silence_jax(ui: Ui) -> None:
    """What jax says of missing accelerators is for those who ask."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if ui.level >= SLABS else "3")
    logging.getLogger("jax").setLevel(logging.INFO if ui.level >= SLABS else logging.ERROR)


def _check_run_folder(folder: Path) -> None:
    """PrepError where the run's name is taken by something else. A start that failed, or was killed, may have left no
    more than an init, tokens or a lock."""
    from trainer.data.store import LOCK_FILE as TOKENS_LOCK

    left = (RECIPE_FILE, LOCK, f"{TOKENS_FOLDER}/{TOKENS_LOCK}", INIT_FOLDER)
    is_own = bool(saved_steps(folder)) or any((folder / name).exists() for name in left)
    if folder.is_dir() and any(folder.iterdir()) and not is_own:
        raise PrepError(f"{folder} exists and is something else", f"it has no {RECIPE_FILE}", "`--out NAME`")
    if folder.exists() and not folder.is_dir():
        raise PrepError(f"{folder} is in the way", "a run is a folder", "`--out NAME`")


def _open_start_checkpoint(loaded: LoadedRecipe, folder: Path, request: TrainRequest, ui: Ui) -> tuple[ItemReader, Any]:
    """The checkpoint to begin with, and the mesh of devices: the run's last step, or what the recipe names."""
    from trainer.distributed import sharding
    from trainer.models.mesh import DEFAULT_RULES, parse_mesh
    from trainer.training.preflight import check_inputs
    from trainer.training.setup import rules_from_manifest

    mesh = parse_mesh(loaded.recipe.mesh, "mesh")
    on = sharding.make_sharding_context(mesh, DEFAULT_RULES)
    check_inputs(loaded.recipe, on)
    steps = [] if request.restart else saved_steps(folder)
    path = step_folder(folder, steps[-1]) if steps else _resolve_init(loaded.recipe, folder, str(on.mesh), request, ui)
    reader = open_reader(path, request.verify, _damage_hint(folder, path))
    if request.restart:
        _check_restart_source(reader, folder)
    return reader, sharding.make_sharding_context(mesh, rules_from_manifest(reader.manifest))


def _damage_hint(folder: Path, checkpoint: Path) -> str:
    """What the user can do where the checkpoint that a run begins with is damaged."""
    steps = saved_steps(folder)
    if steps and step_folder(folder, steps[-1]) in (checkpoint, checkpoint.parent):
        if len(steps) == 1:
            return "`--restart` begins anew"
        return f"move {step_folder(folder, steps[-1])} away: the run then goes on from step {steps[-2]}"
    if folder / INIT_FOLDER in checkpoint.parents:
        return f"remove {checkpoint}: the next start makes it anew"
    return RECREATE_HINT


def check_without_checksums(source: Source, tensors: Sequence[SourceTensor], ui: Ui, hint: str = RECREATE_HINT) -> None:
    """Check tensors of a checkpoint that has no checksums of its parts, by reading them once more as a whole."""
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.digests)
    if not nbytes:
        return
    cost = f"checking it reads {format_bytes(nbytes)} once more"
    ui.note(
        f"{source.display_name} has no {CHECKSUMS_FILE} (an earlier prep wrote it): {cost}; `prep reshard` writes one that has"
    )
    check_tensors(source, tensors, ui.progress(), hint)


def _check_restart_source(reader: ItemReader, folder: Path) -> None:
    """PrepError where a run that begins anew would begin from a step that it drops."""
    own = {step_folder(folder, step).resolve() for step in saved_steps(folder)}
    if not own.isdisjoint(reader.folder.resolve().parents):
        what = f"`--restart` would drop {reader.folder.parent}"
        raise usage_error(what, "the run is to begin from it: it is its `model.path`", "another `name`")


def _resolve_init(recipe: Recipe, folder: Path, mesh: str, request: TrainRequest, ui: Ui) -> Path:
    """The Orbax checkpoint that the recipe names, or one made of the Hugging Face folder that it names."""
    located = locate(
        recipe.model.path,
        offline=request.offline,
        progress=ui.progress(),
        warn=ui.warn,
        retry_policy=retry_policy_from_env(os.environ, ui.note),
    )
    if located.kind == "orbax":
        return located.path
    out = folder / INIT_FOLDER / f"{located.model_name}-init"
    if request.dry_run:
        return _existing_init(out, recipe.model.path, mesh)
    ui.note(f"{recipe.model.path} is a Hugging Face folder: prep save-init --mesh {mesh} --pad-vocab auto --out {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    common = CommonOptions(recipe.model.path, out, CONVERSION_MEMORY_NBYTES, overwrite=True, offline=request.offline)
    save_init(SaveInit(common, mesh, pad_vocab="auto"), ui)  # one of another mesh, or of another model, gives way
    return out


def _existing_init(out: Path, model: str, mesh: str) -> Path:
    """The init that an earlier start made; a usage PrepError if it is to be made."""
    manifest = read_manifest(out) if out.exists() else None
    if manifest is None or manifest["mesh"] != mesh:
        why, hint = "it is converted first, and a dry run writes nothing", f"`prep save-init {model}`"
        raise usage_error(f"{model} is a Hugging Face folder", why, hint)
    return out


def _prepare_run(
    loaded: LoadedRecipe, folder: Path, reader: ItemReader, sharding: Any, scratch_dir: Path | None, request: TrainRequest, ui: Ui
) -> _Run:
    """`spare`: where tokens are made that the run does not have, if nothing may be written to it."""
    from trainer.training import setup as jobs
    from trainer.training.preflight import run_warnings

    facts, recipe = reader.manifest, loaded.recipe
    model = jobs.model_from_manifest(facts)
    jobs.check_model_layout(recipe, model, sharding)
    jobs.check_seq_length(recipe.data, model)
    memory = check_machine(recipe, model, sharding, folder, ui=ui, is_dry_run=request.dry_run)
    folders = {"tokenizer": reader.folder / HF_FOLDER, "cache": folder / TOKENS_FOLDER}
    if scratch_dir is not None:
        folders["spare"] = scratch_dir
    found = jobs.build_datasets(recipe, model, facts, folders, _tokenize_progress(ui), ui.note)
    own = {"recipe": recipe_to_toml(recipe, loaded.origins)}
    job = jobs.build_job(recipe, model, sharding, found, own, request.stop_after)
    step = _resume_step(folder, reader)
    if step:
        jobs.check_resumable(facts, job, _changed_keys(folder, recipe), step)
    for doubt in (*run_warnings(recipe, job), *disk_warnings(folder, recipe, model.leaves, job.steps - step)):
        ui.warn(doubt)
    return _Run(loaded, folder, reader.folder, step, job, memory)


def _resume_step(folder: Path, reader: ItemReader) -> int:
    """The step that the run goes on from; 0 if the checkpoint is not its own."""
    own = folder.resolve() in reader.folder.resolve().parents and reader.manifest.get("kind") == "train"
    return int(reader.manifest["step"]) if own else 0


def _changed_keys(folder: Path, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Values of the recipe that the run began with, and of this one, where they differ."""
    before = load_recipe(folder / RECIPE_FILE).recipe
    pairs = {key: (value_of(before, key), value_of(recipe, key)) for key in KEY_SCHEMAS}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _tokenize_progress(ui: Ui) -> Callable[[int, int], None]:
    """Progress of tokenising, of several texts one after another: each begins when its first bytes are done."""
    progress = ui.progress()
    done = -1

    def tell(nbytes: int, total: int) -> None:
        nonlocal done
        if done < 0:
            progress.begin("tokenise", total)
            done = 0
        progress.advance(nbytes - done)
        done = nbytes
        if nbytes >= total:
            progress.end()
            done = -1

    return tell


def _load_train_state(run: _Run, reader: ItemReader) -> Any:
    from trainer.training.checkpoint import init_state, restore_state

    if not run.step:
        return init_state(reader, run.job.setup)
    if not any(name.startswith("opt_state.") for name in reader.leaves):
        why = "it was saved with `checkpoint.optimizer_state = false`"
        hint = f"`--restart`, or another `name` and `--set model.path={step_folder(run.folder, run.step)}`"
        raise PrepError(f"step {run.step} has no optimizer state to go on with", why, hint)
    return restore_state(reader, run.job.setup)


def _run_training(run: _Run, state: Any, restart: bool, ui: Ui) -> Report:
    from trainer.training.loop import Loop
    from trainer.training.metrics import METRICS_FILE, MetricsWriter

    recipe, shards = run.recipe, run.job.setup.how.shards
    watch = TrainReporter(ui, run.job.steps, run.job.tokens_a_step)
    with RunFolder(run.folder, run.start_checkpoint, recipe.name, recipe.checkpoint.keep, mesh=str(shards.mesh)) as store:
        if restart:  # not before all else is known to be right, and no other process has the run
            store.clear()
        _write_recipe(run)
        log = MetricsWriter(run.folder / METRICS_FILE, run.step)
        with remember_signal() as stop:
            ended = Loop(run.job, state, store, log, watch, stop).run()
    fields = _run_fields(run, ended.step) | watch.fields
    if ended.stop_reason:
        return Report(fields=fields, error=_stopped_error(ended.stop_reason, ended.step, bool(saved_steps(run.folder))))
    return _finished_report(run, fields)


def _finished_report(run: _Run, fields: dict[str, Any]) -> Report:
    """Where the last step is, whether it was taken now or before."""
    return Report(str(step_folder(run.folder, run.job.steps)), fields, f"prep export {run.folder}")


def _write_recipe(run: _Run) -> None:
    path = run.folder / RECIPE_FILE
    fresh = path.with_name(f"{RECIPE_FILE}.new")
    try:
        fresh.write_text(recipe_to_toml(run.recipe, run.loaded.origins))
        os.replace(fresh, path)
    except OSError as error:
        raise io_error(path, error) from error


def _run_fields(run: _Run, step: int) -> dict[str, Any]:
    saved = saved_steps(run.folder)
    return {
        "output": str(step_folder(run.folder, saved[-1])) if saved else None,
        "run": str(run.folder),
        "step": step,
        "steps": run.job.steps,
        "resumed_at": run.step,
        "mesh": str(run.job.setup.how.shards.mesh),
    }


def _stopped_error(reason: str, step: int, has_saved_step: bool) -> PrepError:
    code = INTERRUPTED if reason == signal.Signals.SIGINT.name else STOPPED
    why = f"step {step} is saved" if has_saved_step else "no step was done"
    what = f"stopped by {reason}" if reason.startswith("SIG") else f"stopped: {reason}"
    return PrepError(what, why, "run the same command again to go on", code)
