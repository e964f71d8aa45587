"""Compare a training step on the CPU with transformers and torch: float32 forward, backward, clipping and AdamW.

    python -m bench.cpu_step
    python -m bench.cpu_step --rows 2 --threads 1
    python -m bench.cpu_step --size 100m --rows 2 --threads 1 --profile
    python -m bench.cpu_step --kernel reference --head-chunk 512

Needs the `parity` extra. Both systems start from the same weights, read the same tokens and run alternately, one step
at a time, each in a process of its own that is limited to the same cores. Their losses must agree. CPU seconds depend
less on other load than wall seconds do, and the best step less than the median. Without options the kernel and the
sizes of tiles and chunks are those of a recipe that sets none. They are printed to stderr.

`of peak` is the rate of the best step in floating-point operations per CPU second, divided by the highest rate of
matrix products in the same run. The operations are those of `prep plan`, without masked scores. The last lines have
the rates of both systems: of a large square product, and of the products of the step with its weights.
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
from typing import Any

from bench.cpu_step_systems import (
    BUILDERS,
    CONFIG,
    SIZES,
    add_step_options,
    make_recipe,
    write_model,
)
from prepcli.models.mesh import parse_mesh
from prepcli.models.rules import DEFAULT_RULES
from trainer.planning.model_shapes import model_of_config
from trainer.planning.step_flops import count_step_flops
from trainer.planning.step_inputs import step_inputs

WARMUP_STEPS = 2  # the first step compiles the program
MAX_LOSS_DIFFERENCE = 1e-5  # relative difference
MAX_FUNCTIONS = 24  # rows of a profile
STEP_OPTIONS = ("rows", "tokens", "kernel", "q_chunk", "k_chunk", "head_chunk")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Loss and cost of one step."""

    loss: float
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """The steps of both systems with their warm-up, and rates of products."""

    steps: Mapping[str, Sequence[StepCost]]
    # Operations per CPU second of each system, by kind of product
    rates: Mapping[str, Mapping[str, float]]
    # Functions of prep's step with their seconds in products and in other instructions
    profile: Sequence[tuple[str, float, float]] = ()


@contextmanager
def run_system(
    system: str, model: Path, threads: int, *, options: argparse.Namespace
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that takes the steps of one system."""
    values = {name: getattr(options, name) for name in STEP_OPTIONS}
    words = [
        f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None
    ]
    vocab_size = model_config(options)["vocab_size"]
    words += [f"--model={model}", f"--threads={threads}", f"--vocab={vocab_size}"]
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


def model_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the config of the model."""
    return {**CONFIG, **SIZES[options.size]}


def step_operations(model: Path, options: argparse.Namespace) -> int:
    """Return the floating-point operations of a step, without masked scores and recomputation."""
    options = argparse.Namespace(**vars(options), model=model)
    mesh = parse_mesh("1,1,1")
    shapes = model_of_config(json.loads((model / "config.json").read_bytes())).shapes(
        mesh, DEFAULT_RULES
    )
    inputs = step_inputs(make_recipe(options), shapes, mesh=mesh, rules=DEFAULT_RULES)
    return count_step_flops(inputs).model_flops_of_visible_pairs


def ask(process: subprocess.Popen[str], request: str) -> Any:
    """Send a request to the process of a system, and return its answer. Raise SystemExit if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # if the process has ended, there is no line to read
        print(request, file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args} has failed")
    return json.loads(line)


def measure(model: Path, threads: int, options: argparse.Namespace) -> Measurement:
    """Run the systems alternately, then their products."""
    prep = run_system("prep", model, threads, options=options)
    torch = run_system("torch", model, threads, options=options)
    with prep as prep_process, torch as torch_process:
        processes = {"prep": prep_process, "torch": torch_process}
        steps: dict[str, list[StepCost]] = {system: [] for system in BUILDERS}
        for _ in range(WARMUP_STEPS + options.repeats):
            for system, process in processes.items():
                steps[system].append(StepCost(**ask(process, "step")))
        rates = {system: ask(process, "rates") for system, process in processes.items()}
        profile = ask(prep_process, "profile") if options.profile else ()
    return Measurement(steps, rates, profile)


def max_loss_difference(steps: Mapping[str, Sequence[StepCost]]) -> float:
    """Return the largest relative difference of the losses. Raise SystemExit if it is too large."""
    pairs = zip(steps["prep"], steps["torch"], strict=True)
    difference = max(abs(prep.loss / torch.loss - 1) for prep, torch in pairs)
    if not difference <= MAX_LOSS_DIFFERENCE:
        raise SystemExit(
            f"losses differ by {difference:.1e} of their value, more than {MAX_LOSS_DIFFERENCE:.0e}"
        )
    return difference


def print_report(threads: int, measurement: Measurement, operations: int) -> None:
    """Print one line per system, the speed of prep relative to torch, the difference of the losses, and the rates.

    Args:
        threads: Number of cores.
        measurement: Steps and rates.
        operations: Floating-point operations of a step.
    """
    steps = measurement.steps
    peak = max(rate for rates in measurement.rates.values() for rate in rates.values())
    difference = max_loss_difference(steps)
    rows: dict[str, list[float]] = {}
    for system, costs in steps.items():
        wall, cpu = (
            [getattr(cost, name) for cost in costs[WARMUP_STEPS:]] for name in ("wall_s", "cpu_s")
        )
        rows[system] = [min(wall), statistics.median(wall), min(cpu), statistics.median(cpu)]
        print(
            f"{threads:>7}  {system:<10}"
            + "".join(f"{seconds:>14.3f}" for seconds in rows[system])
            + f"{operations / min(cpu) / peak:>9.0%}"
        )
    ratios = [torch / prep for prep, torch in zip(rows["prep"], rows["torch"], strict=True)]
    print(f"{threads:>7}  {'speed':<10}" + "".join(f"{ratio:>12.2f}x" for ratio in ratios))
    print(
        f"{'':>9}losses of {len(steps['prep'])} steps differ by at most {difference:.1e} of their value"
    )
    print(f"{'':>9}{operations / 1e9:,.1f} G operations per step")
    for system, rates in measurement.rates.items():
        text = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in rates.items())
        print(f"{'':>9}{system}, G operations per CPU second: {text}")
    print_profile(measurement.profile)
    sys.stdout.flush()


def print_profile(profile: Sequence[tuple[str, float, float]]) -> None:
    """Print the share of each function in the time of all instructions: its products, and its other instructions."""
    total_s = sum(products_s + others_s for _, products_s, others_s in profile)
    for function, products_s, others_s in profile[:MAX_FUNCTIONS]:
        shares = f"{products_s / total_s:>8.1%} products{others_s / total_s:>8.1%} other"
        print(f"{'':>9}{function:<36}{shares}")


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of this command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu_step", description=(__doc__ or "").partition("\n")[0]
    )
    add_step_options(parser)
    parser.add_argument(
        "--size", choices=SIZES, default="10m", help="size of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the share of each function in prep's step"
    )
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
        model = Path(folder)
        count = write_model(model, model_config(options))
        operations = step_operations(model, options)
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(
            f"{count:,} parameters, {options.rows} x {options.tokens} tokens, {os.cpu_count()} cores, load {load}"
        )
        columns = ("best wall s", "median wall s", "best CPU s", "median CPU s")
        print(
            f"{'threads':>7}  {'':<10}"
            + "".join(f"{column:>14}" for column in columns)
            + f"{'of peak':>9}"
        )
        for threads in map(int, options.threads.split(",")):
            print_report(threads, measure(model, threads, options), operations)


if __name__ == "__main__":
    main()
