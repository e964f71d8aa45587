"""Settings of other trainers, and the recipe keys, values or commands that replace them.

The words are data: `other_trainers.toml` in the folder of this module. They serve the hints of unknown keys
and options, the reference page of recipes, and the tables of the migration pages. The file is read
when the first hint is needed, because parsing it takes as long as starting a small command.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from prepcli.core.formatting import parse_decimal
from trainer.recipe.run_tables import EVAL_LOSS, EVAL_METRICS

DATA_FILE = Path(__file__).with_suffix(".toml")
CHECKED = ConfigDict(extra="forbid", frozen=True)
Names = tuple[str, ...]
Value = TypeVar("Value")


class Translation(BaseModel):
    """A conversion of values. The comments of the data file describe the four kinds."""

    model_config = CHECKED

    names: Names
    switch: tuple[Any, Any] | None = None
    table: str | None = None
    keeps_name: bool = False
    function: str | None = None


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
        translations: Conversions of values.
        advice: Settings without a recipe key.
        tables: Tables of the migration pages.
    """

    model_config = CHECKED

    names: Mapping[str, Names]
    value_names: Mapping[str, Names]
    translations: tuple[Translation, ...]
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


@cache
def translation_by_name() -> dict[str, Translation]:
    """Return the conversion of each setting that has one."""
    return _by_name((item.names, item) for item in other_trainers().translations)


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


class ValueAdvice(str):
    """Advice for a value of another trainer without an equivalent in a recipe."""


def translate_value(name: str, value: Any) -> Any:
    """Translate a value of another trainer's setting.

    >>> translate_value("train.bf16", True)
    'bfloat16'

    Args:
        name: The setting.
        value: Its value.

    Returns:
        The value of the recipe key, or a `ValueAdvice` if there is none.
    """
    translations = translation_by_name()
    for suffix in name_suffixes(name):
        if suffix in translations:
            # A value of another type stays, and validation reports it.
            try:
                return _translate(translations[suffix], suffix, value)
            except (AttributeError, TypeError):
                return value
    return value


def _translate(translation: Translation, name: str, value: Any) -> Any:
    """Return the keys of a recipe for an option of another trainer."""
    if translation.switch is not None:
        if_true, if_false = translation.switch
        if value:
            return if_true
        return if_false
    if translation.table is not None:
        return {translation.table: value}
    if translation.function is not None:
        return VALUE_FUNCTIONS[translation.function](value)
    return {name: value}


# Modules of PEFT's `target_modules` -> the projections that they compute.
PROJECTIONS_BY_MODULE: Mapping[str, Names] = {
    "q_proj": ("attn.q",),
    "k_proj": ("attn.k",),
    "v_proj": ("attn.v",),
    "o_proj": ("attn.o",),
    "out_proj": ("attn.o",),
    "qkv_proj": ("attn.q", "attn.k", "attn.v"),
    "c_attn": ("attn.q", "attn.k", "attn.v"),
    "query_key_value": ("attn.q", "attn.k", "attn.v"),
    "gate_proj": ("mlp.gate",),
    "up_proj": ("mlp.up",),
    "down_proj": ("mlp.down",),
    "gate_up_proj": ("mlp.gate", "mlp.up"),
    "fc_in": ("mlp.up",),
    "fc_out": ("mlp.down",),
}


def _lora_targets(modules: Any) -> Any:
    """Return the value of `lora.targets` for names of modules. Unknown names stay, and validation reports them."""
    names = [modules] if isinstance(modules, str) else modules
    targets: dict[str, None] = {}
    for name in names:
        targets |= dict.fromkeys(PROJECTIONS_BY_MODULE.get(name, (name,)))
    return list(targets)


def _mesh_with_mp(degree: Any) -> str:
    return f"-1,1,{degree}"


def _preset(family: str, size: str) -> str:
    """Return e.g. `llama-7b` for the size `7b`, and a path or hub id unchanged."""
    # `7b` and `6.7b` are sizes. A path or a hub id has a slash, and stays.
    if re.fullmatch(r"[\w.]+", size):
        return f"{family}-{size}"
    return size


def _llama_preset(size: str) -> str:
    return _preset("llama", size)


def _opt_preset(size: str) -> str:
    return _preset("opt", size)


def _hyphenated(name: str) -> str:
    return name.replace("_", "-")


def _hub_dataset(name: str) -> str:
    """Return the URL of a dataset on the hub. Paths of files stay as they are."""
    if not re.fullmatch(r"[\w-]+(/[\w-]+)?", name):
        return name
    hub_id = name if "/" in name else f"OWNER/{name}"
    return f"hf://datasets/{hub_id}"


def _best_loss(value: Any) -> str:
    """Return the value of `checkpoint.best` for a switch or a metric."""
    if value in (False, "false", "False"):
        return ValueAdvice("remove it: the best step is not kept by default")
    is_switch = value in (True, "true", "True")
    name = f"eval_{str(value).removeprefix('eval_')}"
    if name in EVAL_METRICS:
        return name
    if is_switch or "loss" in name:
        return EVAL_LOSS
    return ValueAdvice(
        f"`checkpoint.best` takes {', '.join(EVAL_METRICS)}, or `eval_NAME` of a `metric_fn`"
    )


def _repository(value: Any) -> Any:
    """Return the value of `checkpoint.push` for a switch or a name."""
    if value in (False, "false", "False"):
        return ValueAdvice("remove it: nothing is pushed by default")
    if value in (True, "true", "True"):
        return "OWNER/NAME"
    return value


def _device_count(ids: Any) -> int:
    """Return the number of devices in a list, or in a text such as `0,1,2,3`."""
    if isinstance(ids, str):
        ids = [part for part in ids.split(",") if part.strip()]
    return len(ids)


def _profile(steps: Any) -> Any:
    """Return the value of `train.profile` for a switch or a number of steps."""
    # `0 == False` in Python, so the 0 stands for the switch false too.
    if steps in (0, "0", "false", "False"):
        return ValueAdvice("remove it: no steps are recorded by default")
    # `is`, because `1 == True`, and 1 is a number of steps.
    if steps is True or steps in ("true", "True"):
        return {"start": 10, "steps": 3}
    number = parse_decimal(steps) if isinstance(steps, str) else steps
    if isinstance(number, int):
        return {"start": 10, "steps": number}
    return steps


def _smallest_fcm_ratio(ratio: Any) -> list[Any]:
    return [ratio, ratio]


def _largest_fcm_ratio(ratio: Any) -> list[Any]:
    return [0.0, ratio]


def _fraction(percent: Any) -> float:
    return percent / 100


# Conversions that are more than a switch or a table, by their names in the data file.
VALUE_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "best_loss": _best_loss,
    "device_count": _device_count,
    "fraction": _fraction,
    "hub_dataset": _hub_dataset,
    "hyphenated": _hyphenated,
    "largest_fcm_ratio": _largest_fcm_ratio,
    "llama_preset": _llama_preset,
    "lora_targets": _lora_targets,
    "mesh_with_mp": _mesh_with_mp,
    "opt_preset": _opt_preset,
    "profile": _profile,
    "repository": _repository,
    "smallest_fcm_ratio": _smallest_fcm_ratio,
    "text": str,
}
