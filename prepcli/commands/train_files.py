"""The files of a training run besides its checkpoints; process 0 alone writes those that all processes share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prepcli.commands.train_folder import RECIPE_FILE, TOKENS_FOLDER
from prepcli.commands.train_run import Run
from prepcli.engine.files import io_error
from prepcli.formats.run_steps import saved_steps
from trainer.recipe import Recipe, load_recipe, recipe_to_toml
from trainer.recipe.tables import keys_of, value_of

RUNS_FOLDER = Path("runs")


def kept_note(folder: Path) -> str:
    """Describe the data in a run's folder that the next start uses; empty if there is none."""
    kept = [f"step {step}" for step in saved_steps(folder)[-1:]]
    tokens = (folder / TOKENS_FOLDER).glob("*")
    if any(path.is_dir() and not path.name.endswith(".partial") for path in tokens):
        kept.append("the tokens")
    return f"kept in {folder}: {', '.join(kept)}" if kept else ""


def changed_keys(folder: Path, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the recipe keys whose values have changed since the run began, as (value then, value now)."""
    earlier_recipe = load_recipe(folder / RECIPE_FILE).recipe
    shared_keys = sorted({*keys_of(earlier_recipe)} & {*keys_of(recipe)})
    pairs = {key: (value_of(earlier_recipe, key), value_of(recipe, key)) for key in shared_keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def write_recipe(run: Run) -> None:
    """Write the complete recipe of a run; raise PrepError if the disk refuses it."""
    path = run.folder / RECIPE_FILE
    new_path = path.with_name(f"{RECIPE_FILE}.new")
    try:
        new_path.write_text(recipe_to_toml(run.recipe, run.loaded.origins))
        os.replace(new_path, path)
    except OSError as error:
        raise io_error(path, error) from error
