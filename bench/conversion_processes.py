"""Measure what a conversion into a bucket costs each of thousands of processes: plan, division, notes and manifest.

    python -m bench.conversion_processes --work FOLDER [--models llama-7b,llama-3.1-405b] [--processes 1,200,4096]

The model has real headers over sparse zeros. The processes are simulated: every unit of work has the note that its
process would write, with digests and checksums of arbitrary values. The process with the last note decodes all of them
and writes index, checksums and manifest, here into memory. Each row is measured in a process of its own. Times are CPU
seconds. `memory` is the peak of its anonymous memory beyond the imports. `busy` processes have at least one unit. The
waiting ones together list the notes `lists/s` times per second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import prepcli as prep
from bench.bucket_kills import MemoryWatch
from bench.models import write_model
from bench.published import published_config
from prepcli.core.tables import format_table
from prepcli.engine.budget import anonymous_nbytes
from prepcli.execution.bucket_executor import FIRST_LOOK_S, LOOK_S_PER_PROCESS, MAX_LOOK_S
from prepcli.execution.bucket_publication import write_last_objects
from prepcli.execution.bucket_run import UnitNote
from prepcli.execution.execute import make_run_identity
from prepcli.planning.chunk_placement import ChunkExtent, chunk_extents, count_blocks
from prepcli.planning.plan import Plan
from prepcli.planning.work_units import WorkUnit, divide_units, find_work_units
from prepcli.stores.byte_ranges import RemoteFile

MIB = 1 << 20
PAGE_OBJECTS = 1000  # objects of one page of a listing
# Digest of the plan, which notes repeat.
RUN_ID = "0" * 32
COLUMNS = (
    "model",
    "processes",
    "units",
    "busy",
    "plan s",
    "divide s",
    "notes s",
    "manifest s",
    "memory",
    "lists/s",
)


def main() -> None:
    """Measure each row, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the sparse models")
    parser.add_argument("--models", default="llama-7b,llama-3.1-405b")
    parser.add_argument("--mesh", default="1,64,4")
    parser.add_argument("--processes", default="1,200,4096")
    parser.add_argument("--measure", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.work, options.mesh, options.measure)))
        return
    rows: list[Sequence[str | int]] = []
    for name in options.models.split(","):
        model = options.work / f"{name}-sparse"
        if not model.exists():
            write_model(model, published_config(name), sparse=True)
        for count in options.processes.split(","):
            words = ["--work", str(model), "--mesh", options.mesh, "--measure", count]
            command = [sys.executable, "-m", "bench.conversion_processes", *words]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            rows.append([name, int(count), *json.loads(answer.stdout)])
    print(format_table(rows, COLUMNS, right_aligned=COLUMNS[4:]))


def measure(model: Path, mesh: str, num_processes: int) -> list[str | int]:
    """Return the cells of a row, from the number of units on."""
    before_nbytes = anonymous_nbytes()
    watch = MemoryWatch([threading.get_native_id()])
    started_s = time.process_time()
    plan = prep.save_init(model, mesh=mesh, out="gs://bucket/out", dry_run=True).plan
    assert plan is not None
    units = find_work_units(plan)
    planned_s = time.process_time()
    shares = divide_units(units, num_processes)
    divided_s = time.process_time()
    notes = [UnitNote.decode(data, RUN_ID) for data in encode_notes(plan, units)]
    noted_s = time.process_time()
    objects = publish(plan, notes)
    published_s = time.process_time()
    peak_nbytes = watch.stop()
    num_pages = -(-len(units) // PAGE_OBJECTS)
    look_s = min(MAX_LOOK_S, FIRST_LOOK_S + LOOK_S_PER_PROCESS * num_processes)
    assert objects["index"]
    return [
        len(units),
        sum(map(bool, shares)),
        f"{planned_s - started_s:.1f}",
        f"{divided_s - planned_s:.3f}",
        f"{noted_s - divided_s:.2f}",
        f"{published_s - noted_s:.1f}",
        f"{(peak_nbytes - before_nbytes) / MIB:.0f}",
        f"{num_processes * num_pages / look_s:.0f}",
    ]


def encode_notes(plan: Plan, units: Sequence[WorkUnit]) -> Iterator[bytes]:
    """Yield the notes of all units, with checksums of 1."""
    extents: dict[int, list[ChunkExtent]] = {}
    for extent in chunk_extents(plan.leaves):
        extents.setdefault(extent.file, []).append(extent)
    for unit in units:
        blocks: list[int] = []
        objects: list[RemoteFile] = []
        for number in unit.files:
            file = plan.files[number]
            objects.append(RemoteFile(file.path, file.size, 'etag:"0123456789abcdef"'))
            for extent in extents.get(number, ()):
                for position in range(extent.chunk_count):
                    first = extent.first_block(position)
                    blocks += range(first, first + extent.blocks.per_chunk.block_count)
        numbers = np.array(blocks, np.uint64)
        digests = dict.fromkeys(unit.streams, "0" * 32)
        yield UnitNote(tuple(objects), digests, numbers, np.ones_like(numbers)).encode(RUN_ID)


def publish(plan: Plan, notes: Sequence[UnitNote]) -> dict[str, int]:
    """Write the last objects of an output into memory. Return the size of each."""
    digests: dict[int, str] = {}
    sums = np.zeros(count_blocks(chunk_extents(plan.leaves)), np.uint64)
    for note in notes:
        digests |= note.digests
        sums[note.blocks.astype(np.int64)] = note.sums
    sizes: dict[str, int] = {}

    def put(path: str, content: bytes) -> None:
        sizes[path] = len(content)

    manifest = write_last_objects(
        plan, make_run_identity(plan, "0" * 32), digests=digests, sums=sums, put=put
    )
    return sizes | {"index": len(manifest)}


if __name__ == "__main__":
    main()
