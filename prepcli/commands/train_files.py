"""The files of a training run besides its checkpoints; process 0 alone writes those that all processes share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prepcli.commands.train_run import Run
from prepcli.engine.files import io_error
from prepcli.errors import PrepError
from prepcli.execution.run_place import TOKENS_FOLDER, RunPlace
from prepcli.formats.run_steps import RECIPE_FILE
from trainer.data.store_journal import read_journal
from trainer.files.reading import not_regular_error
from trainer.files.writing import write_file
from trainer.recipe import Recipe, load_recipe, recipe_to_toml
from trainer.recipe.tables import keys_of, value_of


def kept_note(place: RunPlace) -> str:
    """Describe the data of a run for the next start; empty if there is none."""
    kept = {place.name: [f"step {step}" for step in place.known_steps()[-1:]]}
    stores = [path for path in (place.local_folder / TOKENS_FOLDER).glob("*") if path.is_dir()]
    if any(not path.name.endswith(".partial") for path in stores):
        kept.setdefault(str(place.local_folder), []).append("the tokens")
    elif any(state.meta.n_tokens for path in stores for state in read_journal(path)):
        kept.setdefault(str(place.local_folder), []).append("a part of the tokens")
    return "; ".join(f"kept in {where}: {', '.join(names)}" for where, names in kept.items() if names)


def changed_keys(recipe_file: Path, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the recipe keys whose values have changed since the run began, as (value then, value now)."""
    if recipe_file.exists() and not recipe_file.is_file():
        raise not_regular_error(recipe_file)
    earlier_recipe = load_recipe(recipe_file).recipe
    shared_keys = sorted({*keys_of(earlier_recipe)} & {*keys_of(recipe)})
    pairs = {key: (value_of(earlier_recipe, key), value_of(recipe, key)) for key in shared_keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def write_recipe(run: Run) -> None:
    """Write the complete recipe of a run; raise PrepError if it cannot be written."""
    write_run_file(run, RECIPE_FILE, recipe_to_toml(run.recipe, run.loaded.origins))


def write_run_file(run: Run, name: str, text: str) -> None:
    """Replace a file of a run and store it; raise PrepError if it cannot be written."""
    path = run.folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    except OSError as error:
        raise io_error(path, error) from error
    run.place.store_file(name)


@contextmanager
def store_at_end(place: RunPlace, name: str) -> Iterator[None]:
    """Store a file of the run at the end; after another error, ignore errors of the store."""
    try:
        yield
    except BaseException:
        with suppress(PrepError):
            place.store_file(name)
        raise
    place.store_file(name)
