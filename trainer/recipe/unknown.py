"""Keys of a recipe that do not exist, and the keys that were meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.recipe.corrections import suggestion
from trainer.recipe.spelling import near, plain
from trainer.recipe.synonyms import instead_of, key_of, translated
from trainer.recipe.tables import KEYS, TABLES


def unknown_keys(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of each key that no recipe has, in the order of the file."""
    for name, value in tables.items():
        if name in TABLES:
            inside = value.items() if isinstance(value, dict) else ()
            yield from ((f"{name}.{key}", each) for key, each in inside if f"{name}.{key}" not in KEYS)
        elif name not in KEYS or "." in name:  # a quoted key may have a dot in it
            yield from _in_unknown_table(name, value)


def _in_unknown_table(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the table itself, or those of its keys that are to move to a table of ours."""
    leaves = dict(_leaves(name, value))
    table = near(name, TABLES)
    if table and isinstance(value, dict):
        yield name, value
        yield from ((f"{name}.{key}", each) for key, each in value.items() if f"{table}.{key}" not in KEYS)
    elif any(instead_of(path) or meant_by(path) for path in leaves):
        yield from leaves.items()
    else:
        yield name, value


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, each in value.items():
        yield from _leaves(f"{path}.{key}", each)


def meant_by(path: str) -> str:
    """Return the key that was meant, or probably meant, by an unknown one; empty where none is near."""
    return key_of(path) or _near_in_table(path) or _in_other_table(path)


def _near_in_table(path: str) -> str:
    table, _, name = path.rpartition(".")
    if "." in table:
        return near(path, KEYS)
    table = near(table, TABLES) if table else ""
    known = {each.rpartition(".")[2]: each for each in KEYS if each.rpartition(".")[0] == table}
    return known.get(near(name, known), "")


def _in_other_table(path: str) -> str:
    return next((other for other in KEYS if other.rpartition(".")[2] == path.rpartition(".")[2]), "")


def hint_for(path: str, value: Any, is_set: bool = False) -> str:
    """Return what to write instead of an unknown key, with the user's value where our key takes it.

    Args:
        path: The unknown key, dotted.
        value: What the user gave it.
        is_set: Whether `--set` gave it.
    """
    if advice := instead_of(path):
        return advice
    table = near(path, TABLES)
    if table and "." not in path and not key_of(path):
        return f"did you mean `{table}`?"
    key = meant_by(path)
    if not key:
        return _known(near(path.rpartition(".")[0], TABLES))
    if isinstance(value, dict):
        return f"did you mean `{key}`?"
    text = suggestion(translated(path, value), KEYS[key])
    written = set_option(key, text) if is_set else _line(key, text, path.rpartition(".")[0])
    return written if key in (key_of(path), _in_other_table(path)) else f"did you mean {written}?"


def option_hint(option: str, text: str) -> str:
    """Return what replaces an option that `prep train` does not have; empty where nothing like it is known.

    Args:
        option: With its dashes, as `--learning-rate`.
        text: The value that the user gave it; empty for none.
    """
    name = option.lstrip("-").replace("-", "_")
    if advice := instead_of(name):
        return advice
    key = name if name in KEYS else key_of(name) or _in_other_table(name)
    if not key:
        return ""
    value = translated(name, text or True)
    return set_option(key, suggestion(value, KEYS[key]))


def set_option(key: str, text: str) -> str:
    """Return the `--set` option that gives a key a value, which is TOML."""
    return f"`--set {key}={plain(text)}`"


def _line(key: str, text: str, current: str) -> str:
    table, _, name = key.rpartition(".")
    place = "" if table == current else f" in [{table}]" if table else ", above the first table"
    return f"`{name} = {text}`{place}"


def _known(table: str) -> str:
    known = [each.removeprefix(f"{table}.") for each in KEYS if each.rpartition(".")[0] == table]
    if table not in TABLES:
        known = [*(each for each in KEYS if "." not in each), *TABLES]
    return f"known{f' in [{table}]' if table in TABLES else ''}: {', '.join(known)}"
