"""Settings of other trainers, and the recipe keys or commands that replace them.

The words are data: `other_trainers.toml` in the folder of this module. They serve the hints of unknown keys
and options, the reference page of recipes, and the tables of the migration pages. The file is read
when the first hint is needed, because parsing it takes as long as starting a small command.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field

DATA_FILE = Path(__file__).with_suffix(".toml")
CHECKED = ConfigDict(extra="forbid", frozen=True)
Names = tuple[str, ...]
Value = TypeVar("Value")


class OtherValues(BaseModel):
    """Settings whose values mean something else in the recipe key that replaces them."""

    model_config = CHECKED

    names: Names


class Advice(BaseModel):
    """Settings that no recipe key replaces, and what to do instead."""

    model_config = CHECKED

    names: Names
    hint: str


class MigrationRow(BaseModel):
    """A row of a migration page: settings, or a text, and the counterpart in prep.

    Attributes:
        settings: Settings of the other trainer.
        text: Markdown of the first cell of a row without settings.
        prep: Markdown of the counterpart. By default it is derived from the settings.
        difference: Markdown of the last cell.
    """

    model_config = CHECKED

    settings: Names = ()
    text: str = ""
    prep: str = ""
    difference: str = ""


class MigrationTable(BaseModel):
    """The table below one heading of a migration page."""

    model_config = CHECKED

    page: str
    heading: str
    column: str
    rows: tuple[MigrationRow, ...]


class OtherTrainers(BaseModel):
    """The contents of the data file.

    Attributes:
        names: Names of a setting in other trainers, by recipe key.
        value_names: Names of a value in other trainers, by the recipe's value.
        other_values: Settings whose values mean something else in the recipe key.
        advice: Settings without a recipe key.
        tables: Tables of the migration pages.
    """

    model_config = CHECKED

    names: Mapping[str, Names]
    value_names: Mapping[str, Names]
    other_values: OtherValues
    advice: tuple[Advice, ...]
    tables: tuple[MigrationTable, ...] = Field(min_length=1)


@cache
def other_trainers() -> OtherTrainers:
    """Read and validate DATA_FILE, the names of settings in other trainers."""
    return OtherTrainers.model_validate(tomllib.loads(DATA_FILE.read_text(encoding="utf-8")))


@cache
def _key_by_name() -> dict[str, str]:
    return _by_name((names, key) for key, names in other_trainers().names.items())


@cache
def _value_by_name() -> dict[str, str]:
    return _by_name((names, value) for value, names in other_trainers().value_names.items())


@cache
def hint_by_name() -> dict[str, str]:
    """Return the hint of each setting that no recipe key replaces."""
    return _by_name((advice.names, advice.hint) for advice in other_trainers().advice)


def _by_name(entries: Iterable[tuple[Names, Value]]) -> dict[str, Value]:
    """Return the values by each of their names."""
    values: dict[str, Value] = {}
    for names, value in entries:
        values |= dict.fromkeys(names, value)
    return values


def key_for_synonym(name: str) -> str:
    """Return the recipe key for a setting of another trainer, or "" for an unknown setting.

    >>> key_for_synonym("training.learning-rate")
    'optimizer.lr'
    """
    return _find_by_suffix(name, _key_by_name()) or ""


def advice_for(name: str) -> str:
    """Return the hint for a setting that no recipe key replaces, or "" for an unknown setting."""
    return _find_by_suffix(name, hint_by_name()) or ""


def value_for_synonym(value: str) -> str | None:
    """Return the recipe's name of a value, e.g. "bf16" -> "bfloat16", or None if it is unknown."""
    return _value_by_name().get(value.lower())


def _find_by_suffix(name: str, values: Mapping[str, Value]) -> Value | None:
    """Return the value of the name, else of its longest suffix with a value."""
    for suffix in name_suffixes(name):
        if suffix in values:
            return values[suffix]
    return None


def name_suffixes(name: str) -> Iterator[str]:
    """Yield a dotted name in lower case with underscores, then each of its shorter suffixes.

    >>> list(name_suffixes("llama.Hidden-Size"))
    ['llama.hidden_size', 'hidden_size']
    """
    parts = name.lower().replace("-", "_").split(".")
    for first in range(len(parts)):
        yield ".".join(parts[first:])


def keeps_value(name: str) -> bool:
    """Return whether the value of a setting of another trainer means the same in the recipe key that replaces it."""
    keys = _key_by_name()
    setting = next((suffix for suffix in name_suffixes(name) if suffix in keys), name)
    return setting not in other_trainers().other_values.names
