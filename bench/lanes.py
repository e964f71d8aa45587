"""Measure a conversion with 1 to 8 lanes, and model it on machines with more cores.

    python -m bench.lanes --work FOLDER [--model gpt-neo-1.3B] [--layers N] [--lanes 1,2,4,8] [--stream-mb-s 500]

With `--stream-mb-s`, each read and write takes the time of a disk that moves a stream at this rate, and any number of
streams at the same time. The wait needs no core, so that more lanes than cores show whether lanes overlap.

The CPU time has two parts: system calls, hashes and copies, which release the interpreter's lock, and Python code,
which holds it. With n cores the pipelines move at most n bytes in the CPU time of a byte, and at most one byte in its
time of Python code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.evidence import make_model
from bench.meter import wrap_function
from prepcli.core.tables import format_table
from prepcli.engine import lanes
from prepcli.execution import folder_converter

GB, MB = 10**9, 10**6
CASES = {
    "pad-vocab": ("pad-vocab", "--multiple", "8"),
    "save-init": ("save-init",),
    "save-init-1x64x4": ("save-init", "--mesh", "1,64,4", "--pad-vocab", "auto"),
}
MEMORY = "2GiB"
MODEL_CORES = 2, 4, 8, 16
# Functions that release the lock nearly all of their time
RELEASING = (
    ("os", "preadv"),
    ("os", "pwritev"),
    ("prepcli.engine.digest", "TensorDigest.update"),
    ("prepcli.engine.checksum_recorder", "block_checksum"),
    ("prepcli.engine.pipeline", "gather"),
    ("prepcli.engine.pipeline", "scatter"),
)


@dataclass(frozen=True, slots=True)
class LaneCost:
    """Cost of the pipelines of one conversion.

    Attributes:
        nbytes: Bytes that the pipelines have read.
        num_lanes: Number of pipelines.
        wall_s: Their time.
        cpu_s: CPU time of the process meanwhile.
        released_s: The part of it in functions that release the interpreter's lock.
    """

    nbytes: int
    num_lanes: int
    wall_s: float
    cpu_s: float
    released_s: float

    @property
    def held_s(self) -> float:
        """CPU time with the interpreter's lock."""
        return self.cpu_s - self.released_s

    def modelled_gb_s(self, cores: int) -> float:
        """Return the rate of the pipelines with a number of cores, if memory and disk are fast enough."""
        seconds = max(self.cpu_s / cores, self.held_s)
        return self.nbytes / GB / seconds


class ReleasedTime:
    """CPU time of the outermost calls of functions, summed over all threads."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._thread = threading.local()

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds the CPU time of each call."""

        def run(*args: Any, **options: Any) -> Any:
            if getattr(self._thread, "is_inside", False):
                return call(*args, **options)
            self._thread.is_inside = True
            start_s = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                spent_s = time.thread_time() - start_s
                self._thread.is_inside = False
                with self._lock:
                    self.seconds += spent_s

        return run


def slowed(call: Callable[..., int], stream_mb_s: int) -> Callable[..., int]:
    """Return a read or write function that takes as long as a disk with this rate."""

    def run(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        count = call(fd, buffers, offset, flags)
        time.sleep(count / stream_mb_s / MB)
        return count

    return run


def convert(words: list[str], max_lanes: int, stream_mb_s: int) -> LaneCost:
    """Run a conversion in this process with a number of lanes."""
    from prepcli.commands.cli.main import main

    released = ReleasedTime()
    for module, name in RELEASING:
        wrap_function(module, name, released.timed)
    if stream_mb_s:
        for name in ("preadv", "pwritev"):
            wrap_function("os", name, partial(slowed, stream_mb_s=stream_mb_s))
    # Lanes are bounded by the cores of the process. One core has another kind of lane.
    cores = set(range(max(max_lanes, 2)))
    os.sched_getaffinity = lambda pid: cores
    lanes.MAX_LANES = max_lanes
    folder_converter.FolderConverter.max_lanes = max_lanes
    run_pipelines = folder_converter.run_pipelines
    costs: list[LaneCost] = []

    def measured(pipelines: Any) -> None:
        released_s = released.seconds
        start_s = time.perf_counter()
        start_cpu_s = time.process_time()
        run_pipelines(pipelines)
        cpu_s = time.process_time() - start_cpu_s
        wall_s = time.perf_counter() - start_s
        nbytes = sum(pipeline.result.read_nbytes for pipeline in pipelines)
        released_s = released.seconds - released_s
        costs.append(LaneCost(nbytes, len(pipelines), wall_s, cpu_s, released_s))

    folder_converter.run_pipelines = measured
    if code := main(words):
        raise SystemExit(code)
    return costs[-1]


def measure(source: Path, out: Path, case: str, max_lanes: int, stream_mb_s: int) -> LaneCost:
    """Run a case in a new process, and delete its output."""
    command, *options = CASES[case]
    words = [command, str(source), *options]
    words += ["--memory", MEMORY, "--out", str(out), "--quiet"]
    call = f"convert({words!r}, {max_lanes}, {stream_mb_s})"
    code = f"import dataclasses, json; from bench.lanes import convert; print(json.dumps(dataclasses.asdict({call})))"
    try:
        process = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
        )
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return LaneCost(**json.loads(process.stdout.splitlines()[-1]))


def main() -> None:
    """Measure all cases, and print a table of the runs and one of the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the model and outputs")
    parser.add_argument("--model", default="gpt-neo-1.3B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lanes", default="1,2,4,8")
    parser.add_argument("--stream-mb-s", type=int, default=0)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    source = make_model(options.work, options.model, options.layers)
    out = options.work / "bench-lanes"
    runs: list[tuple[str, ...]] = []
    models: list[tuple[str, ...]] = []
    for case in CASES:
        for max_lanes in map(int, options.lanes.split(",")):
            cost = measure(source, out, case, max_lanes, options.stream_mb_s)
            rate = cost.nbytes / GB / cost.wall_s
            figures = [cost.wall_s, rate, cost.cpu_s, cost.held_s]
            runs.append((case, str(cost.num_lanes), *(f"{figure:.2f}" for figure in figures)))
            if max_lanes == 2:
                rates = [f"{cost.modelled_gb_s(cores):.1f}" for cores in MODEL_CORES]
                models.append((case, *rates))
    header = "case", "lanes", "s", "GB/s", "CPU s", "with the lock"
    print(format_table(runs, header, right_aligned=header[1:]))
    header = "GB/s of", *(f"{cores} cores" for cores in MODEL_CORES)
    print(format_table(models, header, right_aligned=header[1:]))


if __name__ == "__main__":
    main()
