"""What an earlier start of a run leaves to the next one: the checks of what may change, and its events so far."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from prepcli.core.errors import Command, Key, Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text
from prepcli.formats.manifest import METRICS_FILE, RECIPE_FILE
from prepcli.formats.step_scores import logged_costs, manifest_score, score_group
from prepcli.planning.manifest_fields import Manifest
from prepcli.restore.item_reader import ItemReader
from prepcli.sources.source import AVERAGE_SLOT
from prepcli.stores.files import not_regular_error
from prepcli.stores.paths import create_temporary_folder
from trainer.data.columns import TEXT_COLUMN
from trainer.data.tokenize_config import restart_hint
from trainer.recipe import Recipe, load_recipe
from trainer.recipe.data_table import SOURCE_PATHS, SOURCES_KEY
from trainer.recipe.key_types import OnResume, change_text
from trainer.recipe.lr_schedule import changed_fields
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES
from trainer.recipe.tables import keys_of, value_of
from trainer.recipe.text_fields import PLAIN
from trainer.run.run import Run
from trainer.run.run_record import SAMPLES_FILE
from trainer.run.start import StartCheckpoint

if TYPE_CHECKING:
    from prepcli.execution.checkpoint_manager import CheckpointManager
    from trainer.training.eval_metrics import Patience
    from trainer.training.events import LoopConfig, MissingEvents


def _resume_rules() -> Iterator[tuple[str, OnResume]]:
    """Yield the dotted keys and the tables that may change between two starts of a run."""
    tables: list[tuple[str, type[BaseModel]]] = [("", Recipe)]
    tables += [("optimizer.", table) for table in OPTIMIZER_TABLES.values()]
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            tables.append((f"{name}.", field.annotation))
    for prefix, table in tables:
        for name, field in table.model_fields.items():
            for rule in field.metadata:
                if isinstance(rule, OnResume):
                    yield f"{prefix}{name}", rule


# Dotted key or table -> how its changes are checked. All others may not change.
RESUME_RULES: Mapping[str, OnResume] = dict(_resume_rules())
# Manifest keys that must be equal on resume, and their names in error messages.
FIXED_ON_RESUME = {
    "data": "the data",
    "batch_size": "the batch size",
    "loss_fn": "the loss function",
}


def read_changed_keys(run: Run, saved_steps: Sequence[int]) -> dict[str, tuple[Any, Any]]:
    """Return the changed recipe keys of a run with saved steps, after the check whether they may change.

    Empty for a new run, and on other processes, which may not see the run's folder.
    """
    if not run.is_process_0 or not saved_steps:
        return {}
    # A dry run must not write to the run's folder: a bucket's recipe is downloaded to a temporary folder.
    recipe_file = run.storage.fetch_file(RECIPE_FILE, create_temporary_folder())
    changed = changed_keys(recipe_file, run.recipe)
    check_changed_keys(changed)
    return changed


def on_resume(key: str) -> OnResume | None:
    """Return how a change of a key between two starts of a run is checked. None if it may not change."""
    return RESUME_RULES.get(key) or RESUME_RULES.get(key.partition(".")[0])


def check_changed_keys(changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Check whether a run may resume with changed recipe keys. The data is not read yet.

    Args:
        changed: Recipe keys whose values differ, as (value at the last start, value now).

    Raises:
        PrepError: A key changed that must not.
    """
    changes: list[str] = []
    for key, values in sorted(changed.items()):
        if key == SOURCES_KEY:
            # The data is compared by content, so its files may move.
            before, after = (_without_paths(sources or ()) for sources in values)
            may_change = before == after
        else:
            may_change = on_resume(key) is not None
        if not may_change:
            changes.append(f"{key}: {change_text(values)}")
    if changes:
        raise PrepError(
            "the recipe has changed since the last start", ", ".join(changes), restart_hint()
        )


def check_resumable(
    manifest: Mapping[str, Any],
    config: LoopConfig,
    *,
    changed: Mapping[str, tuple[Any, Any]],
    step: int,
) -> None:
    """Check whether a run may resume from a checkpoint.

    Args:
        manifest: Manifest of the checkpoint.
        config: The resuming run.
        changed: Recipe keys whose values differ, as (value at the last start, value now).
        step: Step of the checkpoint.

    Raises:
        PrepError: The data, the batch size or the schedule changed, or `step` is past the last step.
    """
    hint = restart_hint()
    for key, label in FIXED_ON_RESUME.items():
        before = manifest.get(key)
        after = config.manifest_fields.get(key)
        if before != after:
            why = f"{before}, now {after}"
            raise PrepError(f"{label} has changed since the run began", why, hint)
    rates = changed_fields(manifest.get("rate", {}), config.manifest_fields.get("rate", {}))
    if rates:
        # Both fields follow from the number of steps.
        if "decay" in rates and {*rates} <= {"decay", "cooldown"}:
            decay_steps = Key("optimizer.decay_steps", rates["decay"][0], is_override=True)
            hint = text("{} keeps it; {}", decay_steps, hint)
        why = _schedule_change(rates, changed)
        raise PrepError("the learning rate schedule has changed since the last start", why, hint)
    if step > config.steps:
        raise PrepError(
            f"the run is at step {step}", f"the recipe has only {config.steps} steps", hint
        )


def _schedule_change(
    rates: Mapping[str, tuple[Any, Any]], changed: Mapping[str, tuple[Any, Any]]
) -> str:
    """Return the changed keys of the schedule, and the resulting changes of the schedule."""
    causes: list[str] = []
    # `train` before `optimizer`: the length of the run is the usual cause.
    for key in sorted(changed, reverse=True):
        if on_resume(key) is OnResume.SCHEDULE:
            causes.append(f"{key}: {change_text(changed[key])}")
    effects = ", ".join(f"{name} {change_text(values)}" for name, values in rates.items())
    if not causes:
        return effects
    return f"{', '.join(causes)} (of the schedule: {effects})"


def _without_paths(sources: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return sources of data without their paths."""
    kept: list[dict[str, object]] = []
    for source in sources:
        kept.append({key: value for key, value in source.items() if key not in SOURCE_PATHS})
    return kept


def check_continued_start(start: StartCheckpoint, config: LoopConfig) -> None:
    """Check the training state in the start checkpoint of a run.

    Raises:
        UsageError: The checkpoint has no training state.
        PrepError: Its state is of another optimizer, or the run has no step after it.
    """
    from trainer.training.step import leaf_names

    path = config.recipe.model.path
    reader = start.model_reader
    step = None
    if isinstance(reader, ItemReader):
        step = reader.manifest.step
    if not isinstance(reader, ItemReader) or step is None:
        option = Option("training_state", True)
        raise usage_error(
            text("{} has no effect for {}", Key("model.training_state", True), path),
            "it is no step of a run of prep",
            text(
                "{} makes one from a checkpoint with moments",
                Command("save-init", path or "", option),
            ),
        )
    missing = sorted(leaf_names(config.setup) - reader.leaves.keys())
    if missing and all(name.startswith(f"{AVERAGE_SLOT}.") for name in missing):
        raise PrepError(
            text("{} has no averages for {}", path, Key("optimizer.ema")),
            "its run has kept none",
            text("{}", Key("optimizer.ema", 0, is_override=True)),
        )
    if missing:
        raise PrepError(
            f"{path} has another optimizer state than the recipe",
            f"it lacks {missing[0]}, one of {len(missing):,} leaves",
            text("{} chooses the optimizer", Key("optimizer.type")),
        )
    if step >= config.steps:
        raise PrepError(
            f"{path} is at step {step}",
            f"the recipe has only {config.steps} steps",
            text("{}", Key("train.steps", 2 * step, is_override=True)),
        )


def cast_warning(start: StartCheckpoint, config: LoopConfig) -> str:
    """Return a warning about leaves of the state with another dtype in the run. Empty if there are none."""
    import jax

    from trainer.training.step import leaf_name, state_shapes

    reader = start.model_reader
    casts: list[str] = []
    for path, shape in jax.tree_util.tree_leaves_with_path(state_shapes(config.setup)):
        name = leaf_name(path)
        stored = reader.leaves[name].dtype
        if stored != shape.dtype.name:
            casts.append(f"{name} from {stored} to {shape.dtype.name}")
    if not casts:
        return ""
    verb = "is" if len(casts) == 1 else "are"
    return f"{count_text(len(casts), 'leaf', 'leaves')} of {config.recipe.model.path} {verb} cast, e.g. {casts[0]}"


def unread_warning(start: StartCheckpoint, config: LoopConfig) -> str:
    """Return a warning about unused leaves of the state. Empty if there are none."""
    from trainer.training.step import leaf_names

    unread = sorted(start.model_reader.leaves.keys() - leaf_names(config.setup))
    if not unread:
        return ""
    path = config.recipe.model.path
    verb = "is" if len(unread) == 1 else "are"
    return (
        f"{count_text(len(unread), 'leaf', 'leaves')} of {path} {verb} not used, e.g. {unread[0]}"
    )


def changed_keys(recipe_file: Path, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the recipe keys with changed values since the last start, as (value then, value now)."""
    if recipe_file.exists() and not recipe_file.is_file():
        raise not_regular_error(recipe_file)
    earlier_recipe = load_recipe(recipe_file).recipe
    keys = {*keys_of(earlier_recipe)} & {*keys_of(recipe)}
    earlier_shape = (earlier_recipe.data.format, earlier_recipe.data.fields)
    # Version 0.1.0 had no formats, and read the column `text` where a recipe names none. Now the columns decide. The
    # identity of the tokens shows whether they are those of the run.
    if recipe.data.has_auto_shape and earlier_shape == (PLAIN, TEXT_COLUMN):
        keys -= {"data.format", "data.fields"}
    changed: dict[str, tuple[Any, Any]] = {}
    for key in sorted(keys):
        before = value_of(earlier_recipe, key)
        now = value_of(recipe, key)
        if before != now:
            changed[key] = (before, now)
    return changed


NAME_BY_KEY = {
    "device": "device",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "xla_flags": "XLA_FLAGS",
    "cores": "cores",
}


def environment_warning(
    before: Mapping[str, object] | None, now: Mapping[str, object], *, step: int
) -> str:
    """Return a warning about the differences between two environments.

    Empty without a difference.

    Args:
        before: Environment in the manifest of a step. None in a step of an earlier prep.
        now: Environment of this process.
        step: The step.
    """
    if before is None:
        return ""
    changes: list[str] = []
    for key, name in NAME_BY_KEY.items():
        if before.get(key) != now.get(key):
            changes.append(f"{name} {_value_text(before.get(key))} -> {_value_text(now.get(key))}")
    if not changes:
        return ""
    return f"results may differ in the last bits: since step {step}, {', '.join(changes)}"


def _value_text(value: object) -> str:
    if value in (None, ""):
        return "none"
    return str(value)


def check_base(manifest: Manifest, base: Mapping[str, str]) -> None:
    """Raise PrepError if the frozen parameters have changed since the adapters were trained."""
    # The names are not compared: a copy of the base at another path resumes the run.
    before = manifest.base
    if before.get("digest") == base["digest"]:
        return
    what = f"{base['name']} differs from the checkpoint that the run began with"
    why = f"its parameters have the digest {base['digest']}, {before.get('name')} had {before.get('digest')}"
    hint = text("set {} to the checkpoint that the run began with", Key("model.path"))
    raise PrepError(what, why, hint)


def check_resumable_step(run: Run, start: StartCheckpoint, config: LoopConfig) -> None:
    """Check that the step to resume from has the optimizer state, and parameters in the run's dtype.

    Raises:
        PrepError: It has no optimizer state, or its parameters were cast.
    """
    if not start.steps_taken:
        return
    error = find_missing_state(run, start, config)
    if error is not None:
        raise error


def find_missing_state(run: Run, start: StartCheckpoint, config: LoopConfig) -> PrepError | None:
    """Return the error of a saved step that has no state to train from, or None if it has one."""
    from trainer.training.step import has_optimizer_state

    reader = start.step_reader
    step = start.steps_taken
    step_name = run.storage.step_name(step)
    hint = text(
        "pass {}, or start another run: set another {}, and {}",
        Option("restart", True),
        Key("name"),
        Key("model.path", step_name, is_override=True),
    )
    is_saved = any(name.startswith("opt_state.") for name in reader.leaves)
    if not is_saved and has_optimizer_state(config.setup):
        what = f"step {step} has no optimizer state to resume from"
        why = text("it was saved with {}", Key("checkpoint.optimizer_state", False))
        return PrepError(what, why, hint)
    cast = reader.manifest.param_cast
    if cast is not None and cast["to"] != run.recipe.model.param_dtype:
        what = f"step {step} has no exact parameters to resume from"
        why = text("they were cast to {}, the {} of the run", cast["to"], Key("checkpoint.dtype"))
        return PrepError(what, why, hint)
    return None


def find_missing_events(
    run: Run, config: LoopConfig, start: StartCheckpoint, patience: Patience
) -> MissingEvents:
    """Return the events before the first step: of a new run, or the stopped or killed events of a saved step.

    Process 0 reads the logs for the second kind.

    Args:
        run: The run.
        config: Configuration of the training loop.
        start: The step, or the start checkpoint of a new run.
        patience: The evaluations up to this step, with which the run may have ended early.

    Raises:
        PrepError: A log cannot be read.
    """
    from trainer.training.events import MissingEvents
    from trainer.training.metrics import num_logged_events

    missing = MissingEvents()
    step = start.steps_taken
    if not step:
        missing = MissingEvents(config.is_evaluation_due(0), config.num_samples_due(0))
    # A finished run may have a last step that cannot be loaded for training. Its events are not repeated.
    elif run.is_process_0 and find_missing_state(run, start, config) is None:
        ends_early = bool(config.end_reason(step, patience))
        num_samples = config.num_samples_due(step, ends_early=ends_early)
        with TemporaryDirectory(prefix="prep-") as folder:
            metrics = run.storage.fetch_file(METRICS_FILE, Path(folder))
            samples = run.storage.fetch_file(SAMPLES_FILE, Path(folder))
            # A run without its log was moved without it. No event is repeated.
            if metrics.exists():
                missing = MissingEvents(
                    config.is_evaluation_due(step) and not num_logged_events(metrics, step),
                    max(0, num_samples - num_logged_events(samples, step)),
                )
    # All processes evaluate and sample together, or none.
    words = run.group.broadcast(
        "missing events", f"{int(missing.evaluation)} {missing.num_samples}"
    ).split()
    return MissingEvents(
        bool(int(words[0])), int(words[1]), is_score=bool(step) and _lacks_score(start, config)
    )


def _lacks_score(start: StartCheckpoint, config: LoopConfig) -> bool:
    """Return whether the manifest of a step lacks an evaluation that could make it the best step."""
    if not config.saves_best or config.evaluation is None:
        return False
    score = manifest_score(start.step_reader.manifest)
    expected = score_group(config.best_metric.name, config.manifest_fields)
    # The group of a manifest without an evaluation names the loss, so only its sequences are compared.
    return not math.isfinite(score.cost) and score.group[1:] == expected[1:]


def find_patience(run: Run, config: LoopConfig, start: StartCheckpoint) -> Patience:
    """Return the evaluations up to a saved step that count for `eval.patience`, as process 0 sees them.

    Args:
        run: The run.
        config: Configuration of the training loop.
        start: The step, or the start checkpoint of a new run.

    Raises:
        PrepError: A log cannot be read.
    """
    from trainer.training.eval_metrics import NO_EVALUATIONS, Patience
    from trainer.training.metrics import logged_evaluation

    step = start.steps_taken
    if not step or not run.recipe.eval.patience:
        return NO_EVALUATIONS
    metric = config.best_metric
    recorded = Patience.of_manifest(start.step_reader.manifest, config.manifest_fields, metric.name)
    patience = recorded or NO_EVALUATIONS
    if run.is_process_0 and recorded is not None and recorded.last_step != step:
        # A signal had stopped the evaluation of this step, and a later start has repeated it without a save.
        with TemporaryDirectory(prefix="prep-") as folder:
            line = logged_evaluation(run.storage.fetch_file(METRICS_FILE, Path(folder)), step)
        if line is not None:
            patience = patience.after(step, metric.cost(line))
    words = run.group.broadcast("patience", json.dumps(patience.to_json()))
    return Patience.from_json(json.loads(words))


def find_lowest_cost(run: Run, config: LoopConfig, checkpoints: CheckpointManager) -> float:
    """Return the lowest comparable cost of a saved step, as process 0 sees the run. See `BestMetric`.

    The result is infinite without a saved step.
    """
    if not config.saves_best:
        return math.inf
    lowest = math.inf
    if run.is_process_0:
        metric = config.best_metric
        # A signal may have stopped the evaluation of a step. A later start has repeated it, after the step was saved.
        costs = logged_costs(run.folder / METRICS_FILE, metric.name, metric.best_is)
        checkpoints.note_evaluations(metric.name, costs)
        lowest = checkpoints.lowest_cost(score_group(metric.name, config.manifest_fields))
    # `repr` of a float is exact: all processes compare later values with the same one, and so
    # save the same steps.
    return float(run.group.broadcast("lowest cost", repr(lowest)))
