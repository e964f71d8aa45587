"""The complete recipe as TOML, as a run keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer.recipe.formatting import to_toml
from trainer.recipe.tables import KEY_SCHEMAS, Recipe, value_of

COMMENT_COLUMN = 48  # where comments begin, unless a value is longer


def recipe_to_toml(recipe: Recipe, origins: Mapping[str, str]) -> str:
    """A recipe that `load` reads again to an equal one: every key, with the origin of what the file did not give."""
    return "\n".join(_lines(recipe, origins)) + "\n"


def _lines(recipe: Recipe, origins: Mapping[str, str]) -> Iterator[str]:
    above = ""
    for key in KEY_SCHEMAS:
        table, _, name = key.rpartition(".")
        if table != above:
            yield from ("", f"[{table}]")
            above = table
        value = value_of(recipe, key)
        line = f"# {name}: {KEY_SCHEMAS[key]['absent']}" if value is None else f"{name} = {_value_text(value)}"
        yield f"{line:<{COMMENT_COLUMN}}# {origins[key]}" if key in origins else line


def _value_text(value: object) -> str:
    return to_toml(value[0]) if isinstance(value, tuple) and len(value) == 1 else to_toml(value)
