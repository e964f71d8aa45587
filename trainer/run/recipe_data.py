"""The data of a recipe: tokenized for its model, in a run and for commands without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prepcli.core.errors import Key
from prepcli.core.json_values import HFConfig
from prepcli.core.observer import Observer
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import num_batch_shards
from prepcli.models.rules import merge_rules
from prepcli.sources.generation_config import folder_generation_defaults
from prepcli.sources.open_folder import make_access
from prepcli.targets.hf_folder import tokenizer_folder
from trainer.data.find_files import DataFinder
from trainer.planning.model_shapes import PlannedModel, model_of_config, model_of_manifest
from trainer.recipe import Recipe, batch_shape
from trainer.run.checks import check_inputs, check_model
from trainer.run.run import Run
from trainer.run.start import (
    StartCheckpoint,
    checkpoint_tokenizer_folder,
    locate_model,
    open_located_model,
    random_config,
)
from trainer.run.storage import RUNS_FOLDER, TOKENS_FOLDER

if TYPE_CHECKING:
    from trainer.data.tokenize_config import RecordedTokens
    from trainer.training.datasets import DataModel, DatasetBuilder, Datasets


@dataclass(frozen=True, slots=True)
class RecipeModel:
    """The parts of a recipe's model for its data."""

    model: PlannedModel  # The model, with the changes of the recipe
    tokenizer_folder: Path  # Folder with its tokenizer
    # Partition rules of its checkpoint. A run has them unless its recipe has others.
    rules: Sequence[str] = ()


def recipe_datasets(
    recipe: Recipe,
    *,
    out: Path | None,
    offline: bool,
    observer: Observer,
    checks_digests: bool = True,
) -> DatasetBuilder:
    """Return the builder of a recipe's datasets, after the checks of the recipe and its model.

    Args:
        recipe: The recipe.
        out: Folder of its run. None for the default.
        offline: Use only the caches of the hub.
        observer: Receives notes and progress.
        checks_digests: See `TokenizeConfig`.

    Raises:
        PrepError: The model is missing or invalid, or an input of the recipe is missing.
    """
    from trainer.training.datasets import DatasetBuilder

    remote = DataFinder(make_access(observer, offline=offline), observer.note)
    # A missing data file is found before a model is located, which may read a remote one.
    check_inputs(recipe, remote)
    opened = open_recipe_model(recipe, offline=offline, observer=observer)
    check_model(recipe, opened.model)
    return DatasetBuilder(
        recipe,
        opened.model,
        model_config=opened.model.config,
        tokenizer=opened.tokenizer_folder,
        cache=(out or RUNS_FOLDER / recipe.name) / TOKENS_FOLDER,
        stop_ids=_stop_ids(opened.model, opened.model.config, opened.tokenizer_folder),
        remote=remote,
        checks_digests=checks_digests,
        progress=tokenize_progress(observer),
        note=observer.note,
    )


def tokenize_data(
    run: Run,
    start: StartCheckpoint,
    model: DataModel,
    *,
    changed: Mapping[str, tuple[Any, Any]],
    stack: ExitStack,
) -> Datasets:
    """Tokenize the data of a run, or open its tokens. This can take hours, and the next start continues it.

    Args:
        run: The run.
        start: Open start checkpoint.
        model: The model to train.
        changed: Changed recipe keys of a resumed run, as (value at the last start, value now).
        stack: Removes the tokens of a dry run at its end.

    Raises:
        PrepError: The data or the tokenizer is invalid, or the tokens cannot be written.
    """
    from trainer.training.datasets import DatasetBuilder

    observer = run.observer
    model_config: HFConfig = start.model_manifest(run.recipe)["config"]
    scratch_dir: Path | None = None
    if run.options.dry_run:
        # A dry run must not write to the run's folder, so missing tokens go to a temporary one.
        scratch_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prep-")))
    return DatasetBuilder(
        run.recipe,
        model,
        model_config=model_config,
        tokenizer=start.tokenizer_folder,
        cache=run.folder / TOKENS_FOLDER,
        scratch_dir=scratch_dir,
        stop_ids=_stop_ids(model, model_config, start.tokenizer_folder),
        group=run.group,
        remote=DataFinder(make_access(observer, offline=run.options.offline), observer.note),
        recorded=_recorded_tokens(run, start, changed),
        progress=tokenize_progress(observer),
        note=observer.note,
    ).build()


def _stop_ids(model: DataModel, config: HFConfig, folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a text when the model generates."""
    return folder_generation_defaults(config, folder, model.true_vocab_size).eos_token_ids


def _recorded_tokens(
    run: Run, start: StartCheckpoint, changed: Mapping[str, tuple[Any, Any]]
) -> RecordedTokens | None:
    """Return the tokens with which a resumed run began. None for a new run, and on other processes."""
    from trainer.data.tokenize_config import BOS_KEY, RecordedTokens

    if not run.is_process_0 or not start.steps_taken:
        return None
    add_bos = run.recipe.data.add_bos
    if BOS_KEY in changed:
        add_bos, _ = changed[BOS_KEY]
    return RecordedTokens(tuple(start.step_reader.manifest.data.split()), add_bos)


def open_recipe_model(recipe: Recipe, *, offline: bool, observer: Observer) -> RecipeModel:
    """Return the model of a recipe. Only the headers and the small files of a checkpoint are read.

    With a `model.lock`, they are compared with it.

    Args:
        recipe: The recipe.
        offline: Use only the cache of the hub.
        observer: Receives notes and progress.

    Raises:
        PrepError: The checkpoint is missing or invalid, or differs from its lock.
    """
    if recipe.model.path is None:
        model = model_of_config(random_config(recipe.model))
        folder = tokenizer_folder(recipe.data.tokenizer, recipe.model.config)
        return RecipeModel(model.of_recipe(recipe.model), folder)
    access = make_access(observer, offline=offline, stream=True, allow_urls=True)
    source = open_located_model(recipe.model, locate_model(recipe.model, access))
    if source.tree_manifest.is_tree:
        model = model_of_manifest(source.tree_manifest)
    else:
        model = model_of_config(source.config)
    return RecipeModel(
        model.of_recipe(recipe.model),
        checkpoint_tokenizer_folder(source),
        rules=source.tree_manifest.rules,
    )


def run_batch_size(recipe: Recipe, *, offline: bool, observer: Observer) -> int:
    """Return the sequences of a step of a recipe. Without `batch.size`, the model may be opened for its rules.

    Raises:
        UsageError: The size depends on the number of devices, and the mesh does not name it.
        PrepError: The model cannot be opened. See `open_recipe_model`.
    """
    if recipe.batch.size is not None:
        return recipe.batch.size
    mesh = parse_mesh(recipe.mesh, Key("mesh"))
    n_devices = mesh.n_devices
    rules = recipe.rules
    if rules is None:
        rules = open_recipe_model(recipe, offline=offline, observer=observer).rules
    n_replicas = num_batch_shards(mesh, merge_rules(rules, origin=Key("rules")))
    return batch_shape(recipe.batch, n_devices=n_devices, n_replicas=n_replicas).size


def tokenize_progress(observer: Observer) -> Callable[[int, int, int], None]:
    """Return a callback that shows the progress of tokenizing, one bar per dataset.

    It takes the bytes done, the total bytes, and the tokens made. The first call for a dataset has the bytes and tokens
    of an interrupted run.
    """
    progress = observer.progress()
    done_nbytes = -1  # -1: no dataset is in progress
    shown_tokens = ""

    def report_progress(nbytes: int, total: int, n_tokens: int) -> None:
        nonlocal done_nbytes, shown_tokens
        if done_nbytes < 0:
            progress.begin("tokenize", total, nbytes)
            done_nbytes = nbytes
        decimals = 1
        if n_tokens >= 10_000_000:
            decimals = 0
        tokens = f"{n_tokens / 1e6:,.{decimals}f} M tokens"
        # `--progress json` prints an event per note, without a minimum interval.
        # The text changes at most once per 0.1 M tokens, and only a changed text is passed on.
        if n_tokens and tokens != shown_tokens:
            progress.note(tokens)
            shown_tokens = tokens
        progress.advance(nbytes - done_nbytes)
        done_nbytes = nbytes
        if nbytes >= total:
            progress.end()
            done_nbytes = -1

    return report_progress
