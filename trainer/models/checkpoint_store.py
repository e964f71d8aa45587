"""Checkpoints as training sees them: leaves by dotted name, without a word of how they are stored.

A run's state is one flat mapping: `params.embed.tokens`, `opt_state.adam.mu.embed.tokens`, `step` … What stores it is
handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainer.models.mesh import Box


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A leaf as a checkpoint holds it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """A leaf to be saved; `fetch` brings all of it to the host (C order), once, when its turn comes."""

    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[], np.ndarray]


class CheckpointReader(Protocol):
    """An opened checkpoint. `facts`: its manifest."""

    @property
    def manifest(self) -> Mapping[str, Any]: ...

    @property
    def leaves(self) -> Mapping[str, LeafSpec]: ...

    def read(self, name: str, parts: Mapping[Box, np.ndarray]) -> None:
        """Fill each array with its box of the leaf, cast to the array's dtype; no stored byte is read twice."""
        ...


class CheckpointStore(Protocol):
    """The checkpoints of one run, by step."""

    def steps(self) -> list[int]:
        """Steps of which a whole checkpoint is there, ascending."""
        ...

    def open(self, step: int) -> CheckpointReader:
        """The checkpoint of a step; PrepError if it is broken."""
        ...

    def save(self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, Any]) -> None:
        """Store a checkpoint: afterwards it is whole and durable under its name. PrepError if it cannot be."""
        ...
