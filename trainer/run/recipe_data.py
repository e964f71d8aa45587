"""The data of a recipe without a run: tokenized for the recipe's model, with neither weights nor devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.core.errors import Key
from prepcli.core.observer import Observer
from prepcli.execution.training_storage import TOKENS_FOLDER
from prepcli.formats.lock_file import Lock
from prepcli.models.mesh import parse_mesh
from prepcli.sources.folders import make_access
from prepcli.sources.generation_config import folder_generation_defaults
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.recorded_sources import apply_lock, pinned_revision
from prepcli.sources.references import advise_conversion
from prepcli.sources.source import Source
from prepcli.targets.hf_folder import tokenizer_folder
from trainer.planning.model_shapes import PlannedModel, model_of_config, model_of_manifest
from trainer.recipe import Recipe, batch_shape
from trainer.run.observe import tokenize_progress
from trainer.run.random_start import random_config
from trainer.run.remote_data import DataFinder
from trainer.run.start import checkpoint_tokenizer_folder, read_recipe_lock
from trainer.run.storage import RUNS_FOLDER

if TYPE_CHECKING:
    from trainer.data.tokenize_config import TokenizeConfig
    from trainer.training.source_datasets import Datasets


@dataclass(frozen=True, slots=True)
class RecipeModel:
    """The parts of a recipe's model for its data.

    Attributes:
        model: The model, with the changes of the recipe.
        tokenizer_folder: Folder with its tokenizer.
    """

    model: PlannedModel
    tokenizer_folder: Path

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a text when the model generates."""
        vocab = self.model.true_vocab_size
        defaults = folder_generation_defaults(self.model.config, self.tokenizer_folder, vocab)
        return defaults.eos_token_ids


def open_datasets(
    recipe: Recipe,
    *,
    out: Path | None,
    offline: bool,
    observer: Observer,
    checks_digests: bool = True,
) -> Datasets:
    """Return the datasets of a recipe, from the cache or tokenized now.

    Args:
        recipe: The recipe.
        out: Folder of its run. None for the default.
        offline: Use only the caches of the hub.
        observer: Receives notes and progress.
        checks_digests: See `TokenizeConfig`.

    Raises:
        PrepError: The model or the data is missing or invalid.
    """
    from trainer.training.datasets import build_datasets

    remote = DataFinder(make_access(observer, offline=offline), observer.note)
    opened = _open_checked_model(recipe, remote, offline=offline, observer=observer)
    return build_datasets(
        recipe,
        opened.model,
        model_config=opened.model.config,
        folders={"tokenizer": opened.tokenizer_folder, "cache": tokens_folder(recipe, out)},
        stop_ids=opened.stop_ids,
        remote=remote,
        checks_digests=checks_digests,
        progress=tokenize_progress(observer),
        note=observer.note,
    )


def open_token_configs(
    recipe: Recipe, *, out: Path | None, offline: bool, observer: Observer
) -> dict[str, TokenizeConfig]:
    """Return the config of each token store of a recipe, by name. See `tokenize_configs`.

    The arguments are as for `open_datasets`.

    Raises:
        PrepError: The model or the recipe is invalid.
    """
    from trainer.training.datasets import tokenize_configs

    remote = DataFinder(make_access(observer, offline=offline), observer.note)
    opened = _open_checked_model(recipe, remote, offline=offline, observer=observer)
    configs = tokenize_configs(
        recipe,
        opened.model,
        model_config=opened.model.config,
        folders={"tokenizer": opened.tokenizer_folder, "cache": tokens_folder(recipe, out)},
        stop_ids=opened.stop_ids,
        remote=remote,
        note=observer.note,
    )
    return dict(configs)


def tokens_folder(recipe: Recipe, out: Path | None) -> Path:
    """Return the folder of the tokens of a run, unless the recipe has a `data.cache`."""
    return (out or RUNS_FOLDER / recipe.name) / TOKENS_FOLDER


def _open_checked_model(
    recipe: Recipe, remote: DataFinder, *, offline: bool, observer: Observer
) -> RecipeModel:
    """Return the model of a recipe, after the checks of both. See `open_recipe_model`."""
    from trainer.training.recipe_checks import check_inputs, check_model

    # A missing data file is found before a model is located, which may read a remote one.
    check_inputs(recipe, remote)
    opened = open_recipe_model(recipe, offline=offline, observer=observer)
    check_model(recipe, opened.model)
    return opened


def check_planned_recipe(recipe: Recipe, model: PlannedModel, *, names_data: bool) -> None:
    """Check a recipe whose data and tokenizer may be on another machine. No network is used.

    Args:
        recipe: The recipe.
        model: Its model.
        names_data: Whether the recipe names data. The recipe of a checkpoint to plan has a placeholder.

    Raises:
        PrepError: The recipe does not fit its model, or the inputs that are on this machine.
    """
    from trainer.training.recipe_checks import check_inputs, check_model

    if names_data:
        check_inputs(recipe, may_be_absent=True)
    check_model(recipe, model)


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
    lock: Lock | None = None
    revision: str | None = None
    if recipe.model.lock is not None:
        lock = read_recipe_lock(recipe)
        revision = pinned_revision(recipe.model.path, None, lock)
    access = make_access(observer, offline=offline, stream=True, allow_urls=True)
    with advise_conversion(recipe.model.path):
        located = locate(recipe.model.path, revision, access=access)
        source = open_source(located)
    if lock is not None:
        source = apply_lock(source, lock, str(recipe.model.lock), located.files.commit)
    model = _source_model(source).of_recipe(recipe.model)
    return RecipeModel(model, checkpoint_tokenizer_folder(source))


def _source_model(source: Source) -> PlannedModel:
    """Return the model of a checkpoint, of prep or of another format."""
    if source.tree_manifest.is_tree:
        return model_of_manifest(source.tree_manifest)
    return model_of_config(source.config)


def run_batch_size(recipe: Recipe) -> int:
    """Return the sequences of a step of a recipe.

    Raises:
        UsageError: The size depends on the number of devices, and the mesh does not name it.
    """
    if recipe.batch.size is not None:
        return recipe.batch.size
    mesh = parse_mesh(recipe.mesh, Key("mesh"))
    n_replicas = mesh.size("dp") * mesh.size("fsdp")
    return batch_shape(recipe.batch, n_devices=mesh.n_devices, n_replicas=n_replicas).size
