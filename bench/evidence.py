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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import prepcli
import trainer
from bench.floor import COPY_METHODS, CopyMethod
from bench.meter import CommandCost, drop_page_cache, measure
from bench.models import FREE_BITS, SHARD_NBYTES, tensor_entries, write_model
from bench.published import PUBLISHED, published_config
from bench.slow_disk import measure_rates, slow_disk
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import format_table
from trainer.models.parameters import HFConfig

PREP = Path(sys.executable).with_name("prep")
BUDGETS = ("512MiB", "128MiB")
INIT_COMMAND = ("save-init", "--mesh", "1,1,8", "--pad-vocab", "auto")  # writes the input of reshard and export
PLANNED_MODEL = "llama-13b"
START_RUNS = 5
FINALISTS = 2  # plain copies per pair: the fastest of one round of all methods
SPARE_NBYTES = 2 << 30  # additional size of a slow disk: file system, tokenizers and free space
CP_TARGET, FLOOR_TARGET = 0.9, 1.1  # the target is the larger of these shares of the fastest cp and the floor


@dataclass(frozen=True, slots=True)
class Case:
    """A conversion: command and options; its input is the model, or the checkpoint that INIT_COMMAND writes."""

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
    """Paths of a measurement; everything but the model is deleted afterwards."""

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
class EvidenceRow:
    """Results of a case with a memory budget: seconds of each run, median CPU seconds, peak memory."""

    case: str
    memory: str
    source_nbytes: int
    seconds: tuple[float, ...]
    cp_seconds: tuple[float, ...]
    cpu_s: float
    cp_cpu_s: float
    peak_nbytes: int
    inspect_nbytes: int  # peak of `prep inspect`, already subtracted from peak_nbytes
    floor_seconds: tuple[float, ...] = ()  # runs of all plain copies
    floor_means: str = ""  # method of the fastest plain copy

    @property
    def to_fastest(self) -> float:
        """Return the ratio of the fastest run to the fastest cp."""
        return min(self.seconds) / min(self.cp_seconds)

    @property
    def to_median(self) -> float:
        """Return the ratio of the median run to the median cp."""
        return statistics.median(self.seconds) / statistics.median(self.cp_seconds)

    @property
    def to_floor(self) -> float | None:
        """Return the ratio of the fastest run to the fastest plain copy; None without plain copies."""
        return min(self.seconds) / min(self.floor_seconds) if self.floor_seconds else None

    @property
    def to_target(self) -> float | None:
        """Return the ratio of the fastest run to the target (met up to 1); None without plain copies."""
        if not self.floor_seconds:
            return None
        return min(self.seconds) / max(CP_TARGET * min(self.cp_seconds), FLOOR_TARGET * min(self.floor_seconds))


def measure_case(
    name: str, memory: str, paths: BenchPaths, pairs: int, copy_methods: Sequence[CopyMethod] = ()
) -> EvidenceRow:
    """Measure a case, cp and plain copies in alternating order: A B, B A, A B ...

    Args:
        name: Key of CASES.
        memory: Memory budget of prep, such as `512MiB`.
        paths: Paths of the measurement.
        pairs: Number of runs of each command.
        copy_methods: Methods of the plain copies.
    """
    case = CASES[name]
    source = paths.init if case.from_init else paths.model
    command, *options = case.command
    prep = (PREP, command, source, *options, "--out", paths.out, "--memory", memory, "--quiet")
    cp = ("bash", "-c", f"cp -r --reflink=never {shlex.quote(str(source))} {shlex.quote(str(paths.out))} && sync")
    inspect_cost = run_checked((PREP, "inspect", source, "--quiet"))
    prep_costs, cp_costs, method_costs = [], [], {method: [] for method in copy_methods}
    for pair in range(pairs):
        runs = (
            (prep, prep_costs),
            (cp, cp_costs),
            *((method.command(source, paths.out), costs) for method, costs in method_costs.items()),
        )
        for command_words, costs in runs if pair % 2 == 0 else reversed(runs):
            costs.append(_cold_run(command_words, source, paths.out))
        method_times = "".join(f", {method} {costs[-1].wall_s:.1f} s" for method, costs in method_costs.items())
        times = f"{prep_costs[-1].wall_s:.1f} s, cp {cp_costs[-1].wall_s:.1f} s{method_times}"
        log(f"{name}, {memory}, pair {pair + 1}: {times}")
    row = _make_row(name, memory, source, prep_costs, cp_costs, inspect_cost)
    return _with_floor(row, method_costs) if copy_methods else row


def compile_packages() -> None:
    """Byte-compile prep, as its installation does; otherwise each run may compile it again."""
    for package in (prepcli, trainer):
        compileall.compile_dir(Path(package.__path__[0]), quiet=2)


def fastest_copy_methods(source: Path, out: Path) -> tuple[CopyMethod, ...]:
    """Return the fastest plain copy methods for a source, from one cold run each."""
    seconds = {method: _cold_run(method.command(source, out), source, out).wall_s for method in COPY_METHODS}
    log("plain copies: " + ", ".join(f"{method} {value:.1f} s" for method, value in seconds.items()))
    return tuple(sorted(seconds, key=lambda method: seconds[method])[:FINALISTS])


def _with_floor(row: EvidenceRow, costs_by_method: Mapping[CopyMethod, Sequence[CommandCost]]) -> EvidenceRow:
    fastest = min(costs_by_method, key=lambda method: min(cost.wall_s for cost in costs_by_method[method]))
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
            run_checked((PREP, INIT_COMMAND[0], paths.model, *INIT_COMMAND[1:], "--out", paths.init, "--quiet"))
        sources = {CASES[name].from_init: paths.init if CASES[name].from_init else paths.model for name in cases}
        methods_by_source = {
            from_init: fastest_copy_methods(source, paths.out) for from_init, source in sources.items()
        }
        return [
            measure_case(name, memory, paths, pairs, methods_by_source[CASES[name].from_init])
            for name in cases
            for memory in budgets
        ]
    finally:
        remove(paths.init, paths.out, *paths.unfinished)


def evidence_text(rows: Sequence[EvidenceRow], file_system: str) -> str:
    """Return the published table of results."""
    header = (
        *("case", "memory", "seconds", "cp, seconds", "/ fastest", "/ median", "CPU s", "cp CPU s", "peak MiB", "fs"),
        *("floor, seconds", "/ floor", "/ target"),
    )
    lines = [
        (
            row.case,
            row.memory,
            _join_seconds(row.seconds),
            _join_seconds(row.cp_seconds),
            f"{row.to_fastest:.2f}",
            f"{row.to_median:.2f}",
            f"{row.cpu_s:.1f}",
            f"{row.cp_cpu_s:.1f}",
            f"{row.peak_nbytes / (1 << 20):.0f}",
            file_system,
            f"{min(row.floor_seconds):.1f} {row.floor_means}" if row.floor_seconds else "",
            f"{row.to_floor:.2f}" if row.to_floor else "",
            f"{row.to_target:.2f}" if row.to_target else "",
        )
        for row in rows
    ]
    return format_table(lines, header, right_aligned=(*header[4:9], *header[11:]))


def plan_figures(work: Path) -> dict[str, float]:
    """Plan a LLaMA-13B for mesh 1,64,4 from headers alone; return chunks, seconds and peak memory."""
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
    work: Path, name: str, layers: int | None, shard_nbytes: int = SHARD_NBYTES, dtype: str | None = None
) -> Path:
    """Return the model to measure with, written on first use.

    Args:
        work: Folder that holds the models.
        name: Alias of the model.
        layers: Number of layers; None for the published number.
        shard_nbytes: Size limit of a weight file.
        dtype: Dtype of all weights; None for the published dtype.

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
    needed_nbytes = (2 if folder.exists() else 3) * weights_nbytes(config)  # with init and output
    free_nbytes = shutil.disk_usage(work).free
    if free_nbytes < needed_nbytes:
        raise SystemExit(f"{work} has {format_bytes(free_nbytes)} free, this takes {format_bytes(needed_nbytes)}")
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
    """Run a command and return its cost; raise SystemExit with its stderr if it fails."""
    cost = measure(command)
    if cost.exit_code:
        raise SystemExit(f"{shlex.join(map(str, command))} ended with {cost.exit_code}\n{cost.stderr}")
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


def _join_seconds(seconds: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in seconds)


def _parse_cases(text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in CASES]:
        raise argparse.ArgumentTypeError(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    return text.split(",")


def _parse_budgets(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.evidence", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="folder on the disk to measure")
    parser.add_argument("--model", choices=PUBLISHED, default="gpt-neo-1.3B", metavar="NAME", help="alias of a model")
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers, for a smaller model")
    parser.add_argument("--dtype", choices=FREE_BITS, help="dtype of all weights; default: as published")
    parser.add_argument("--cases", type=_parse_cases, default=list(CASES), metavar="CASE,…", help="default: all")
    parser.add_argument(
        "--memory", type=_parse_budgets, default=BUDGETS, metavar="SIZE,…", help="default: 512MiB,128MiB"
    )
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each; default: 5")
    parser.add_argument("--slow-disk", type=int, metavar="MB", help="create a disk throttled to MB/s; needs root")
    parser.add_argument("--plan", action="store_true", help=f"instead: plan {PLANNED_MODEL} for 1,64,4")
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
        print(f"prep --help: {result['help']:.2f} s; prep inspect of {PLANNED_MODEL}: {result['inspect']:.2f} s")
    if not (options.plan or options.start):
        figures |= _table_figures(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _table_figures(options: argparse.Namespace) -> dict[str, object]:
    with contextlib.ExitStack() as stack:
        work, disk_limit = options.work, ""
        if options.slow_disk:
            nbytes = 3 * weights_nbytes(published_config(options.model, options.dtype, options.layers)) + SPARE_NBYTES
            work = stack.enter_context(slow_disk(options.work, options.slow_disk, nbytes))
            disk_limit = f", held to {options.slow_disk} MB/s: {measure_rates(work)}"
            print(f"disk{disk_limit}", flush=True)
        model = make_model(work, options.model, options.layers, dtype=options.dtype)
        disk_type, eviction = file_system(work), drop_page_cache([model])
        rows = measure_cases(BenchPaths(model, work), options.cases, options.pairs, options.memory)
    print(f"{model.name}, cold by {eviction}, {os.cpu_count()} cores{disk_limit}\n{evidence_text(rows, disk_type)}")
    ratios = [
        {"to_fastest": row.to_fastest, "to_median": row.to_median, "to_floor": row.to_floor, "to_target": row.to_target}
        for row in rows
    ]
    row_records = [asdict(row) | row_ratios for row, row_ratios in zip(rows, ratios)]
    return {"model": model.name, "file_system": disk_type, "cold": eviction, "slow": disk_limit, "rows": row_records}


if __name__ == "__main__":
    main()
