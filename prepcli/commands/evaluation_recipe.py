"""The recipe of an evaluation: the settings for reading data and computing a loss."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from prepcli.commands.evaluation_keys import EFFECTIVE_KEYS
from prepcli.errors import usage_error
from trainer.models.suggest import did_you_mean
from trainer.recipe import Recipe
from trainer.recipe.loading import complete_recipe
from trainer.recipe.raw_recipe import RawRecipe

MAX_DEFAULT_LENGTH = 1024
RECIPE_NAME = Path("prep eval")  # in messages about keys without an option
SOURCE_NAME = re.compile(r"[\w.-]*")


@dataclass(frozen=True, slots=True)
class EvalData:
    """The data of an evaluation.

    Attributes:
        files: Files, folders or globs, each a source of its own; `NAME=PATH` names it. Equal names are one source.
        type: Type of the files; None: by their suffix.
        fields: Columns of the text, as in a recipe.
        seq_length: Tokens per sequence; None: the positions of the model, at most MAX_DEFAULT_LENGTH.
        overrides: `KEY=VALUE` changes of EFFECTIVE_KEYS.
    """

    files: tuple[str, ...]
    type: str | None = None
    fields: str | None = None
    seq_length: int | None = None
    overrides: tuple[str, ...] = ()

    def sources(self) -> dict[str, list[str]]:
        """Return the paths of each source.

        Raises:
            UsageError: There is no file, or a source has an empty name or path.
        """
        if not self.files:
            why = "the loss is computed on data files"
            hint = "`--data FILE`, or `--data NAME=FILE`"
            raise usage_error("no data was given", why, hint)
        paths: dict[str, list[str]] = {}
        for text in self.files:
            name, path = _split_name(text)
            if not name or not path:
                raise usage_error(
                    f"`--data {text}` is invalid",
                    "it has an empty name or path",
                    "`--data NAME=FILE`",
                )
            paths.setdefault(name, []).append(path)
        return paths


def _split_name(text: str) -> tuple[str, str]:
    """Return name and path of `NAME=PATH`; a path of an existing file or a matching glob may contain a `=`."""
    name, separator, path = text.partition("=")
    if not separator or not SOURCE_NAME.fullmatch(name) or os.path.exists(text) or glob(text):
        return text, text
    return name, path


def evaluation_recipe(
    data: EvalData, paths: Sequence[str], *, checkpoint: str, dtype: str, max_positions: int
) -> Recipe:
    """Return the recipe of a source of data.

    Args:
        data: The data.
        paths: Paths of the source.
        checkpoint: Name of the checkpoint.
        dtype: Dtype of the computation.
        max_positions: Positions of the model; 0 for no limit.

    Raises:
        UsageError: A setting is invalid.
    """
    for override in data.overrides:
        _check_override(override)
    data_table: dict[str, Any] = {
        "path": list(paths),
        "seq_length": data.seq_length
        or min(max_positions or MAX_DEFAULT_LENGTH, MAX_DEFAULT_LENGTH),
    }
    data_table |= {
        key: value
        for key, value in (("type", data.type), ("fields", data.fields))
        if value is not None
    }
    tables: dict[str, Any] = {
        "model": {"path": checkpoint, "dtype": dtype},
        "data": data_table,
        "batch": {"size": 1},
        "optimizer": {"lr": 1.0},
        "train": {"steps": 1},
    }
    raw = RawRecipe(
        RECIPE_NAME, tables, overridden_keys=frozenset(f"data.{key}" for key in data_table)
    )
    return complete_recipe(raw, data.overrides).recipe


def _check_override(override: str) -> None:
    """Raise UsageError if the key of a `KEY=VALUE` has no effect on an evaluation."""
    key = override.partition("=")[0].strip()
    if ".".join(key.split(".")[:2]) in EFFECTIVE_KEYS:
        return
    why = f"an evaluation does not use `{key}`"
    hint = did_you_mean(key, sorted(EFFECTIVE_KEYS)) or "`--set data.source_length=512`"
    raise usage_error(f"`--set {override}` is not supported", why, hint)
