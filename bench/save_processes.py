"""Measure the cost of a saved step in a bucket for process 0 of thousands: exchange, plan and index.

    python -m bench.save_processes --processes 8,200,4096

The state is LLaMA 7B with two moments in float32, on dp x fsdp:64 with one device per process. Of each leaf, one
replica saves the shards. The processes are simulated: their boxes are encoded one after another, and process 0 decodes
all of them. Each number of processes is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence

from prepcli.algebra.boxes import Box, strides
from prepcli.algebra.grids import ChunkGrid, StridedChunks
from prepcli.engine.budget import anonymous_nbytes
from prepcli.execution.training_storage import decode_boxes, encode_boxes
from prepcli.formats.orbax import encode_item_metadata
from prepcli.formats.orbax_chunks import WrittenChunk, unplaced_array
from prepcli.planning.arrays import Array, MappedArray, identity_axis_map, whole_array
from prepcli.planning.object_files import plan_process_files
from prepcli.planning.plan import OutputFile, OutputLeaf, PlacedChunks, Plan, Stream

LAYERS = 32
WIDTH = 4096
HIDDEN = 11008
VOCABULARY = 32000
MATRICES = {
    "embed.tokens": (VOCABULARY, WIDTH),
    **{f"layers.attn.{name}": (LAYERS, WIDTH, WIDTH) for name in "qkvo"},
    "layers.mlp.gate": (LAYERS, WIDTH, HIDDEN),
    "layers.mlp.up": (LAYERS, WIDTH, HIDDEN),
    "layers.mlp.down": (LAYERS, HIDDEN, WIDTH),
    "head": (VOCABULARY, WIDTH),
}
NORMS = {"layers.attn_norm": (LAYERS, WIDTH), "layers.mlp_norm": (LAYERS, WIDTH)}
SLOTS = ("params", "mu", "nu")
MAX_FSDP = 64
MIB = 1 << 20


def main() -> None:
    """Measure each number of processes, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", default="8,200,1024,4096")
    parser.add_argument("--measure", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    for count in options.processes.split(","):
        words = [sys.executable, "-m", "bench.save_processes", "--measure", count]
        answer = subprocess.run(words, check=True, stdout=subprocess.PIPE)
        figures = json.loads(answer.stdout)
        print(f"{count} processes:")
        for name, value in figures.items():
            digits = 2 if name.endswith((", s", ", MiB")) else 0
            print(f"  {name:<42}{value:>12,.{digits}f}")


def measure(num_processes: int) -> dict[str, float]:
    """Return the seconds and sizes of each part, for process 0."""
    shapes: dict[str, tuple[int, ...]] = {}
    for slot in SLOTS:
        for name, shape in (MATRICES | NORMS).items():
            shapes[f"{slot}.{name}"] = shape
    fsdp = min(MAX_FSDP, num_processes)
    boxes = shard_boxes(shapes, num_processes, fsdp)
    plan = make_plan(shapes, fsdp)
    before_nbytes = anonymous_nbytes()
    texts = [encode_boxes([own]) for own in boxes]
    started_s = time.perf_counter()
    collected = [process for text in texts for process in decode_boxes(text)]
    shared = encode_boxes(collected)
    decoded = decode_boxes(shared)
    exchanged_s = time.perf_counter()
    files = plan_process_files(plan, [*shapes], decoded)
    planned_s = time.perf_counter()
    metas: list[Array] = []
    chunks: list[WrittenChunk] = []
    for number, leaf in enumerate(files.plan.leaves):
        metas.append(unplaced_array(leaf.path, leaf.grid.shape, leaf.dtype, leaf.grid.chunk_shape))
        for placed in leaf.placed_chunks:
            for index in placed.indices():
                location = placed.chunks.find(index)
                chunks.append(WrittenChunk(number, index, *location, leaf.chunk_nbytes))
    names = [file.path for file in files.plan.files]
    index_files = encode_item_metadata(metas, chunks, names, 0)
    encoded_s = time.perf_counter()
    return {
        "data files": len(names),
        "chunks": len(chunks),
        "text of one process, bytes (largest)": max(map(len, texts)),
        "text of all processes, MiB": len(shared) / MIB,
        "exchange, s": exchanged_s - started_s,
        "plan, s": planned_s - exchanged_s,
        "index and metadata, s": encoded_s - planned_s,
        "index and metadata, MiB": sum(map(len, index_files.values())) / MIB,
        "memory, MiB": (anonymous_nbytes() - before_nbytes) / MIB,
    }


def shard_boxes(
    shapes: dict[str, tuple[int, ...]], num_processes: int, fsdp: int
) -> list[dict[str, list[Box]]]:
    """Return the boxes of each process, by leaf."""
    boxes: list[dict[str, list[Box]]] = [{} for _ in range(num_processes)]
    replicas = max(1, num_processes // fsdp)
    for number, (name, shape) in enumerate(shapes.items()):
        replica = number % replicas
        if name.split(".", 1)[1] in NORMS:
            boxes[replica * fsdp][name] = [tuple((0, extent) for extent in shape)]
            continue
        rows = shape[-2] // fsdp
        for shard in range(fsdp):
            box = [(0, extent) for extent in shape]
            box[-2] = (shard * rows, (shard + 1) * rows)
            boxes[replica * fsdp + shard][name] = [tuple(box)]
    return boxes


def make_plan(shapes: dict[str, tuple[int, ...]], fsdp: int) -> Plan:
    """Return the plan of a step: one tensor per leaf, in chunks of one layer and one shard."""
    leaves: list[OutputLeaf] = []
    streams: list[Stream] = []
    offset = 0
    for number, (name, shape) in enumerate(shapes.items()):
        chunk = chunk_shape(name, shape, fsdp)
        grid = ChunkGrid(shape, chunk)
        zeros = (0,) * len(shape)
        leaf = OutputLeaf((name,), "float32", grid, ())
        chunks = StridedChunks(0, offset, zeros, strides(grid.chunk_counts, leaf.chunk_nbytes))
        placed = PlacedChunks(zeros, grid.chunk_counts, chunks)
        leaves.append(OutputLeaf((name,), "float32", grid, (placed,)))
        axis_map = identity_axis_map(name, shape)
        read = MappedArray(axis_map, (), whole_array(name, "float32", shape, (number, 0)))
        write = MappedArray(axis_map, (), Array(name, "float32", shape, chunk, chunks))
        streams.append(Stream(name, "float32", shape, (0, shape[0]), (read,), (write,)))
        offset += leaf.nbytes
    return Plan(
        command="train",
        request="",
        source_name="",
        source_files=(),
        streams=tuple(streams),
        files=(OutputFile("d/0", offset),),
        leaves=tuple(leaves),
        item="state",
    )


def chunk_shape(name: str, shape: Sequence[int], fsdp: int) -> tuple[int, ...]:
    """Return the shape of a chunk: one layer of one shard, or the whole leaf of a norm."""
    if name.split(".", 1)[1] in NORMS:
        return tuple(shape)
    return (*(1 for _ in shape[:-2]), shape[-2] // fsdp, shape[-1])


if __name__ == "__main__":
    main()
