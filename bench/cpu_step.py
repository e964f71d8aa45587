"""Compare a training step on the CPU with transformers and torch: float32 forward, backward, clipping and AdamW.

    python -m bench.cpu_step
    python -m bench.cpu_step --rows 2 --threads 1
    python -m bench.cpu_step --kernel reference --head-chunk 512

Needs the `parity` extra. Both systems start from the same weights, read the same tokens and run alternately, one step
at a time, each in a process of its own that is limited to the same cores. Their losses must agree. CPU seconds depend
less on other load than wall seconds do, and the best step less than the median. Without options the kernel and the
sizes of tiles and chunks are those of a recipe that sets none. They are printed to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.cpu_step_systems import BUILDERS, CONFIG, add_step_options, write_model

WARMUP_STEPS = 2  # the first step compiles the program
MAX_LOSS_DIFFERENCE = 1e-5  # relative difference
STEP_OPTIONS = ("rows", "tokens", "kernel", "q_chunk", "k_chunk", "head_chunk")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Loss and cost of one step."""

    loss: float
    wall_s: float
    cpu_s: float


@contextmanager
def run_system(
    system: str, model: Path, threads: int, *, options: argparse.Namespace
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that takes the steps of one system."""
    values = {name: getattr(options, name) for name in STEP_OPTIONS}
    words = [
        f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None
    ]
    words += [f"--model={model}", f"--threads={threads}", f"--vocab={CONFIG['vocab_size']}"]
    # With the default policy idle threads of torch spin, which counts as CPU time and slows the other system.
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "JAX_PLATFORMS": "cpu",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.cpu_step_systems", system, *words],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def take_step(process: subprocess.Popen[str]) -> StepCost:
    """Let a process take a step. Raise SystemExit if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # if the process has ended, there is no line to read
        print(file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args} has failed")
    return StepCost(**json.loads(line))


def measure(model: Path, threads: int, options: argparse.Namespace) -> dict[str, list[StepCost]]:
    """Run the systems alternately, and return the steps of each, with the warm-up steps."""
    prep = run_system("prep", model, threads, options=options)
    torch = run_system("torch", model, threads, options=options)
    with prep as prep_process, torch as torch_process:
        processes = {"prep": prep_process, "torch": torch_process}
        steps: dict[str, list[StepCost]] = {system: [] for system in BUILDERS}
        for _ in range(WARMUP_STEPS + options.repeats):
            for system, process in processes.items():
                steps[system].append(take_step(process))
    return steps


def max_loss_difference(steps: Mapping[str, Sequence[StepCost]]) -> float:
    """Return the largest relative difference of the losses. Raise SystemExit if it is too large."""
    pairs = zip(steps["prep"], steps["torch"], strict=True)
    difference = max(abs(prep.loss / torch.loss - 1) for prep, torch in pairs)
    if not difference <= MAX_LOSS_DIFFERENCE:
        raise SystemExit(
            f"losses differ by {difference:.1e} of their value, more than {MAX_LOSS_DIFFERENCE:.0e}"
        )
    return difference


def print_report(threads: int, steps: Mapping[str, Sequence[StepCost]]) -> None:
    """Print one line per system, the speed of prep relative to torch, and the difference of the losses."""
    difference = max_loss_difference(steps)
    rows: dict[str, list[float]] = {}
    for system, costs in steps.items():
        wall, cpu = (
            [getattr(cost, name) for cost in costs[WARMUP_STEPS:]] for name in ("wall_s", "cpu_s")
        )
        rows[system] = [min(wall), statistics.median(wall), min(cpu), statistics.median(cpu)]
        print(
            f"{threads:>7}  {system:<10}" + "".join(f"{seconds:>14.3f}" for seconds in rows[system])
        )
    ratios = [torch / prep for prep, torch in zip(rows["prep"], rows["torch"], strict=True)]
    print(f"{threads:>7}  {'speed':<10}" + "".join(f"{ratio:>12.2f}x" for ratio in ratios))
    print(
        f"{'':>9}losses of {len(steps['prep'])} steps differ by at most {difference:.1e} of their value",
        flush=True,
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of this command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu_step", description=(__doc__ or "").partition("\n")[0]
    )
    add_step_options(parser)
    parser.add_argument(
        "--threads", default="1,2", help="cores, comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=10, help="steps to measure (default: %(default)s)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a report for each number of threads."""
    options = make_parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        count = write_model(Path(folder), CONFIG)
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(
            f"{count:,} parameters, {options.rows} x {options.tokens} tokens, {os.cpu_count()} cores, load {load}"
        )
        columns = ("best wall s", "median wall s", "best CPU s", "median CPU s")
        print(f"{'threads':>7}  {'':<10}" + "".join(f"{column:>14}" for column in columns))
        for threads in map(int, options.threads.split(",")):
            print_report(threads, measure(Path(folder), threads, options))


if __name__ == "__main__":
    main()
