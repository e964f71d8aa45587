"""Cost of a lock: `prep save-init` with and without `--lock`, cold, in alternating order.

    python -m bench.lock_cost --work FOLDER [--model llama-7b --layers 8] [--pairs 5]

Prints the seconds of each run, the ratios of the fastest and the median runs, and the ratio of the CPU times. The
memory is the highest of any run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.evidence import PREP, compile_packages, log, make_model, remove, run_checked
from bench.meter import CommandCost, drop_page_cache
from bench.published import PUBLISHED
from prepcli.core.tables import format_table

PLAIN = "plain"
LOCKED = "--lock"
MIB = 1 << 20


def measure_pairs(source: Path, work: Path, pairs: int) -> dict[str, list[CommandCost]]:
    """Convert a model with and without its lock in turn, and return the costs of all runs.

    Args:
        source: The model.
        work: Folder for the lock and the outputs. They are deleted.
        pairs: Number of runs of each kind.
    """
    lock = work / "lock.json"
    out = work / "lock-out"
    # An interrupted measurement may have left them.
    lock.unlink(missing_ok=True)
    remove(out)
    run_checked((PREP, "lock", source, "--out", lock, "--quiet"))
    convert = (PREP, "save-init", source, "--out", out, "--quiet")
    commands = {PLAIN: convert, LOCKED: (*convert, "--lock", lock)}
    costs: dict[str, list[CommandCost]] = {name: [] for name in commands}
    for number in range(pairs):
        names = list(commands)
        if number % 2:
            names.reverse()
        for name in names:
            drop_page_cache([source])
            costs[name].append(run_checked(commands[name]))
            remove(out)
        log(", ".join(f"{name} {costs[name][-1].wall_s:.1f} s" for name in commands))
    lock.unlink()
    return costs


def percent(locked: float, plain: float) -> str:
    """Return how much a lock adds, in per cent."""
    return f"{100 * (locked / plain - 1):+.1f} %"


def cost_text(costs: Mapping[str, Sequence[CommandCost]]) -> str:
    """Return a table of the runs, and the cost of the lock in per cent."""
    rows: list[tuple[str, ...]] = []
    seconds: dict[str, tuple[float, float, float]] = {}
    for name, runs in costs.items():
        walls = [cost.wall_s for cost in runs]
        cpu_s = statistics.median(cost.cpu_s for cost in runs)
        seconds[name] = (min(walls), statistics.median(walls), cpu_s)
        peak = max(cost.peak_nbytes for cost in runs) / MIB
        rows.append((name, *(f"{value:.2f}" for value in seconds[name]), f"{peak:.0f}"))
    ratios = [percent(locked, plain) for plain, locked in zip(seconds[PLAIN], seconds[LOCKED])]
    rows.append(("cost", *ratios, ""))
    header = ("run", "fastest s", "median s", "CPU s", "peak MiB")
    return format_table(rows, header, right_aligned=header[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--model", choices=PUBLISHED, default="llama-7b", metavar="NAME")
    parser.add_argument("--layers", type=int, default=8, help="number of layers of the model")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each kind")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    compile_packages()
    source = make_model(options.work, options.model, options.layers)
    print(cost_text(measure_pairs(source, options.work, options.pairs)))


if __name__ == "__main__":
    main()
