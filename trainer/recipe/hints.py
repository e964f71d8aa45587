"""Hints of recipe errors: the key that an unknown one stands for, and the form of a value that a key accepts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, Literal

from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo

from prepcli.core.errors import Key, Text, text
from trainer.recipe.formatting import (
    TomlValue,
    example_value,
    override_argument,
    parse_toml_value,
    suggest,
    to_toml,
)
from trainer.recipe.key_types import STRICT, KeySchema, alternatives
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES
from trainer.recipe.other_trainers import ADVICE, NAMES, OTHER_VALUES, VALUE_NAMES
from trainer.recipe.tables import KEY_SCHEMAS, OPTIMIZER_SCHEMAS, TABLE_NAMES, Recipe

# Maximum number of unknown keys that get a hint: searching a similar key takes a millisecond.
MAX_HINTED = 100


@cache
def _by_name(table: Literal["keys", "values", "advice"]) -> dict[str, str]:
    """Return the recipe keys, the recipe's values or the advice by the names of other trainers."""
    entries = {"keys": NAMES, "values": VALUE_NAMES, "advice": ADVICE}[table]
    return {name: meaning for meaning, names in entries.items() for name in names.split()}


def name_suffixes(name: str) -> Iterator[str]:
    """Yield a dotted name in lower case with underscores, then each of its shorter suffixes.

    >>> list(name_suffixes("llama.Hidden-Size"))
    ['llama.hidden_size', 'hidden_size']
    """
    parts = name.lower().replace("-", "_").split(".")
    for first in range(len(parts)):
        yield ".".join(parts[first:])


def _meaning(name: str, table: Literal["keys", "advice"]) -> str:
    """Return the meaning of a setting of another trainer, by its longest suffix with one, or ""."""
    meanings = _by_name(table)
    return next((meanings[suffix] for suffix in name_suffixes(name) if suffix in meanings), "")


def key_for_synonym(name: str) -> str:
    """Return the recipe key for a setting of another trainer, or "" for an unknown setting.

    >>> key_for_synonym("training.learning-rate")
    'optimizer.lr'
    """
    return _meaning(name, "keys")


def advice_for(name: str) -> str:
    """Return the hint for a setting that no recipe key replaces, or "" for an unknown setting."""
    return _meaning(name, "advice")


def value_for_synonym(value: str) -> str | None:
    """Return the recipe's name of a value, e.g. "bf16" -> "bfloat16", or None if it is unknown."""
    return _by_name("values").get(value.lower())


def unknown_leaves(path: str, value: TomlValue) -> Iterator[tuple[str, TomlValue]]:
    """Yield path and value of an unknown key, or of the keys of an unknown table that have hints of their own."""
    # A quoted key may contain a dot.
    meant_table = "" if "." in path else suggest(path, TABLE_NAMES)
    if not isinstance(value, dict) or not meant_table:
        yield from _flat_leaves(path, value)
        return
    yield path, value
    unknown = (key for key in value if f"{meant_table}.{key}" not in KEY_SCHEMAS)
    for key in islice(unknown, MAX_HINTED):
        yield from _flat_leaves(f"{path}.{key}", value[key])


def _flat_leaves(path: str, value: TomlValue) -> Iterator[tuple[str, TomlValue]]:
    """Yield the leaves of an unknown key's value if any has a specific hint, or else the key itself."""
    leaves = list(islice(_flatten(path, value), MAX_HINTED))
    has_hint = any(advice_for(leaf) or guess_key(leaf) for leaf, _ in leaves)
    if isinstance(value, dict) and has_hint:
        yield from leaves
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
        table, _, name = path.rpartition(".")
        # A quoted key `"model.path"` above the first table is spelled like a key, but is not one.
        if table != "optimizer":
            return f"`{name}` in [{table}], without quotes"
        # Only optimizers of other types have it.
        *others, last = [kind for kind, names in OPTIMIZER_SCHEMAS.items() if name in names]
        listing = f"{', '.join(others)} and {last}" if others else last
        return f"`{name}` is a key of {listing}"
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
        key_table, _, name = key.rpartition(".")
        hint = f"`{name} = {toml_value}`"
        if key_table != path.rpartition(".")[0]:
            hint += f" in [{key_table}]" if key_table else ", above the first table"
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
    keys = _by_name("keys")
    setting = next((suffix for suffix in name_suffixes(name) if suffix in keys), name)
    corrected = ""
    # The value of a setting of another trainer may mean something else in the recipe key that replaces it.
    if setting not in OTHER_VALUES.split():
        corrected = correct_value(key, value)
    return corrected or example_value(KEY_SCHEMAS[key])


def override_hint(key: str, toml_value: str) -> Text:
    """Return a hint that overrides a key with a TOML value."""
    value = parse_toml_value(toml_value)
    if not isinstance(value, bool | int):
        # The text after `=`, with as few quotes as the value needs
        (argument,) = shlex.split(override_argument(key, toml_value, KEY_SCHEMAS[key]))
        value = argument.partition("=")[2]
    return text("{}", Key(key, value, is_override=True))


def _known_keys_text(table: str) -> str:
    """Return the list of a table's known keys."""
    if table not in TABLE_NAMES:
        top_level_keys = [key for key in KEY_SCHEMAS if "." not in key]
        return f"known: {', '.join([*top_level_keys, *TABLE_NAMES])}"
    prefix = f"{table}."
    known = [key.removeprefix(prefix) for key in KEY_SCHEMAS if key.startswith(prefix)]
    return f"known in [{table}]: {', '.join(known)}"


@cache
def _key_model(key: str) -> type[BaseModel]:
    """Return a model with the key's type as its only field, `value`."""
    table, _, name = key.rpartition(".")
    fields: Mapping[str, FieldInfo] = Recipe.model_fields
    if table == "optimizer":
        tables = (each.model_fields for each in OPTIMIZER_TABLES.values())
        fields = next(each for each in tables if name in each)
    elif table:
        model: Any = Recipe.model_fields[table].annotation
        fields = model.model_fields
    annotation: Any = fields[name].annotation
    return create_model("KeyValue", __config__=STRICT, value=(annotation, fields[name]))


def accepts(key: str, value: object) -> bool:
    """Return whether a key accepts a value."""
    if key == "optimizer.type":
        return isinstance(value, str) and value in OPTIMIZER_TABLES
    try:
        _key_model(key).model_validate({"value": value})
    except ValidationError:
        return False
    return True


def correct_value(key: str, value: TomlValue) -> str:
    """Return a value as TOML in a form that a key accepts: the first accepted candidate, or "" if there is none."""
    for candidate in (value, *_candidate_values(value)):
        if accepts(key, candidate):
            return to_toml(candidate)
    return ""


def _candidate_values(value: Any) -> Iterator[Any]:
    """Yield likely meanings of a value: text as a number or list, 20.0 as 20, bf16 as bfloat16, a list as `1,8,1`."""
    if isinstance(value, str):
        yield _by_name("values").get(value.lower(), value.lower())
        yield value.lower()
        yield [value]
        for candidate in (value.strip(), value.strip().lower()):
            try:
                parsed = parse_toml_value(candidate)
            except (ValueError, RecursionError, KeyError):
                continue
            if not isinstance(parsed, str):
                yield parsed
                yield from _candidate_values(parsed)
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, list) and value and all(type(item) is int for item in value):
        yield ",".join(map(str, value))


def similar_choice(value: TomlValue, key_schema: KeySchema) -> str:
    """Return the choice of a key, or of its lists, that is similar to an invalid text, or "" if there is none."""
    items = value if isinstance(value, list) else [value]
    choices: list[str] = []
    for alternative in alternatives(key_schema):
        schema = alternative
        if isinstance(value, list):
            schema = alternative.get("items", {})
        choices += schema.get("enum", ())
    for item in items:
        if isinstance(item, str) and item not in choices and (similar := suggest(item, choices)):
            return similar
    return ""
