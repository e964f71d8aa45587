"""The recipe of an evaluation: the settings for reading data and computing a loss."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from prepcli.commands.operations.compute_options import EvaluateOptions
from prepcli.commands.operations.evaluation_keys import EFFECTIVE_KEYS
from prepcli.core.errors import Key, Option, text, usage_error
from prepcli.core.formatting import suggest
from prepcli.core.option_spec import as_tuple
from trainer.recipe import Recipe
from trainer.recipe.loading import complete_recipe
from trainer.recipe.raw_recipe import RawRecipe
from trainer.recipe.toml_values import TomlTable

MAX_DEFAULT_LENGTH = 1024
# An evaluation has no recipe file. Messages about recipe keys without an option show this name.
RECIPE_NAME = Path("prep eval")
SOURCE_NAME = re.compile(r"[\w.-]*")


def data_sources(files: Sequence[str]) -> dict[str, list[str]]:
    """Return the paths of each source of data, by its name.

    Args:
        files: Files, folders or globs, each a source of its own. `NAME=PATH` names it. Equal names are one source.

    Raises:
        UsageError: There is no file, or a source has an empty name or path.
    """
    named_file = Option("data", "NAME=FILE")
    if not files:
        raise usage_error(
            "no data was given",
            "the loss is computed on data files",
            text("{}, or {}", Option("data", "FILE"), named_file),
        )
    paths: dict[str, list[str]] = {}
    for file in files:
        name, path = _split_name_and_path(file)
        if not name or not path:
            raise usage_error(
                text("{} is invalid", Option("data", file)),
                "it has an empty name or path",
                text("{}", named_file),
            )
        paths.setdefault(name, []).append(path)
    return paths


def _split_name_and_path(file: str) -> tuple[str, str]:
    """Return name and path of `NAME=PATH`.

    A path of an existing file or a matching glob may contain a `=`, as partitioned datasets have: `data/lang=en`.
    """
    name, separator, path = file.partition("=")
    if not separator or not SOURCE_NAME.fullmatch(name) or os.path.exists(file) or glob(file):
        return file, file
    return name, path


def evaluation_recipe(
    options: EvaluateOptions,
    paths: Sequence[str],
    *,
    checkpoint: str,
    dtype: str,
    max_positions: int,
) -> Recipe:
    """Return the recipe that computes the loss on one source of data.

    Args:
        options: Type, fields and sequence length of the data, and overrides of the recipe keys in `EFFECTIVE_KEYS`.
        paths: Paths of the source.
        checkpoint: Name of the checkpoint.
        dtype: Dtype of the computation.
        max_positions: Maximum sequence length of the model. 0 means no limit.

    Raises:
        UsageError: A setting is invalid.
    """
    overrides = as_tuple(options.get("overrides", ()))
    for override in overrides:
        _check_override(override)
    default_length = min(max_positions or MAX_DEFAULT_LENGTH, MAX_DEFAULT_LENGTH)
    data_table: TomlTable = {
        "path": list(paths),
        "seq_length": options.get("seq_length") or default_length,
    }
    for key in ("type", "fields"):
        value = options.get(key)
        if value is not None:
            data_table[key] = value
    # A recipe needs a batch, an optimizer and steps. An evaluation uses none of them.
    tables: TomlTable = {
        "model": {"path": checkpoint, "dtype": dtype},
        "data": data_table,
        "batch": {"size": 1},
        "optimizer": {"lr": 1.0},
        "train": {"steps": 1},
    }
    # No file has the values: hints of errors name options instead of lines of a file.
    raw = RawRecipe(RECIPE_NAME, tables, is_of_options=True)
    return complete_recipe(raw, overrides).recipe


def _check_override(override: str) -> None:
    """Raise UsageError if the key of a `KEY=VALUE` has no effect on an evaluation."""
    key = override.partition("=")[0].strip()
    if ".".join(key.split(".")[:2]) in EFFECTIVE_KEYS:
        return
    hint = text("{}", Option("overrides", "data.source_length=512"))
    similar_key = suggest(key, sorted(EFFECTIVE_KEYS))
    if similar_key:
        hint = text("did you mean {}?", Key(similar_key))
    raise usage_error(
        text("{} is not supported", Option("overrides", override)),
        f"an evaluation does not use `{key}`",
        hint,
    )
