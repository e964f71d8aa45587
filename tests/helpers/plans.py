"""Small plans that save rows into chunks, and the files that they read and write.

Tensors are int32, or float32 where they are cast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from prepcli.engine.fills import numpy_dtype
from prepcli.planning.chunk_placement import ChunkLayout, LeafPiece, place_chunks
from prepcli.planning.grids import ChunkGrid
from prepcli.planning.plan import Contiguous, OutputLeaf, Plan, Stream
from prepcli.planning.tensors import itemsize
from tests.helpers.strategies import random_tensors
from trainer.models.axis_map import AxisMap

ITEM_NBYTES = 4
Chunk = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A plan that saves tensors which lie one after another in a file after `shift` bytes."""

    plan: Plan
    tensors: dict[str, np.ndarray]
    layout: ChunkLayout
    shift: int

    def write_source(self, folder: Path) -> Path:
        """Write the file that the plan reads."""
        path = folder / "source"
        path.write_bytes(b"\1" * self.shift + b"".join(t.tobytes() for t in self.tensors.values()))
        return path

    def data_files(self, folder: Path) -> list[Path]:
        """The files that the plan writes."""
        return [folder / f"d{i}" for i in range(len(self.layout.file_sizes))]

    def read_leaf(self, paths: Sequence[Path], number: int = 0) -> np.ndarray:
        """Put the chunks of a leaf together again, each found where the plan says it is."""
        leaf, data = self.plan.leaves[number], [p.read_bytes() for p in paths]
        shape, chunk = leaf.grid.shape, leaf.grid.chunk_shape
        dtype = numpy_dtype(leaf.dtype)
        out = np.zeros([n * c for n, c in zip(leaf.grid.chunk_counts, chunk)], dtype)
        for box in leaf.placed_chunks:
            for index in itertools.product(*(range(a, b) for a, b in zip(box.first, box.stop))):
                file, offset = box.placement.find(index)
                cell = np.frombuffer(data[file], dtype, math.prod(chunk), offset).reshape(chunk)
                out[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk))] = cell
        return out[tuple(slice(0, n) for n in shape)]


def make_save_plan(rows: Sequence[AxisMap], chunks: Sequence[Chunk], shift: int = 0, cast: str = "") -> SavePlan:
    """A leaf for each of the rows, which are over the same tensors."""
    dtype = "float32" if cast else "int32"
    tensors = {name: values.astype(dtype) for name, values in random_tensors(rows[0]).items()}
    item = itemsize(cast or dtype)
    shape = rows[0].source_shape
    starts = [shift + i * math.prod(shape) * ITEM_NBYTES for i in range(len(tensors))]
    grids = [ChunkGrid(row.leaf_shape, chunk) for row, chunk in zip(rows, chunks)]
    wants = [
        LeafPiece(f"leaf{n}", row, tuple(at.items()), grid, item, start)
        for (_, at), start in zip(rows[0].tensors(), starts)
        for n, (row, grid) in enumerate(zip(rows, grids))
    ]
    layout = place_chunks(wants)
    count = len(rows)
    sides = [tuple(layout.regions[i : i + count]) for i in range(0, len(wants), count)]
    span = (0, shape[0] if shape else 1)
    streams = tuple(
        Stream(name, dtype, shape, span, (Contiguous(0, start),), regions, cast_to=cast)
        for name, start, regions in zip(tensors, starts, sides)
    )
    leaves = tuple(
        OutputLeaf((f"leaf{n}",), cast or dtype, g, tuple(layout.placed_chunks[f"leaf{n}"]))
        for n, g in enumerate(grids)
    )
    return SavePlan(Plan("test", "test", "test", (), streams, (), leaves=leaves), tensors, layout, shift)


def reverse_streams(streams: Sequence[Stream]) -> tuple[Stream, ...]:
    """The streams that bring everything back."""
    return tuple(replace(s, reads=s.writes, writes=s.reads) for s in streams)


@st.composite
def dividing_chunks(draw, shape: tuple[int, ...]) -> Chunk:
    """A chunk that divides a leaf."""
    return tuple(draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in shape)
