"""Interfaces of the checkpoints that training reads and writes. Independent of the storage format.

A training state is one flat mapping from dotted name to leaf: `params.embed.tokens`,
`opt_state.adam.mu.embed.tokens`, `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from prepcli.algebra.boxes import Box
from prepcli.planning.manifest_fields import Manifest


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A leaf in a checkpoint.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        read_unit: Shape of the boxes that are read as a whole, on a grid that begins at index 0. ()
            if every element can be read alone.
    """

    shape: tuple[int, ...]
    dtype: str
    read_unit: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostShard:
    """A part of a leaf to be saved.

    Attributes:
        box: Index range of the shard in the leaf, (start, stop) per axis.
        fetch: Returns a copy on the host, in C order. Later training steps do not change it.
            Called once at most.
    """

    box: Box
    fetch: Callable[[], np.ndarray]


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """A leaf to be saved.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        shards: The parts that this process saves. The shards of all processes cover every element
            once.
    """

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[HostShard, ...]

    @classmethod
    def whole(
        cls, shape: tuple[int, ...], dtype: str, *, fetch: Callable[[], np.ndarray]
    ) -> HostLeaf:
        """Return a leaf that this process saves as one shard."""
        return cls(shape, dtype, (HostShard(tuple((0, extent) for extent in shape), fetch),))

    @property
    def num_elements(self) -> int:
        """Number of elements in the shards of this process."""
        total = 0
        for shard in self.shards:
            total += math.prod(stop - start for start, stop in shard.box)
        return total

    def fetch(self) -> np.ndarray:
        """Copy the whole leaf to the host. Its shards must cover it."""
        # One process without splits has one shard. It is returned as it is, without a second copy.
        first, *others = self.shards
        values = first.fetch()
        if not others:
            return values
        leaf = np.empty(self.shape, values.dtype)
        leaf[_box_slices(first.box)] = values
        for shard in others:
            leaf[_box_slices(shard.box)] = shard.fetch()
        return leaf

    def on_host(self) -> HostLeaf:
        """Fetch all shards to host memory. Each fetched array can be read only once, to free its memory early."""
        # `pop` returns the array and drops the reference to it. A function that keeps the reference
        # would hold all arrays in host memory until the whole save is complete.
        shards = tuple(HostShard(shard.box, [shard.fetch()].pop) for shard in self.shards)
        return HostLeaf(self.shape, self.dtype, shards)


def _box_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


class CheckpointReader(Protocol):
    """An open checkpoint."""

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""
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
        """Fill each array with its box of the leaf, cast to the array's dtype. No stored byte is read twice."""
        ...

    def stop_reads(self) -> None:
        """End all reads early, from another thread. They raise an error, and so do later reads."""
        ...


class PendingSave(Protocol):
    """A save of a checkpoint."""

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, also by an error."""
        ...

    def wait(self) -> float:
        """Wait until the checkpoint is complete and durable. Return the seconds that the save took.

        Raises:
            PrepError: The checkpoint cannot be written.
        """
        ...


class CheckpointStore(Protocol):
    """The checkpoints of one run, by step."""

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending."""
        ...

    def open(self, step: int) -> CheckpointReader:
        """Open the checkpoint of a step. Raise PrepError if it is damaged."""
        ...

    def start_save(
        self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Manifest
    ) -> PendingSave:
        """Begin to save a checkpoint. The leaves may change after the call.

        Args:
            step: Step of the state.
            leaves: The state's leaves by dotted name.
            manifest_fields: Additional entries of the manifest.

        Returns:
            The save, which may continue in the background. The next one begins after its end.

        Raises:
            PrepError: The checkpoint cannot be written.
        """
        ...
