"""Small plans that save tensors to chunks, and their source and output files.

Tensors are int32, or float32 if they are cast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.grids import ChunkGrid
from prepcli.engine.casts import value_operations
from prepcli.engine.fills import numpy_dtype
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.chunk_placement import ChunkLayout, LeafPiece, place_chunks
from prepcli.planning.plan import OutputLeaf, Plan, Stream
from prepcli.planning.slabs import Slab, split_stream
from tests.helpers.strategies import random_tensors

ITEM_NBYTES = 4
Chunk = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A plan that saves tensors from a file that contains `shift` bytes and then the tensors, one after another."""

    plan: Plan
    tensors: dict[str, np.ndarray]
    layout: ChunkLayout
    shift: int

    def write_source(self, folder: Path) -> Path:
        """Write the plan's source file."""
        path = folder / "source"
        path.write_bytes(
            b"\1" * self.shift + b"".join(tensor.tobytes() for tensor in self.tensors.values())
        )
        return path

    def data_files(self, folder: Path) -> list[Path]:
        """Return the paths of the plan's output files."""
        return [folder / f"d{i}" for i in range(len(self.layout.file_sizes))]

    def read_leaf(self, paths: Sequence[Path], number: int = 0) -> np.ndarray:
        """Assemble a leaf from its chunks."""
        leaf, data = self.plan.leaves[number], [path.read_bytes() for path in paths]
        shape, chunk_shape = leaf.grid.shape, leaf.grid.chunk_shape
        dtype = numpy_dtype(leaf.dtype)
        out = np.zeros(
            [count * length for count, length in zip(leaf.grid.chunk_counts, chunk_shape)], dtype
        )
        for box in leaf.placed_chunks:
            for index in itertools.product(
                *(range(first, stop) for first, stop in zip(box.first, box.stop))
            ):
                file, offset = box.chunks.find(index)
                values = np.frombuffer(data[file], dtype, math.prod(chunk_shape), offset).reshape(
                    chunk_shape
                )
                out[
                    tuple(
                        slice(i * length, (i + 1) * length) for i, length in zip(index, chunk_shape)
                    )
                ] = values
        return out[tuple(slice(0, count) for count in shape)]


def flat(dtype: str, shape: tuple[int, ...], offset: int = 0, file: int = 0) -> Array:
    """Return the location of a tensor in one run of a file."""
    return whole_array("flat", dtype, shape, (file, offset))


def make_save_plan(
    rows: Sequence[AxisMap], chunks: Sequence[Chunk], shift: int = 0, cast: str = ""
) -> SavePlan:
    """Return a plan that saves the same tensors to one leaf per axis map.

    Args:
        rows: Axis maps of the leaves, over the same tensors.
        chunks: Chunk shape of each leaf.
        shift: Offset of the first tensor in the source file.
        cast: Dtype to cast to; empty for none.
    """
    dtype = "float32" if cast else "int32"
    tensors = {name: values.astype(dtype) for name, values in random_tensors(rows[0]).items()}
    shape = rows[0].source_shape
    starts = [shift + i * math.prod(shape) * ITEM_NBYTES for i in range(len(tensors))]
    grids = [ChunkGrid(row.leaf_shape, chunk) for row, chunk in zip(rows, chunks)]
    pieces = [
        LeafPiece(f"leaf{n}", row, tuple(stacked.items()), grid, cast or dtype, start)
        for (_, stacked), start in zip(rows[0].tensors(), starts)
        for n, (row, grid) in enumerate(zip(rows, grids))
    ]
    layout = place_chunks(pieces)
    count = len(rows)
    regions_per_tensor = [
        tuple(layout.locations[i : i + count]) for i in range(0, len(pieces), count)
    ]
    row_range = (0, shape[0] if shape else 1)
    operations = value_operations(dtype, cast or dtype)
    streams = tuple(
        Stream(name, dtype, shape, row_range, (flat(dtype, shape, start),), regions, operations)
        for name, start, regions in zip(tensors, starts, regions_per_tensor)
    )
    leaves = tuple(
        OutputLeaf((f"leaf{n}",), cast or dtype, grid, tuple(layout.placed_chunks[f"leaf{n}"]))
        for n, grid in enumerate(grids)
    )
    return SavePlan(
        Plan("test", "test", "test", (), streams, (), leaves=leaves), tensors, layout, shift
    )


def split_streams(streams: Sequence[Stream], max_nbytes: int) -> list[Slab]:
    """Return the slabs of all streams, in order."""
    slabs: list[Slab] = []
    for number, stream in enumerate(streams):
        slabs += split_stream(number, stream, max_nbytes=max_nbytes)
    return slabs


def reverse_streams(streams: Sequence[Stream]) -> tuple[Stream, ...]:
    """Return streams in the opposite direction: exports of the saved tensors."""
    return tuple(replace(stream, reads=stream.writes, writes=stream.reads) for stream in streams)


@st.composite
def dividing_chunks(draw, shape: tuple[int, ...]) -> Chunk:
    """Draw a chunk shape that divides a shape."""
    return tuple(
        draw(st.sampled_from([length for length in range(1, extent + 1) if extent % length == 0]))
        for extent in shape
    )
