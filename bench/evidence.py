"""Compare conversions with `cp -r && sync` and plain copies of the same bytes, with cold caches, in alternating order.

python -m bench.evidence --model gpt-neo-1.3B --work FOLDER [--cases save-init,export] [--pairs 5] [--json FILE]
python -m bench.evidence --work FOLDER --slow-disk 250
python -m bench.evidence --work FOLDER --plan --start
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import prepcli
import trainer
from bench.evidence_rows import EvidenceRow, evidence_text
from bench.floor import COPY_METHODS, CopyMethod
from bench.meter import CommandCost, drop_page_cache, measure
from bench.models import FREE_BITS, SHARD_NBYTES, tensor_entries, write_model
from bench.published import PUBLISHED, published_config
from bench.slow_disk import measure_rates, slow_disk
from prepcli.core.formatting import format_bytes
from prepcli.models.parameters import HFConfig

PREP = Path(sys.executable).with_name("prep")
BUDGETS = ("512MiB", "128MiB")
# This command writes the input of reshard and export.
INIT_COMMAND = (
    "save-init",
    "--mesh",
    "1,1,8",
    "--pad-vocab",
    "auto",
)
PLANNED_MODEL = "llama-13b"
START_RUNS = 5
# One round measures all methods of plain copies. The fastest ones are measured in each pair.
FINALISTS = 2
SPARE_NBYTES = 2 << 30  # additional size of a slow disk: file system, tokenizers and free space


@dataclass(frozen=True, slots=True)
class Case:
    """A conversion: command and options. Its input is the model, or the checkpoint that INIT_COMMAND writes."""

    command: tuple[str, ...]
    from_init: bool = False


CASES: Mapping[str, Case] = {
    "save-init": Case(("save-init",)),
    "save-init-1x8x1": Case(("save-init", "--mesh", "1,8,1")),
    "save-init-1x64x4": Case(("save-init", "--mesh", "1,64,4", "--pad-vocab", "auto")),
    "pad-vocab": Case(("pad-vocab", "--multiple", "8")),
    "reshard": Case(("reshard", "--mesh", "1,4,2"), from_init=True),
    "export": Case(("export",), from_init=True),
}


@dataclass(frozen=True, slots=True)
class BenchPaths:
    """Paths of a measurement. Everything but the model is deleted afterwards."""

    model: Path
    work: Path

    @property
    def init(self) -> Path:
        """Return the path of the init checkpoint."""
        return self.work / "bench-init"

    @property
    def out(self) -> Path:
        """Return the path of the output."""
        return self.work / "bench-out"

    @property
    def unfinished(self) -> tuple[Path, ...]:
        """Return the staging folders of interrupted runs."""
        return tuple(path.with_name(f"{path.name}.partial") for path in (self.init, self.out))


@dataclass(frozen=True, slots=True)
class _Runs:
    """A command that each round runs once, and the costs of its runs."""

    label: str
    words: Sequence[str | Path]
    costs: list[CommandCost] = field(default_factory=list[CommandCost])


def measure_case(
    name: str, memory: str, paths: BenchPaths, pairs: int, copy_methods: Sequence[CopyMethod] = ()
) -> EvidenceRow:
    """Measure one case. See `measure_rounds`."""
    return measure_rounds([(name, memory)], paths, pairs, copy_methods)[0]


def measure_rounds(
    workloads: Sequence[tuple[str, str]],
    paths: BenchPaths,
    pairs: int,
    copy_methods: Sequence[CopyMethod] = (),
) -> list[EvidenceRow]:
    """Measure cases of one source, cp and plain copies in rounds of alternating order: A B C, C B A, A B C ...

    All cases are compared with the same runs of cp and of the plain copies.

    Args:
        workloads: Pairs of a key of CASES and a memory budget of prep, such as `512MiB`.
        paths: Paths of the measurement.
        pairs: Number of rounds.
        copy_methods: Methods of the plain copies.
    """
    source = paths.init if CASES[workloads[0][0]].from_init else paths.model
    inspect_cost = run_checked((PREP, "inspect", source, "--quiet"))
    case_runs = [
        _Runs(f"{name} {memory}", _prep_words(name, memory, source, paths.out))
        for name, memory in workloads
    ]
    cp_runs = _Runs("cp", _cp_words(source, paths.out))
    method_runs = {
        method: _Runs(str(method), method.command(source, paths.out)) for method in copy_methods
    }
    every_run = [*case_runs, cp_runs, *method_runs.values()]
    for number in range(pairs):
        for runs in every_run if number % 2 == 0 else reversed(every_run):
            runs.costs.append(_cold_run(runs.words, source, paths.out))
        log(
            f"round {number + 1}: "
            + ", ".join(f"{runs.label} {runs.costs[-1].wall_s:.1f} s" for runs in every_run)
        )
    rows = [
        _make_row(name, memory, source, runs.costs, cp_runs.costs, inspect_cost)
        for (name, memory), runs in zip(workloads, case_runs)
    ]
    costs_by_method = {method: runs.costs for method, runs in method_runs.items()}
    return [_with_floor(row, costs_by_method) for row in rows] if copy_methods else rows


def _prep_words(name: str, memory: str, source: Path, out: Path) -> tuple[str | Path, ...]:
    command, *options = CASES[name].command
    return (PREP, command, source, *options, "--out", out, "--memory", memory, "--quiet")


def _cp_words(source: Path, out: Path) -> tuple[str, ...]:
    return (
        "bash",
        "-c",
        f"cp -r --reflink=never {shlex.quote(str(source))} {shlex.quote(str(out))} && sync",
    )


def compile_packages() -> None:
    """Byte-compile prep, as its installation does. Otherwise each run may compile it again."""
    for package in (prepcli, trainer):
        compileall.compile_dir(Path(package.__path__[0]), quiet=2)


def fastest_copy_methods(source: Path, out: Path) -> tuple[CopyMethod, ...]:
    """Return the fastest plain copy methods for a source, from one cold run each."""
    seconds = {
        method: _cold_run(method.command(source, out), source, out).wall_s
        for method in COPY_METHODS
    }
    log(
        "plain copies: " + ", ".join(f"{method} {value:.1f} s" for method, value in seconds.items())
    )
    return tuple(sorted(seconds, key=lambda method: seconds[method])[:FINALISTS])


def _with_floor(
    row: EvidenceRow, costs_by_method: Mapping[CopyMethod, Sequence[CommandCost]]
) -> EvidenceRow:
    fastest = min(
        costs_by_method, key=lambda method: min(cost.wall_s for cost in costs_by_method[method])
    )
    all_seconds = tuple(cost.wall_s for costs in costs_by_method.values() for cost in costs)
    return replace(row, floor_seconds=all_seconds, floor_means=str(fastest))


def _cold_run(words: Sequence[str | Path], source: Path, out: Path) -> CommandCost:
    os.sync()
    drop_page_cache([source])
    cost = run_checked(words)
    remove(out)
    return cost


def _make_row(
    name: str,
    memory: str,
    source: Path,
    prep_costs: Sequence[CommandCost],
    cp_costs: Sequence[CommandCost],
    inspect_cost: CommandCost,
) -> EvidenceRow:
    return EvidenceRow(
        case=name,
        memory=memory,
        source_nbytes=sum(path.stat().st_size for path in source.rglob("*") if path.is_file()),
        seconds=tuple(cost.wall_s for cost in prep_costs),
        cp_seconds=tuple(cost.wall_s for cost in cp_costs),
        cpu_s=statistics.median(cost.cpu_s for cost in prep_costs),
        cp_cpu_s=statistics.median(cost.cpu_s for cost in cp_costs),
        peak_nbytes=max(cost.peak_nbytes for cost in prep_costs) - inspect_cost.peak_nbytes,
        inspect_nbytes=inspect_cost.peak_nbytes,
    )


def measure_cases(
    paths: BenchPaths, cases: Sequence[str], pairs: int, budgets: Sequence[str] = BUDGETS
) -> list[EvidenceRow]:
    """Measure cases with each budget, and delete everything but the model."""
    try:
        remove(paths.init, paths.out, *paths.unfinished)
        if any(CASES[name].from_init for name in cases):
            run_checked(
                (
                    PREP,
                    INIT_COMMAND[0],
                    paths.model,
                    *INIT_COMMAND[1:],
                    "--out",
                    paths.init,
                    "--quiet",
                )
            )
        rows: list[EvidenceRow] = []
        for from_init in sorted({CASES[name].from_init for name in cases}):
            methods = fastest_copy_methods(paths.init if from_init else paths.model, paths.out)
            names = [name for name in cases if CASES[name].from_init is from_init]
            workloads = [(name, memory) for name in names for memory in budgets]
            rows += measure_rounds(workloads, paths, pairs, methods)
        return rows
    finally:
        remove(paths.init, paths.out, *paths.unfinished)


def plan_figures(work: Path) -> dict[str, float]:
    """Plan a LLaMA-13B for mesh 1,64,4 from headers alone, and return chunks, seconds and peak memory."""
    source = make_sparse_model(work)
    inspect_cost = run_checked((PREP, "inspect", source, "--quiet"))
    options = ("--mesh", "1,64,4", "--out", work / "bench-out", "--dry-run", "--json", "--quiet")
    cost = run_checked((PREP, "save-init", source, *options))
    return {
        "chunks": json.loads(cost.stdout)["chunks"],
        "seconds": cost.wall_s,
        "peak_nbytes": cost.peak_nbytes,
        "above_inspect_nbytes": cost.peak_nbytes - inspect_cost.peak_nbytes,
    }


def start_figures(work: Path) -> dict[str, float]:
    """Return the median seconds of `prep --help` and of `prep inspect` of a 13B model, with warm caches."""
    commands = {"help": (PREP, "--help"), "inspect": (PREP, "inspect", make_sparse_model(work))}
    return {
        name: statistics.median(run_checked(words).wall_s for _ in range(START_RUNS))
        for name, words in commands.items()
    }


def make_sparse_model(work: Path) -> Path:
    """Return a LLaMA-13B of headers and sparse zeros, written on first use."""
    folder = work / f"bench-{PLANNED_MODEL}-sparse"
    if not folder.exists():
        write_model(folder, published_config(PLANNED_MODEL), sparse=True)
    return folder


def make_model(
    work: Path,
    name: str,
    layers: int | None,
    shard_nbytes: int = SHARD_NBYTES,
    dtype: str | None = None,
) -> Path:
    """Return the model to measure with, written on first use.

    Args:
        work: Folder that holds the models.
        name: Alias of the model.
        layers: Number of layers, or None for the published number.
        shard_nbytes: Size limit of a weight file.
        dtype: Dtype of all weights, or None for the published dtype.

    Raises:
        SystemExit: The disk has too little space for a run.
    """
    config = published_config(name, dtype, layers)
    parts = [
        f"bench-{name}",
        *([dtype] if dtype else []),
        *([f"{layers}-layers"] if layers else []),
        *([] if shard_nbytes == SHARD_NBYTES else ["whole"]),
    ]
    folder = work / "-".join(parts)
    # The disk holds the model, the init and an output.
    needed_nbytes = (2 if folder.exists() else 3) * weights_nbytes(config)
    free_nbytes = shutil.disk_usage(work).free
    if free_nbytes < needed_nbytes:
        raise SystemExit(
            f"{work} has {format_bytes(free_nbytes)} free, this takes {format_bytes(needed_nbytes)}"
        )
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.partial")
        remove(unfinished)
        write_model(unfinished, config, shard_nbytes)
        unfinished.rename(folder)
    return folder


def weights_nbytes(config: HFConfig) -> int:
    """Return the size of all weights of a model in bytes."""
    return sum(nbytes for *_, nbytes in tensor_entries(config))


def run_checked(command: Sequence[str | Path]) -> CommandCost:
    """Run a command and return its cost. Raise SystemExit with its stderr if it fails."""
    cost = measure(command)
    if cost.exit_code:
        raise SystemExit(
            f"{shlex.join(map(str, command))} ended with {cost.exit_code}\n{cost.stderr}"
        )
    return cost


def remove(*paths: Path) -> None:
    """Delete folders that exist."""
    for path in filter(Path.exists, paths):
        shutil.rmtree(path)


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system."""
    return subprocess.check_output(["df", "--output=fstype", folder], text=True).split()[-1]


def log(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def _parse_cases(text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in CASES]:
        raise argparse.ArgumentTypeError(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    return text.split(",")


def _parse_budgets(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.evidence", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--work", type=Path, required=True, metavar="FOLDER", help="folder on the disk to measure"
    )
    parser.add_argument(
        "--model",
        choices=PUBLISHED,
        default="gpt-neo-1.3B",
        metavar="NAME",
        help="alias of a model",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="number of layers, for a smaller model"
    )
    parser.add_argument(
        "--dtype", choices=FREE_BITS, help="dtype of all weights; default: as published"
    )
    parser.add_argument(
        "--cases", type=_parse_cases, default=list(CASES), metavar="CASE,…", help="default: all"
    )
    parser.add_argument(
        "--memory",
        type=_parse_budgets,
        default=BUDGETS,
        metavar="SIZE,…",
        help="default: 512MiB,128MiB",
    )
    parser.add_argument(
        "--pairs", type=int, default=5, metavar="N", help="rounds, with one run of each; default: 5"
    )
    parser.add_argument(
        "--slow-disk", type=int, metavar="MB", help="create a disk throttled to MB/s; needs root"
    )
    parser.add_argument(
        "--plan", action="store_true", help=f"instead: plan {PLANNED_MODEL} for 1,64,4"
    )
    parser.add_argument("--start", action="store_true", help="instead: measure the start-up time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the requested cases and print the results."""
    options = _parse_arguments(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    compile_packages()
    figures: dict[str, object] = {}
    if options.plan:
        figures["plan"] = result = plan_figures(options.work)
        print(
            f"plan of {PLANNED_MODEL} for 1,64,4: {result['chunks']:,} chunks, {result['seconds']:.2f} s,"
            f" peak {format_bytes(result['peak_nbytes'])}"
            f", {format_bytes(result['above_inspect_nbytes'])} above prep inspect"
        )
    if options.start:
        figures["start"] = result = start_figures(options.work)
        print(
            f"prep --help: {result['help']:.2f} s; prep inspect of {PLANNED_MODEL}: {result['inspect']:.2f} s"
        )
    if not (options.plan or options.start):
        figures |= _table_figures(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _table_figures(options: argparse.Namespace) -> dict[str, object]:
    with contextlib.ExitStack() as stack:
        work, disk_limit = options.work, ""
        if options.slow_disk:
            nbytes = (
                3 * weights_nbytes(published_config(options.model, options.dtype, options.layers))
                + SPARE_NBYTES
            )
            work = stack.enter_context(slow_disk(options.work, options.slow_disk, nbytes))
            disk_limit = f", held to {options.slow_disk} MB/s: {measure_rates(work)}"
            print(f"disk{disk_limit}", flush=True)
        model = make_model(work, options.model, options.layers, dtype=options.dtype)
        disk_type, eviction = file_system(work), drop_page_cache([model])
        rows = measure_cases(BenchPaths(model, work), options.cases, options.pairs, options.memory)
    print(
        f"{model.name}, cold by {eviction}, {os.cpu_count()} cores{disk_limit}\n{evidence_text(rows, disk_type)}"
    )
    ratios = [
        {
            "to_fastest": row.to_fastest,
            "to_median": row.to_median,
            "to_floor": row.to_floor,
            "to_target": row.to_target,
        }
        for row in rows
    ]
    row_records = [asdict(row) | row_ratios for row, row_ratios in zip(rows, ratios)]
    return {
        "model": model.name,
        "file_system": disk_type,
        "cold": eviction,
        "slow": disk_limit,
        "rows": row_records,
    }


if __name__ == "__main__":
    main()
