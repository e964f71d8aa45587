"""What a user gave: a file and `--set` options, as they stand, and where each key stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import PrepError, usage
from trainer.recipe.lines import key_lines
from trainer.recipe.spelling import near, options, shown
from trainer.recipe.tables import KEYS, TABLES

NOT_IN_TOML = re.compile(r"[\x00-\x08\n-\x1f\x7f\ud800-\udfff]")  # the last are bytes of a command line, not UTF-8


@dataclass(frozen=True, slots=True)
class Given:
    """A recipe as it was given: the file's `text`, and `tables` of raw values in which those of `sets` stand.

    `sets`: dotted keys that `--set` gave. No key is known to be right.
    """

    path: Path
    text: str
    tables: Mapping[str, Any]
    sets: frozenset[str] = frozenset()

    def has(self, key: str) -> bool:
        """Whether the file or `--set` gives a key or a table."""
        table, _, name = key.partition(".")
        values = self.tables.get(table)
        return table in self.tables if not name else isinstance(values, Mapping) and name in values

    def get(self, key: str) -> Any:
        """The raw value of a key that is given."""
        table, _, name = key.partition(".")
        return self.tables[table][name] if name else self.tables[table]

    def copied(self) -> dict[str, Any]:
        """The tables, to be changed."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in self.tables.items()}

    def place(self, key: str) -> str:
        """Where a key stands: `--set`, or file:line; of one that is not given, its table's line or the file."""
        if key in self.sets:
            return "--set"
        lines = key_lines(self.text)
        whole = tuple(key.split("."))
        line = lines.get(whole) or lines.get(whole[:1])
        return f"{self.path}:{line}" if line else f"{self.path}"

    def hint(self, key: str, value: str) -> str:
        """How to give a key another value, where it was given."""
        return f"`--set {key}={value}`" if key in self.sets else f"`{key.rpartition('.')[2]} = {value}`"


def read(path: Path) -> Given:
    """What a file gives. PrepError where it is not there, no file, not UTF-8 or not TOML."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        meant = near(path.name, sorted(each.name for each in path.parent.glob("*.toml")))
        hint = f"did you mean `{path.parent / meant}`?" if meant else ""
        raise usage(f"{path} does not exist", "a recipe is a TOML file", hint) from None
    except IsADirectoryError:
        raise usage(f"{path} is a folder", "a recipe is a TOML file", _recipes_in(path)) from None
    except OSError as error:
        raise PrepError(f"{path} cannot be read", error.strerror or str(error)) from None
    text = _text(data, path)
    return Given(path, text, _tables(text, path))


def _recipes_in(folder: Path) -> str:
    found = sorted(folder.glob("*.toml"))[:5]
    return f"there: {', '.join(map(str, found))}" if found else ""


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode().removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        why = f"byte {error.start} of the file is 0x{error.object[error.start]:02x}"
        raise usage(f"{path}:{line}: not UTF-8", why, "save the file as UTF-8") from None


def _tables(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why, _, at = str(error).rpartition(" (at ")  # line 3, column 7) or end of document)
        line, column = re.findall(r"\d+", at) or (text.count("\n") + 1, None)
        hint = 'text stands in quotes: `mesh = "1,1,8"`' if why == "Invalid value" else ""
        column_text = f" (column {column})" if column else ""
        raise usage(f"{path}:{line}: not TOML", f"{why}{column_text}", hint) from None
    except (RecursionError, ValueError):
        raise usage(f"{path}: not a recipe", "lists are nested too deeply, or a number has too many digits") from None


def with_sets(given: Given, sets: Sequence[str]) -> Given:
    """What is given with `a.b=v` texts in place of the file's values, the last one of a key.

    v is TOML; where it is not, or where the key takes text and v is none, it is text as it stands.

    A usage error where one is not of that form or its key is not known.
    """
    tables = given.copied()
    keys = set()
    for text in sets:
        key, value = _setting(text)
        table, _, name = key.rpartition(".")
        values = tables.setdefault(table, {}) if table else tables
        if isinstance(values, dict):  # else the file is wrong, and validation says so
            values[name] = value
        keys.add(key)
    return Given(given.path, given.text, tables, frozenset(keys))


def _setting(text: str) -> tuple[str, Any]:
    key, equals, right = (part.strip(" \t") for part in text.partition("="))
    option = f"`--set {shown(text)[1:-1]}`"
    if not equals:
        raise usage(f"{option} has no value", "it takes KEY=VALUE", "`--set optimizer.lr=1e-4`")
    if key in TABLES:
        raise usage(f"{option} sets a whole table", "it sets one key", f"`--set {key}.KEY=VALUE`")
    if key not in KEYS:
        raise unknown(key, "--set")
    if NOT_IN_TOML.search(right):
        raise usage(f"{option} is not one line of text", "a value is what a line of a recipe can hold")
    return key, _value(right, {option["type"] for option in options(KEYS[key])})


def _value(text: str, types: Collection[str]) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if {*types} <= {"string", "array"} and not isinstance(value, str | list) else value  # mesh=8: text


def unknown(key: str, place: str) -> PrepError:
    """The error of a key that there is not: with the one that was meant, here or in another table, or all of them."""
    table, _, name = key.rpartition(".")
    known = [each.removeprefix(f"{table}.") for each in KEYS if each.rpartition(".")[0] == table]
    if table not in TABLES:
        known = [*(each for each in KEYS if "." not in each), *TABLES]
    elsewhere = [other for other in KEYS if other.rpartition(".")[2] == name]
    why = "every key must be known, so that a typing error is never a silent default"
    if meant := near(name, known) if table in ("", *TABLES) else near(key, KEYS):
        hint = f"did you mean `{meant}`?"
    elif elsewhere:
        hint = f"did you mean `{elsewhere[0]}`{'' if '.' in elsewhere[0] else ', above the first table'}?"
    else:
        hint = f"known{f' in [{table}]' if table in TABLES else ''}: {', '.join(known)}"
    return usage(f"{place}: unknown key `{key}`", why, hint)
