"""Unknown keys of a recipe, and hints for the keys probably meant."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from itertools import islice

from prepcli.core.errors import Key, Text, text
from trainer.recipe.corrections import suggest_value
from trainer.recipe.formatting import example_value, suggest
from trainer.recipe.optimizer_tables import optimizer_type
from trainer.recipe.other_trainers import advice_for, keeps_value, key_for_synonym
from trainer.recipe.override_values import override_argument
from trainer.recipe.tables import KEY_SCHEMAS, OPTIMIZER_SCHEMAS, TABLE_NAMES
from trainer.recipe.toml_values import TomlTable, TomlValue, parse_toml_value

# Maximum number of unknown keys that get a hint.
MAX_HINTED = 100


def find_unknown_keys(
    tables: Mapping[str, TomlValue],
) -> tuple[list[tuple[str, TomlValue]], list[str]]:
    """Return the unknown keys, in the order of the file.

    Returns:
        Dotted path and value of the first MAX_HINTED unknown keys and of the keys below them, and
        the paths of the remaining ones. They get no hint, because searching a similar key takes a
        millisecond.
    """
    unknown = [*_unknown_items(tables)]
    hinted: list[tuple[str, TomlValue]] = []
    for path, value in unknown[:MAX_HINTED]:
        # A quoted key may contain a dot.
        is_table = "." not in path or path in tables
        if is_table:
            hinted += _unknown_table_keys(path, value)
        else:
            hinted += _unknown_leaves(path, value)
    return hinted, [path for path, _ in unknown[MAX_HINTED:]]


def _unknown_items(tables: Mapping[str, TomlValue]) -> Iterator[tuple[str, TomlValue]]:
    """Yield path and value of each unknown table, and of each unknown key in a known table."""
    for name, value in tables.items():
        if name in TABLE_NAMES:
            # Validation reports a value that is not a table.
            if isinstance(value, dict):
                for key, item in value.items():
                    if not is_known(name, key, value):
                        yield f"{name}.{key}", item
        elif name not in KEY_SCHEMAS or "." in name:
            yield name, value


def is_known(table: str, key: str, values: TomlTable) -> bool:
    """Return whether a table has a key. `[optimizer]` has the keys of its type.

    Args:
        table: Name of the table.
        key: Name of the key in it.
        values: Values of the table.
    """
    if table == "optimizer":
        return key in OPTIMIZER_SCHEMAS[optimizer_type(values)]
    return f"{table}.{key}" in KEY_SCHEMAS


def _unknown_table_keys(name: str, value: TomlValue) -> Iterator[tuple[str, TomlValue]]:
    """Yield the keys of an unknown table that have a specific hint, or else the table itself."""
    table = suggest(name, TABLE_NAMES)
    if table and isinstance(value, dict):
        yield name, value
        unknown = (
            (f"{name}.{key}", item)
            for key, item in value.items()
            if f"{table}.{key}" not in KEY_SCHEMAS
        )
        for path, item in islice(unknown, MAX_HINTED):
            yield from _unknown_leaves(path, item)
    else:
        yield from _unknown_leaves(name, value)


def _unknown_leaves(path: str, value: TomlValue) -> Iterator[tuple[str, TomlValue]]:
    """Yield the leaves of an unknown key's value if any has a specific hint, or else the key itself."""
    if not isinstance(value, dict):
        yield path, value
        return
    leaves = dict(islice(_flatten(path, value), MAX_HINTED))
    has_hint = any(advice_for(leaf) or guess_key(leaf) for leaf in leaves)
    if has_hint:
        yield from leaves.items()
    else:
        yield path, value


def _flatten(path: str, value: TomlValue) -> Iterator[tuple[str, TomlValue]]:
    """Yield each key below a path with its value."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, item in value.items():
        yield from _flatten(f"{path}.{key}", item)


def guess_key(path: str) -> str:
    """Return the recipe key probably meant by an unknown key, or "" if none is close."""
    # A name of another trainer is known for certain, so it comes before similar spellings.
    return key_for_synonym(path) or _closest_key_in_table(path) or _same_name_in_any_table(path)


def _closest_key_in_table(path: str) -> str:
    """Return the known key most similar to a path, first by its table, then by its name."""
    table, _, name = path.rpartition(".")
    if "." in table:
        return suggest(path, KEY_SCHEMAS)
    if table:
        table = suggest(table, TABLE_NAMES)
    keys_by_name: dict[str, str] = {}
    for key in KEY_SCHEMAS:
        key_table, _, key_name = key.rpartition(".")
        if key_table == table:
            keys_by_name[key_name] = key
    return keys_by_name.get(suggest(name, keys_by_name), "")


def _same_name_in_any_table(path: str) -> str:
    name = path.rpartition(".")[2]
    return next((key for key in KEY_SCHEMAS if key.rpartition(".")[2] == name), "")


def unknown_key_hint(path: str, value: TomlValue, is_override: bool = False) -> str:
    """Return a hint for an unknown key: the recipe key to use, with the user's value if that key accepts it.

    Args:
        path: Dotted path of the unknown key.
        value: Its value.
        is_override: Whether `--set` gave it.
    """
    if advice := advice_for(path):
        return advice
    if path in KEY_SCHEMAS:
        return _other_optimizers_text(path)
    table = suggest(path, TABLE_NAMES)
    if table and "." not in path and not key_for_synonym(path):
        return f"did you mean `{table}`?"
    key = guess_key(path)
    if not key:
        return _known_keys_text(suggest(path.rpartition(".")[0], TABLE_NAMES))
    if isinstance(value, dict):
        return f"did you mean `{key}`?"
    toml_value = _value_text(path, value, key)
    if is_override:
        hint = override_hint(key, toml_value)
    else:
        hint = _assignment_text(key, toml_value, path.rpartition(".")[0])
    is_certain = key in (key_for_synonym(path), _same_name_in_any_table(path))
    if is_certain:
        return hint
    return text("did you mean {}?", hint)


def option_hint(option: str, value_text: str) -> str:
    """Return a hint for an unknown option of `prep train`, usually the `--set` option to use, or "" if no key matches.

    Args:
        option: The option with its dashes, such as `--learning-rate`.
        value_text: Its value, or "" for none.
    """
    name = option.lstrip("-").replace("-", "_")
    if advice := advice_for(name):
        return advice
    key = name
    if name not in KEY_SCHEMAS:
        key = key_for_synonym(name) or _same_name_in_any_table(name)
    if not key:
        return ""
    # An option without a value is a switch, e.g. `--bf16`.
    return override_hint(key, _value_text(name, value_text or True, key))


def _value_text(name: str, value: TomlValue, key: str) -> str:
    """Return the value of an unknown key as TOML for a recipe key, or the recipe key's example."""
    if keeps_value(name):
        return suggest_value(value, KEY_SCHEMAS[key])
    return example_value(KEY_SCHEMAS[key])


def override_hint(key: str, toml_value: str) -> Text:
    """Return a hint that overrides a key with a TOML value."""
    value = parse_toml_value(toml_value)
    if not isinstance(value, bool | int):
        # The text after `=`, with as few quotes as the value needs
        (argument,) = shlex.split(override_argument(key, toml_value, KEY_SCHEMAS[key]))
        value = argument.partition("=")[2]
    return text("{}", Key(key, value, is_override=True))


def _assignment_text(key: str, toml_value: str, current: str) -> str:
    """Return e.g. `lr = 1e-4` with the table to put it in."""
    table, _, name = key.rpartition(".")
    assignment = f"`{name} = {toml_value}`"
    if table == current:
        return assignment
    if table:
        return f"{assignment} in [{table}]"
    return f"{assignment}, above the first table"


def _other_optimizers_text(path: str) -> str:
    """Return a hint for a key that only optimizers of other types have."""
    table, _, name = path.rpartition(".")
    # A quoted key `"model.path"` above the first table is spelled like a key, but is not one.
    if table != "optimizer":
        return f"`{name}` in [{table}], without quotes"
    types = [key for key, names in OPTIMIZER_SCHEMAS.items() if name in names]
    listing = types[-1]
    if len(types) > 1:
        listing = f"{', '.join(types[:-1])} and {types[-1]}"
    return f"`{name}` is a key of {listing}"


def _known_keys_text(table: str) -> str:
    """Return the list of a table's known keys."""
    if table not in TABLE_NAMES:
        top_level_keys = [key for key in KEY_SCHEMAS if "." not in key]
        return f"known: {', '.join([*top_level_keys, *TABLE_NAMES])}"
    prefix = f"{table}."
    known = [key.removeprefix(prefix) for key in KEY_SCHEMAS if key.startswith(prefix)]
    return f"known in [{table}]: {', '.join(known)}"
