"""Keys of a recipe that do not exist, and the keys that were meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.recipe.corrections import suggest_value
from trainer.recipe.formatting import suggest, unquote
from trainer.recipe.synonyms import advice_for, key_for_synonym, translate_value
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES


def find_unknown_keys(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of each key that no recipe has, in the order of the file."""
    for name, value in tables.items():
        if name in TABLE_NAMES:
            inside = value.items() if isinstance(value, dict) else ()
            yield from ((f"{name}.{key}", each) for key, each in inside if f"{name}.{key}" not in KEY_SCHEMAS)
        elif name not in KEY_SCHEMAS or "." in name:  # a quoted key may have a dot in it
            yield from _unknown_table_keys(name, value)


def _unknown_table_keys(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the table itself, or those of its keys that are to move to a table of ours."""
    leaves = dict(_flatten(name, value))
    table = suggest(name, TABLE_NAMES)
    if table and isinstance(value, dict):
        yield name, value
        yield from ((f"{name}.{key}", each) for key, each in value.items() if f"{table}.{key}" not in KEY_SCHEMAS)
    elif any(advice_for(path) or guess_key(path) for path in leaves):
        yield from leaves.items()
    else:
        yield name, value


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, each in value.items():
        yield from _flatten(f"{path}.{key}", each)


def guess_key(path: str) -> str:
    """Return the key that was meant, or probably meant, by an unknown one; empty where none is near."""
    return key_for_synonym(path) or _closest_key_in_table(path) or _same_name_in_any_table(path)


def _closest_key_in_table(path: str) -> str:
    table, _, name = path.rpartition(".")
    if "." in table:
        return suggest(path, KEY_SCHEMAS)
    table = suggest(table, TABLE_NAMES) if table else ""
    known = {each.rpartition(".")[2]: each for each in KEY_SCHEMAS if each.rpartition(".")[0] == table}
    return known.get(suggest(name, known), "")


def _same_name_in_any_table(path: str) -> str:
    return next((other for other in KEY_SCHEMAS if other.rpartition(".")[2] == path.rpartition(".")[2]), "")


def unknown_key_hint(path: str, value: Any, is_override: bool = False) -> str:
    """Return what to write instead of an unknown key, with the user's value where our key takes it.

    Args:
        path: The unknown key, dotted.
        value: What the user gave it.
        is_set: Whether `--set` gave it.
    """
    if advice := advice_for(path):
        return advice
    table = suggest(path, TABLE_NAMES)
    if table and "." not in path and not key_for_synonym(path):
        return f"did you mean `{table}`?"
    key = guess_key(path)
    if not key:
        return _known_keys_text(suggest(path.rpartition(".")[0], TABLE_NAMES))
    if isinstance(value, dict):
        return f"did you mean `{key}`?"
    text = suggest_value(translate_value(path, value), KEY_SCHEMAS[key])
    written = set_option_text(key, text) if is_override else _assignment_text(key, text, path.rpartition(".")[0])
    return written if key in (key_for_synonym(path), _same_name_in_any_table(path)) else f"did you mean {written}?"


def option_hint(option: str, text: str) -> str:
    """Return what replaces an option that `prep train` does not have; empty where nothing like it is known.

    Args:
        option: With its dashes, as `--learning-rate`.
        text: The value that the user gave it; empty for none.
    """
    name = option.lstrip("-").replace("-", "_")
    if advice := advice_for(name):
        return advice
    key = name if name in KEY_SCHEMAS else key_for_synonym(name) or _same_name_in_any_table(name)
    if not key:
        return ""
    value = translate_value(name, text or True)
    return set_option_text(key, suggest_value(value, KEY_SCHEMAS[key]))


def set_option_text(key: str, text: str) -> str:
    """Return the `--set` option that gives a key a value, which is TOML."""
    return f"`--set {key}={unquote(text)}`"


def _assignment_text(key: str, text: str, current: str) -> str:
    table, _, name = key.rpartition(".")
    place = "" if table == current else f" in [{table}]" if table else ", above the first table"
    return f"`{name} = {text}`{place}"


def _known_keys_text(table: str) -> str:
    known = [each.removeprefix(f"{table}.") for each in KEY_SCHEMAS if each.rpartition(".")[0] == table]
    if table not in TABLE_NAMES:
        known = [*(each for each in KEY_SCHEMAS if "." not in each), *TABLE_NAMES]
    return f"known{f' in [{table}]' if table in TABLE_NAMES else ''}: {', '.join(known)}"
