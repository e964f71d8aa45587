"""Checkpoints that training reads and writes: their interfaces, and the shards of leaves in host memory.

A training state is one flat mapping from dotted name to leaf: `params.embed.tokens`,
`opt_state.adam.mu.embed.tokens`, `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from prepcli.algebra.boxes import Box, slices
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.checksum_recorder import ChecksumRecorder
from prepcli.engine.files import PAGE, Files
from prepcli.engine.fills import numpy_dtype
from prepcli.planning.chunk_placement import shard_copies
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import OutputLeaf
from prepcli.stores.buffers import ByteArray, allocate_buffer

# A sync between shards bounds the dirty pages in the page cache, which count as memory of the job.
MAX_UNSYNCED_NBYTES = 256 << 20


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


class HostLeafReader:
    """A reader of leaves in host memory.

    A copy's file number is the number of a leaf, its file offset counts bytes of the leaf in C order. A leaf is fetched
    when its first byte is read, and released after its last byte. Every byte must be read exactly once.
    """

    def __init__(self, leaves: Sequence[HostLeaf]) -> None:
        self._leaves = leaves
        self._fetched: dict[int, ByteArray] = {}
        self._read_nbytes = [0] * len(leaves)

    def read_run(self, copy: StridedCopy, into: ByteArray) -> ByteArray:
        """Read one run. See `RunReader.read_run`."""
        page_offset = copy.file_offset % PAGE
        return self.read_runs((copy,), into[page_offset:])

    def read_runs(self, copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
        """Read the runs of all copies. See `RunReader.read_runs`."""
        filled = 0
        for copy in copies:
            data = self._leaf_bytes(copy.file)
            # NumPy copies all runs in one assignment of a view. E.g. the view of 3 runs of 8 bytes, 100 bytes
            # apart, has the shape (3, 8) and the strides (100, 1).
            counts, steps = zip(*copy.repeats, (copy.run_nbytes, 1))
            runs = np.lib.stride_tricks.as_strided(
                data[copy.file_offset :], counts, steps, writeable=False
            )
            into[filled : filled + copy.nbytes].reshape(counts)[...] = runs
            filled += copy.nbytes
            self._read_nbytes[copy.file] += copy.nbytes
            if self._read_nbytes[copy.file] == data.size:
                del self._fetched[copy.file]
        return into[:filled]

    def _leaf_bytes(self, number: int) -> ByteArray:
        """Return the bytes of a leaf. Fetch it if necessary."""
        if number not in self._fetched:
            leaf = self._leaves[number]
            array = np.ascontiguousarray(leaf.fetch())
            # `ascontiguousarray` makes a 0-d array 1-d
            expected = (leaf.shape or (1,), numpy_dtype(leaf.dtype))
            if array.size and (array.shape, array.dtype) != expected:
                raise ValueError(
                    f"a leaf of {leaf.shape} {leaf.dtype} was fetched as {array.shape} {array.dtype}"
                )
            self._fetched[number] = array.reshape(-1).view(np.uint8)
        return self._fetched[number]


def write_shards(
    leaves: Iterable[tuple[OutputLeaf, HostLeaf]],
    sink: Files,
    *,
    checksums: ChecksumRecorder | None,
) -> None:
    """Write the shards of leaves to an output, and make them durable.

    Beyond the existing shards, host memory holds one more shard and a copy of one chunk.

    Args:
        leaves: Leaves of the output, each with the shards to write.
        sink: Files of the output.
        checksums: Records the checksums of written blocks.

    Raises:
        PrepError: A file cannot be written.
    """
    unsynced_nbytes = 0
    for output_leaf, leaf in leaves:
        for shard in leaf.shards:
            for copy, data in _chunk_data(output_leaf, shard):
                if checksums:
                    checksums.record((copy,), data)
                sink.write((copy,), data)
                unsynced_nbytes += data.size
                if unsynced_nbytes >= MAX_UNSYNCED_NBYTES:
                    sink.sync()
                    unsynced_nbytes = 0
    sink.sync()


def _chunk_data(leaf: OutputLeaf, shard: HostShard) -> Iterator[tuple[StridedCopy, ByteArray]]:
    """Yield the copy to each chunk and its bytes, with the page offset of the file as direct I/O needs it."""
    values = shard.fetch()
    shape = tuple(stop - start for start, stop in shard.box)
    if (values.shape, values.dtype) != (shape, numpy_dtype(leaf.dtype)):
        raise ValueError(
            f"a shard of {leaf.name} was fetched as {values.shape} {values.dtype}, not {shape}"
        )
    # A shard may cover parts of chunks, e.g. where shards are smaller than the least chunk. The copies
    # of two shards of one chunk then write disjoint bytes of it.
    buffer = allocate_buffer(min(values.nbytes, leaf.chunk_nbytes) + 2 * PAGE)
    for part, copy in shard_copies(leaf, shard.box):
        page_offset = copy.file_offset % PAGE
        data = buffer[page_offset : page_offset + copy.nbytes]
        piece = values[slices(part, shard.box)]
        data.view(values.dtype).reshape(piece.shape)[...] = piece
        yield copy, data
