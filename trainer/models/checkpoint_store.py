"""Interfaces of the checkpoints that training reads and writes. Independent of the storage format.

A training state is one flat mapping from dotted name to leaf: `params.embed.tokens`,
`opt_state.adam.mu.embed.tokens`, `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainer.models.partition import Box


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A leaf in a checkpoint.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        read_unit: Shape of the boxes that are read as a whole, on a grid that begins at index 0; () if every element
            can be read alone.
    """

    shape: tuple[int, ...]
    dtype: str
    read_unit: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """A leaf to be saved.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        fetch: Copies the whole leaf to the host, in C order. Called once, right before the leaf is written.
    """

    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[], np.ndarray]


class CheckpointReader(Protocol):
    """An open checkpoint."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Entries of its manifest."""
        ...

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        """Its leaves by dotted name."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether its bytes come over the network, so that no page cache shares the reads of several processes."""
        ...

    def read(self, name: str, parts: Mapping[Box, np.ndarray]) -> None:
        """Fill each array with its box of the leaf, cast to the array's dtype; no stored byte is read twice."""
        ...


class CheckpointStore(Protocol):
    """The checkpoints of one run, by step."""

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending."""
        ...

    def open(self, step: int) -> CheckpointReader:
        """Open the checkpoint of a step; raise PrepError if it is damaged."""
        ...

    def save(self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, Any]) -> None:
        """Save a checkpoint; on return it is complete and durable.

        Args:
            step: Step of the state.
            leaves: The state's leaves by dotted name.
            manifest_fields: Extra entries for the manifest.

        Raises:
            PrepError: The checkpoint cannot be written.
        """
        ...
