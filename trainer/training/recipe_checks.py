"""The checks of a recipe that need neither weights, devices nor the content of its data.

Every command that reads a recipe calls both functions: `check_inputs` before a model is located, `check_model` after.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from prepcli.core.errors import Key, text, usage_error
from prepcli.models.architecture import ArchConfig
from prepcli.models.parameters import Family
from prepcli.models.remat import saved_activations
from trainer.data.files import DataFile, EmptyFileError, check_not_empty, check_readable
from trainer.data.find_files import NO_REMOTE_FILES, find_data_files, has_local_files, resolve_type
from trainer.data.remote_files import RemoteFiles, Selection
from trainer.data.tokenizer import check_tokenizer_exists
from trainer.recipe import Recipe
from trainer.recipe.conflicts import check_packing, check_source_length
from trainer.recipe.data_table import Data, split_sources
from trainer.recipe.text_fields import DataType
from trainer.training.source_datasets import eval_selection, train_selection


class CheckedModel(Protocol):
    """The properties of a model that a recipe is checked against."""

    @property
    def family(self) -> Family:
        """The model family."""
        ...

    @property
    def arch_config(self) -> ArchConfig:
        """The choices of its layers."""
        ...


def check_inputs(
    recipe: Recipe, remote: RemoteFiles = NO_REMOTE_FILES, *, may_be_absent: bool = False
) -> None:
    """Check the inputs of a recipe that need neither the model nor the content of the data.

    Args:
        recipe: The recipe.
        remote: Finds the data files of URLs.
        may_be_absent: Check only inputs that are on this machine. A plan needs none of them.

    Raises:
        PrepError: A data file or the tokenizer is missing, unreadable or empty, the type of a file is unknown, or
            the data has no such split, configuration or revision.
    """
    for _, data in split_sources(recipe.data):
        for paths, selection in (
            (data.path, train_selection(data)),
            (data.eval_paths, eval_selection(data)),
        ):
            # `eval_paths` is None if the evaluation takes held-out sequences, or if there is none.
            if paths is not None and (not may_be_absent or has_local_files(paths)):
                _check_files(paths, data.type, selection, remote)
    tokenizer = recipe.data.tokenizer
    if tokenizer and not (may_be_absent and not os.path.exists(tokenizer)):
        check_tokenizer_exists(Path(tokenizer))


def _check_files(
    paths: Sequence[str], data_type: DataType, selection: Selection, remote: RemoteFiles
) -> None:
    """Raise PrepError if the type of files is not clear, a local one cannot be read, or all are empty."""
    files = find_data_files(paths, data_type, selection, remote=remote)
    if files:
        resolve_type(files, data_type)
    empty: list[EmptyFileError] = []
    for file in files:
        try:
            _check_file(file)
        except EmptyFileError as error:
            empty.append(error)
    if empty and len(empty) == len(files):
        raise empty[0]


def _check_file(file: Path | DataFile) -> None:
    if isinstance(file, Path):
        check_readable(file)
    else:
        check_not_empty(file)


def check_model(recipe: Recipe, model: CheckedModel) -> None:
    """Check a recipe against the architecture of its model.

    Raises:
        UsageError: `data.seq_length` exceeds the positions, `data.packing` does not fit an encoder,
            sources of an encoder have no maximum length, or `remat_policy` names the hidden units of experts.
    """
    has_encoder = model.arch_config.encoder is not None
    for _, data in split_sources(recipe.data):
        check_packing(data, has_encoder=has_encoder)
        check_source_length(data, has_encoder=has_encoder)
    _check_seq_length(recipe.data, model.arch_config)
    saved = saved_activations(recipe.model.remat_policy, has_experts=True)
    if model.arch_config.experts_per_token and "mlp_hidden" in saved:
        why = f"the experts of {model.family.name} compute their hidden units again"
        raise usage_error("`model.remat_policy` has mlp_hidden", why, "remove it from the list")


def _check_seq_length(data: Data, arch_config: ArchConfig) -> None:
    """Raise UsageError if sequences are longer than a model with limited positions computes."""
    max_positions = arch_config.max_positions
    if arch_config.has_limited_positions and data.seq_length > max_positions:
        why = f"the model has {max_positions} positions"
        raise usage_error(
            f"`data.seq_length` is {data.seq_length}",
            why,
            text("{}", Key("data.seq_length", max_positions, is_override=True)),
        )
