"""Write a complete recipe as TOML, as a run keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.recipe.corrections import is_accepted
from trainer.recipe.formatting import to_toml
from trainer.recipe.tables import KEY_SCHEMAS, Recipe, key_schemas_of, value_of

# Column of the comments, unless a value is longer.
COMMENT_COLUMN = 48
# The table that differs between the processes of a run.
PROCESS_TABLE = "cluster"


def recipe_to_toml(recipe: Recipe, origins: Mapping[str, str]) -> str:
    """Return TOML text with every key of a recipe except those of `cluster`, which `load_recipe` can read.

    Args:
        recipe: The recipe.
        origins: Origins of values from outside the file, by dotted key. Written as comments.
    """
    return "\n".join(_toml_lines(recipe, origins)) + "\n"


def _toml_lines(recipe: Recipe, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a recipe with all keys, each with the origin of its value."""
    current_table = ""
    schemas = key_schemas_of(recipe.optimizer.type)
    for key in schemas:
        table, _, name = key.rpartition(".")
        if table == PROCESS_TABLE:
            continue
        if table != current_table:
            yield from ("", f"[{table}]")
            current_table = table
        value = value_of(recipe, key)
        if value is None:
            line = f"# {name}: {schemas[key].get('absent')}"
        else:
            line = f"{name} = {_value_text(key, value)}"
        yield f"{line:<{COMMENT_COLUMN}}# {origins[key]}" if key in origins else line


def _value_text(key: str, value: Any) -> str:
    """Return a value as TOML. A list of one text becomes the text if the key accepts it."""
    is_one_text = (
        isinstance(value, tuple)
        and len(value) == 1
        and isinstance(value[0], str)
        and is_accepted(value[0], KEY_SCHEMAS[key])
    )
    return to_toml(value[0] if is_one_text else value)
