"""Resolve the recipe and the model of a plan. Neither weights nor data need to exist."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prepcli.commands.operations.recipe_files import find_recipe, recipes_folder, similar_recipe
from prepcli.core.errors import Key, Option, PrepError, text, usage_error
from prepcli.core.observer import Observer
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.inspection.contents import CheckpointContents, read_contents, read_mapped_contents
from prepcli.models.architecture import ArchConfig
from prepcli.models.presets import PRESETS, preset_name
from prepcli.models.registry import family_of
from prepcli.models.rule_text import merge_rules
from prepcli.models.rules import Rules
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.maps import TensorMap
from prepcli.sources.aliases import ALIASES_BY_NAME
from prepcli.sources.folders import make_access
from prepcli.sources.locate import locate
from prepcli.sources.source import read_config
from trainer.planning.model_shapes import PlannedModel, model_of_config, model_of_manifest
from trainer.recipe import Recipe, complete_recipe, load_recipe
from trainer.recipe.model_table import Model
from trainer.recipe.raw_recipe import RawRecipe
from trainer.recipe.toml_values import TomlTable
from trainer.run.random_start import random_config
from trainer.run.recipe_data import check_planned_recipe

RECIPE_SUFFIX = ".toml"
NAME_SIGNS = frozenset("/@:~")  # signs of paths, hub ids, revisions and URLs
DEFAULT_MAX_LENGTH = 2048  # tokens of a sequence in the plan of a checkpoint without a recipe
DEFAULT_SOURCE_LENGTH = 512


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """A recipe with its model and rules.

    Attributes:
        recipe: The recipe. Its mesh may have an axis of size -1.
        model: The model, with the recipe's rotary embedding.
        rules: Partition rules.
        rule_texts: The same as text.
        origin: Name of the checkpoint, the file or the published config with the model's shapes.
        is_recipe: Whether the user has named the recipe. The recipe of a checkpoint has default settings.
    """

    recipe: Recipe
    model: PlannedModel
    rules: Rules
    rule_texts: tuple[str, ...]
    origin: str
    is_recipe: bool


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The parts of a checkpoint for a plan.

    The manifest is empty if prep did not write the checkpoint.
    """

    model: PlannedModel
    origin: str
    manifest: Manifest


def resolve_target(
    target: str,
    overrides: tuple[str, ...],
    *,
    config: Path | None,
    default_mesh: str,
    offline: bool,
    observer: Observer,
    tensor_map: TensorMap | None = None,
) -> PlanTarget:
    """Return a recipe with its model and rules. A checkpoint gets a recipe with default settings.

    Args:
        target: A recipe or a checkpoint. A recipe is a path with the suffix `.toml`, or the name of a shipped recipe
            with or without `.toml`.
        overrides: `KEY=VALUE` texts that replace values of the recipe.
        config: A config.json instead of the checkpoint's.
        default_mesh: Mesh of a checkpoint without a recipe and without a recorded mesh.
        offline: Use only the hub's cache.
        observer: Receives progress and warnings.
        tensor_map: Map of the checkpoint's tensors.

    Raises:
        PrepError: The recipe is invalid, or the model is unknown or not supported.
    """
    path = _recipe_path(target)
    is_recipe = path.suffix == RECIPE_SUFFIX
    if is_recipe:
        if tensor_map is not None:
            what = text("{} has no effect for {}", Option("map"), target)
            hint = text("remove {}, or name a checkpoint", Option("map"))
            raise usage_error(what, "a recipe starts from a converted model", hint)
        recipe = load_recipe(path, overrides).recipe
        checkpoint = _read_start(recipe.model, config, offline=offline, observer=observer)
    else:
        if config is None:
            _check_name(target)
        checkpoint = _read_checkpoint(
            target, config, offline=offline, observer=observer, tensor_map=tensor_map
        )
        mesh = checkpoint.manifest.mesh or default_mesh
        recipe = complete_recipe(_default_recipe(target, checkpoint.model, mesh), overrides).recipe
    model = checkpoint.model.of_recipe(recipe.model)
    check_planned_recipe(recipe, model, names_data=is_recipe)
    rule_texts = recipe.rules if recipe.rules is not None else checkpoint.manifest.rules
    return PlanTarget(
        recipe=recipe,
        model=model,
        rules=merge_rules(rule_texts, origin=Key("rules")),
        rule_texts=tuple(rule_texts),
        origin=checkpoint.origin,
        is_recipe=is_recipe,
    )


def _recipe_path(target: str) -> Path:
    """Return the path of a recipe file or of the shipped recipe with this name, else the path itself.

    Raises:
        UsageError: A shipped recipe and a file have this name.
    """
    path = find_recipe(Path(target))
    shipped = recipes_folder() / path.name
    is_shipped = path.suffix == RECIPE_SUFFIX and not path.exists() and shipped.is_file()
    return shipped if is_shipped else path


def _check_name(name: str) -> None:
    """Raise UsageError for a misspelled name of a shipped recipe that is not a path, alias, hub id or preset."""
    if (
        NAME_SIGNS & {*name}
        or os.path.exists(name)
        or name in ALIASES_BY_NAME
        or preset_name(name) is not None
    ):
        return
    folders = [path.name for path in Path().iterdir() if path.is_dir()]
    if similar := similar_recipe(name, [*ALIASES_BY_NAME, *folders]):
        why = "not a folder here, not a shipped recipe, not an alias, and a hub id has the form owner/name"
        raise usage_error(
            f"no recipe or checkpoint called `{name}`", why, f"did you mean `{similar}`?"
        )


def _read_start(
    table: Model, config: Path | None, *, offline: bool, observer: Observer
) -> _Checkpoint:
    """Read the start model of a recipe."""
    if table.path is not None:
        return _read_checkpoint(table.path, config, offline=offline, observer=observer)
    if config is not None:
        return _Checkpoint(model_of_config(read_config(config)), str(config), NO_MANIFEST)
    return _Checkpoint(
        model_of_config(random_config(table)),
        f"{table.preset or table.config}, random start",
        NO_MANIFEST,
    )


def _read_checkpoint(
    name: str,
    config: Path | None,
    *,
    offline: bool,
    observer: Observer,
    tensor_map: TensorMap | None = None,
) -> _Checkpoint:
    """Read the model from `config`, the checkpoint's headers, or the published configs if the path does not exist."""
    access = make_access(observer, offline=offline, stream=True, allow_urls=True)
    if tensor_map is not None:
        contents = read_mapped_contents(locate(name, access=access), config, tensor_map)
        return _Checkpoint(_stored_model(contents), contents.display_name, NO_MANIFEST)
    if config is not None:
        path = config / "config.json" if config.is_dir() else config
        return _Checkpoint(model_of_config(read_config(path)), str(path), NO_MANIFEST)
    # An existing folder wins over a preset of the same name, because its shapes may differ from the published config.
    preset = None if os.path.exists(os.path.expanduser(name)) else preset_name(name)
    if preset is not None:
        return _Checkpoint(
            model_of_config(PRESETS[preset]), f"the published config of {preset}", NO_MANIFEST
        )
    contents = read_contents(locate(name, access=access))
    if not contents.config:
        why = f"{contents.display_name} has no config.json"
        hint = text("{}", Option("config", "CONFIG.json"))
        raise PrepError("the shapes of the model are unknown", why, hint)
    if contents.manifest.is_tree:
        return _Checkpoint(
            model_of_manifest(contents.manifest), contents.display_name, contents.manifest
        )
    return _Checkpoint(_stored_model(contents), contents.display_name, NO_MANIFEST)


def _stored_model(contents: CheckpointContents) -> PlannedModel:
    """Return the model of the config and the tensors of a checkpoint without a manifest."""
    head_tensor = family_of(contents.config).tying.head_tensor
    # Some families use a stored head although the config ties it. It then counts as a parameter of its own.
    has_stored_head = head_tensor in {entry.name for entry in contents.entries}
    return model_of_config(contents.config, has_stored_head=has_stored_head)


def _default_recipe(name: str, model: PlannedModel, mesh: str) -> RawRecipe:
    """Return a recipe with default settings for a model."""
    arch_config = family_of(model.config).arch_config(model.config)
    tables = {
        "mesh": mesh,
        "model": {
            "path": name,
            "dtype": "bfloat16",
            "remat_policy": "nothing_saveable",
            "attention_kernel": "blockwise",
            "scan_layers": model.scan,
        },
        "data": _default_data(arch_config),
        "batch": {"per_replica": 1},
        # Recipes require a learning rate and a number of steps. The plan of one step depends on neither.
        "optimizer": {"lr": 1e-4},
        "train": {"steps": 1},
    }
    return RawRecipe(Path("plan.toml"), tables)


def _default_data(arch_config: ArchConfig) -> TomlTable:
    """Return the `[data]` table of the default recipe."""
    # `max_positions` is 0 for T5, which has relative positions and no limit.
    length = min(arch_config.max_positions or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    if arch_config.encoder is None:
        return {"type": "text", "path": "data", "seq_length": length}
    source = {"fields": "[source], target", "source_length": DEFAULT_SOURCE_LENGTH}
    return {"type": "json", "path": "data", "seq_length": length, **source}
