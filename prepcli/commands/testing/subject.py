"""Tiny models of a family, as prep and as transformers compute them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.commands.operations.results import Conversion
from prepcli.commands.testing.checkpoints import write_checkpoint
from prepcli.commands.testing.tiny_transformers import (
    TinyTransformer,
    has_encoder,
    random_batch,
    random_tensors,
    tiny_transformer,
)
from prepcli.commands.testing.torch_transformers import torch_model
from prepcli.core.json_types import HFConfig
from prepcli.models.param_tree import Tree
from prepcli.models.registry import family_of


class FamilyUnderTest:
    """Tiny models of a family, and values that several checks compute from them.

    Attributes:
        config: Config of the compared model.
        mesh_config: Config of the model to train on a mesh.
        work: Folder for files.
    """

    def __init__(self, configs: Sequence[HFConfig], work: Path) -> None:
        self.config = dict(configs[0])
        # With a single config both models are the same.
        self.mesh_config = dict(configs[-1])
        self.work = work

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of each named axis of the first config, such as `heads`."""
        return family_of(self.config).sizes(self.config)

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """Random tensors by their names in files."""
        return random_tensors(self.config, seed=3)

    @cached_property
    def tiny_model(self) -> TinyTransformer:
        """The tiny model in prep."""
        return tiny_transformer(self.config)

    @cached_property
    def params(self) -> Tree:
        """The tensors as parameters of prep's model."""
        return self.tiny_model.params_from_tensors(self.tensors)

    @cached_property
    def torch_model(self) -> Any:
        """The model of transformers, with the same tensors."""
        return torch_model(self.config, self.tensors)

    def batch(self, rows: int, length: int) -> dict[str, np.ndarray]:
        """Return a batch of random tokens, with source tokens if the model has an encoder."""
        return random_batch(self.sizes["vocab"], rows, length, 4, has_encoder(self.config))

    @cached_property
    def folder(self) -> Path:
        """A checkpoint with the tensors, written without transformers."""
        return write_checkpoint(self.work / "written", self.config, self.tensors)

    @cached_property
    def saved_folder(self) -> Path:
        """The checkpoint that transformers saves in float32."""
        return self.save_with_transformers("float32")

    def save_with_transformers(self, dtype: str) -> Path:
        """Save a checkpoint of several files in a dtype with transformers, and return its folder."""
        import torch

        folder = self.work / dtype
        # `Module.to` changes the model in place, and other checks need the float32 values. 20KB per file splits the
        # tiny model into several files with an index.
        copy.deepcopy(self.torch_model).to(getattr(torch, dtype)).save_pretrained(
            folder, max_shard_size="20KB"
        )
        return folder

    def convert(
        self, conversion: Callable[..., Conversion], source: Path, name: str, **options: Any
    ) -> Path:
        """Run a conversion of the public API into a new folder, and return the folder."""
        out = self.work / name
        # With an equal output of an earlier call, the conversion would return at once and write nothing.
        shutil.rmtree(out, ignore_errors=True)
        return conversion(source, out, **options).path
