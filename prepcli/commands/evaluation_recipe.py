"""The recipe of an evaluation: the settings that reading data and computing a loss need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.errors import usage_error
from trainer.recipe import Recipe
from trainer.recipe.loading import complete_recipe
from trainer.recipe.raw_recipe import RawRecipe

MAX_DEFAULT_LENGTH = 1024
RECIPE_NAME = Path("prep eval")  # in messages about keys without an option
ALLOWED_TABLES = ("data", "model")


@dataclass(frozen=True, slots=True)
class EvalData:
    """The data of an evaluation.

    Attributes:
        files: Files, folders or globs, each a source of its own; `NAME=PATH` names it. Equal names are one source.
        type: Type of the files; None: by their suffix.
        fields: Columns of the text, as in a recipe.
        seq_length: Tokens per sequence; None: the positions of the model, at most MAX_DEFAULT_LENGTH.
        overrides: `KEY=VALUE` changes of keys of [data] and [model].
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
            why, hint = "the loss is computed on data files", "`--data FILE`, or `--data NAME=FILE`"
            raise usage_error("no data was given", why, hint)
        paths: dict[str, list[str]] = {}
        for text in self.files:
            name, separator, path = text.partition("=")
            if not separator or Path(text).exists():
                name = path = text
            if not name or not path:
                raise usage_error(f"`--data {text}` is invalid", "it has an empty name or path", "`--data NAME=FILE`")
            paths.setdefault(name, []).append(path)
        return paths


def evaluation_recipe(
    data: EvalData, paths: Sequence[str], *, checkpoint: str, dtype: str, max_positions: int
) -> Recipe:
    """Return the recipe of a source of data.

    Args:
        data: The data.
        paths: Paths of the source.
        checkpoint: Name of the checkpoint.
        dtype: Dtype of the computation.
        max_positions: Positions of the model.

    Raises:
        UsageError: A setting is invalid.
    """
    for override in data.overrides:
        table = override.partition(".")[0]
        if table not in ALLOWED_TABLES:
            why = "an evaluation has the keys of [data] and [model] only"
            raise usage_error(f"`--set {override}` is not supported", why, "`--set data.source_length=512`")
    data_table: dict[str, Any] = {
        "path": list(paths),
        "seq_length": data.seq_length or min(max_positions, MAX_DEFAULT_LENGTH),
    }
    data_table |= {key: value for key, value in (("type", data.type), ("fields", data.fields)) if value is not None}
    tables: dict[str, Any] = {
        "model": {"path": checkpoint, "dtype": dtype},
        "data": data_table,
        "batch": {"size": 1},
        "optimizer": {"lr": 1.0},
        "train": {"steps": 1},
    }
    raw = RawRecipe(RECIPE_NAME, tables, overridden_keys=frozenset(f"data.{key}" for key in data_table))
    return complete_recipe(raw, data.overrides).recipe
