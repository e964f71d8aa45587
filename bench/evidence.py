"""The evidence table: conversions against `cp -r && sync` and plain copies of the same bytes, cold, in turn; start-up.

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
INIT_COMMAND = ("save-init", "--mesh", "1,1,8", "--pad-vocab", "auto")  # what reshard and export start from
PLANNED_MODEL = "llama-13b"
START_RUNS = 5
FINALISTS = 2  # plain copies measured in each pair: the fastest of one round of all
SPARE_NBYTES = 2 << 30  # of a slow disk: file system, tokenizers and room
CP_TARGET, FLOOR_TARGET = 0.9, 1.1  # the target is the larger one of these shares of the fastest cp and of the floor


@dataclass(frozen=True, slots=True)
class Case:
    """A conversion: command and options, from the model or from the checkpoint that INIT makes of it."""

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
    """Where things lie while we measure; all but the model is deleted again."""

    model: Path
    work: Path

    @property
    def init(self) -> Path:
        return self.work / "bench-init"

    @property
    def out(self) -> Path:
        return self.work / "bench-out"

    @property
    def unfinished(self) -> tuple[Path, ...]:
        """What prep leaves of a run that was cut short."""
        return tuple(path.with_name(f"{path.name}.partial") for path in (self.init, self.out))


@dataclass(frozen=True, slots=True)
class EvidenceRow:
    """A case at a budget: each run's seconds, median CPU seconds, most memory above that of `prep inspect`."""

    case: str
    memory: str
    source_nbytes: int
    seconds: tuple[float, ...]
    cp_seconds: tuple[float, ...]
    cpu_s: float
    cp_cpu_s: float
    peak_nbytes: int
    inspect_nbytes: int  # already subtracted
    floor_seconds: tuple[float, ...] = ()  # of all plain copies
    floor_means: str = ""  # of the fastest one

    @property
    def to_fastest(self) -> float:
        """The fastest run against the fastest cp."""
        return min(self.seconds) / min(self.cp_seconds)

    @property
    def to_median(self) -> float:
        """The median run against the median cp."""
        return statistics.median(self.seconds) / statistics.median(self.cp_seconds)

    @property
    def to_floor(self) -> float | None:
        """The fastest run against the fastest plain copy."""
        return min(self.seconds) / min(self.floor_seconds) if self.floor_seconds else None

    @property
    def to_target(self) -> float | None:
        """The fastest run against the target; up to 1 it is met."""
        if not self.floor_seconds:
            return None
        return min(self.seconds) / max(CP_TARGET * min(self.cp_seconds), FLOOR_TARGET * min(self.floor_seconds))


def measure_case(
    name: str, memory: str, paths: BenchPaths, pairs: int, copy_methods: Sequence[CopyMethod] = ()
) -> EvidenceRow:
    """Measure a case, cp and plain copies in turn: A B, B A, A B …"""
    case = CASES[name]
    source = paths.init if case.from_init else paths.model
    command, *options = case.command
    prep = (PREP, command, source, *options, "--out", paths.out, "--memory", memory, "--quiet")
    copy = ("bash", "-c", f"cp -r --reflink=never {shlex.quote(str(source))} {shlex.quote(str(paths.out))} && sync")
    base = run_checked((PREP, "inspect", source, "--quiet"))
    ours, theirs, floors = [], [], {means: [] for means in copy_methods}
    for pair in range(pairs):
        turns = ((prep, ours), (copy, theirs), *((m.command(source, paths.out), costs) for m, costs in floors.items()))
        for words, costs in turns if pair % 2 == 0 else reversed(turns):
            costs.append(_cold_run(words, source, paths.out))
        each = "".join(f", {means} {costs[-1].wall_s:.1f} s" for means, costs in floors.items())
        log(f"{name}, {memory}, pair {pair + 1}: {ours[-1].wall_s:.1f} s, cp {theirs[-1].wall_s:.1f} s{each}")
    row = _row(name, memory, source, ours, theirs, base)
    return _with_floor(row, floors) if copy_methods else row


def compile_packages() -> None:
    """Byte-compile prep, as its installation does: else each run compiles it, where Python may not store bytecode."""
    for package in (prepcli, trainer):
        compileall.compile_dir(Path(package.__path__[0]), quiet=2)


def fastest_copy_methods(source: Path, out: Path) -> tuple[CopyMethod, ...]:
    """The fastest plain copies of a source, from one cold run each."""
    seconds = {means: _cold_run(means.command(source, out), source, out).wall_s for means in COPY_METHODS}
    log("plain copies: " + ", ".join(f"{means} {value:.1f} s" for means, value in seconds.items()))
    return tuple(sorted(seconds, key=lambda means: seconds[means])[:FINALISTS])


def _with_floor(row: EvidenceRow, floors: Mapping[CopyMethod, Sequence[CommandCost]]) -> EvidenceRow:
    fastest = min(floors, key=lambda means: min(cost.wall_s for cost in floors[means]))
    every = tuple(cost.wall_s for costs in floors.values() for cost in costs)
    return replace(row, floor_seconds=every, floor_means=str(fastest))


def _cold_run(words: Sequence[str | Path], source: Path, out: Path) -> CommandCost:
    os.sync()
    drop_page_cache([source])
    cost = run_checked(words)
    remove(out)
    return cost


def _row(
    name: str, memory: str, source: Path, ours: Sequence[CommandCost], theirs: Sequence[CommandCost], base: CommandCost
) -> EvidenceRow:
    return EvidenceRow(
        name,
        memory,
        sum(path.stat().st_size for path in source.rglob("*") if path.is_file()),
        tuple(cost.wall_s for cost in ours),
        tuple(cost.wall_s for cost in theirs),
        statistics.median(cost.cpu_s for cost in ours),
        statistics.median(cost.cpu_s for cost in theirs),
        max(cost.peak_nbytes for cost in ours) - base.peak_nbytes,
        base.peak_nbytes,
    )


def measure_cases(
    paths: BenchPaths, cases: Sequence[str], pairs: int, budgets: Sequence[str] = BUDGETS
) -> list[EvidenceRow]:
    """Measure cases at each budget, and leave nothing behind but the model."""
    try:
        remove(paths.init, paths.out, *paths.unfinished)
        if any(CASES[name].from_init for name in cases):
            run_checked((PREP, INIT_COMMAND[0], paths.model, *INIT_COMMAND[1:], "--out", paths.init, "--quiet"))
        sources = {CASES[name].from_init: paths.init if CASES[name].from_init else paths.model for name in cases}
        plain = {from_init: fastest_copy_methods(source, paths.out) for from_init, source in sources.items()}
        return [
            measure_case(name, memory, paths, pairs, plain[CASES[name].from_init])
            for name in cases
            for memory in budgets
        ]
    finally:
        remove(paths.init, paths.out, *paths.unfinished)


def evidence_text(rows: Sequence[EvidenceRow], file_system: str) -> str:
    """The table that evidence is published as."""
    head = (
        *("case", "memory", "seconds", "cp, seconds", "/ fastest", "/ median", "CPU s", "cp CPU s", "peak MiB", "fs"),
        *("floor, seconds", "/ floor", "/ target"),
    )
    shown = [
        (
            row.case,
            row.memory,
            _each(row.seconds),
            _each(row.cp_seconds),
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
    return format_table(shown, head, right_aligned=(*head[4:9], *head[11:]))


def plan_figures(work: Path) -> dict[str, float]:
    """Plan LLaMA-13B for 1,64,4 from headers alone: chunks, seconds, most memory in all and above `prep inspect`."""
    source = make_sparse_model(work)
    base = run_checked((PREP, "inspect", source, "--quiet"))
    options = ("--mesh", "1,64,4", "--out", work / "bench-out", "--dry-run", "--json", "--quiet")
    cost = run_checked((PREP, "save-init", source, *options))
    return {
        "chunks": json.loads(cost.stdout)["chunks"],
        "seconds": cost.wall_s,
        "peak_nbytes": cost.peak_nbytes,
        "above_inspect_nbytes": cost.peak_nbytes - base.peak_nbytes,
    }


def start_figures(work: Path) -> dict[str, float]:
    """Median seconds of `prep --help` and of `prep inspect` of a 13B, nothing cold."""
    commands = {"help": (PREP, "--help"), "inspect": (PREP, "inspect", make_sparse_model(work))}
    return {
        name: statistics.median(run_checked(words).wall_s for _ in range(START_RUNS))
        for name, words in commands.items()
    }


def make_sparse_model(work: Path) -> Path:
    """A LLaMA-13B of headers and zeros that take no disk."""
    folder = work / f"bench-{PLANNED_MODEL}-sparse"
    if not folder.exists():
        write_model(folder, published_config(PLANNED_MODEL), sparse=True)
    return folder


def make_model(
    work: Path, name: str, layers: int | None, shard_nbytes: int = SHARD_NBYTES, dtype: str | None = None
) -> Path:
    """The model to measure with; it stays there for the next time. SystemExit if the disk has no room for a run."""
    config = published_config(name, dtype, layers)
    parts = [
        f"bench-{name}",
        *([dtype] if dtype else []),
        *([f"{layers}-layers"] if layers else []),
        *([] if shard_nbytes == SHARD_NBYTES else ["whole"]),
    ]
    folder = work / "-".join(parts)
    needed = (2 if folder.exists() else 3) * weights_nbytes(config)  # with init and output
    free = shutil.disk_usage(work).free
    if free < needed:
        raise SystemExit(f"{work} has {format_bytes(free)} free, this takes {format_bytes(needed)}")
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.partial")
        remove(unfinished)
        write_model(unfinished, config, shard_nbytes)
        unfinished.rename(folder)
    return folder


def weights_nbytes(config: HFConfig) -> int:
    """Bytes of all weights of a model."""
    return sum(nbytes for *_, nbytes in tensor_entries(config))


def run_checked(command: Sequence[str | Path]) -> CommandCost:
    """The cost of a command; SystemExit with what it said if it failed, since its figures mean nothing."""
    cost = measure(command)
    if cost.exit_code:
        raise SystemExit(f"{shlex.join(map(str, command))} ended with {cost.exit_code}\n{cost.stderr}")
    return cost


def remove(*paths: Path) -> None:
    """Delete folders, if they are there."""
    for path in filter(Path.exists, paths):
        shutil.rmtree(path)


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    return subprocess.check_output(["df", "--output=fstype", folder], text=True).split()[-1]


def log(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def _each(seconds: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in seconds)


def _cases(text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in CASES]:
        raise argparse.ArgumentTypeError(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    return text.split(",")


def _budgets(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.evidence", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="on the disk to measure")
    parser.add_argument("--model", choices=PUBLISHED, default="gpt-neo-1.3B", metavar="NAME", help="an alias")
    parser.add_argument("--layers", type=int, metavar="N", help="of a smaller model, to try this out")
    parser.add_argument("--dtype", choices=FREE_BITS, help="of all weights; default: as published")
    parser.add_argument("--cases", type=_cases, default=list(CASES), metavar="CASE,…", help="default: all")
    parser.add_argument("--memory", type=_budgets, default=BUDGETS, metavar="SIZE,…", help="default: 512MiB,128MiB")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each; default: 5")
    parser.add_argument("--slow-disk", type=int, metavar="MB", help="on a disk held to MB/s, made for it; takes root")
    parser.add_argument("--plan", action="store_true", help=f"instead: plan {PLANNED_MODEL} for 1,64,4")
    parser.add_argument("--start", action="store_true", help="instead: what starting takes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for, and print it."""
    given = _options(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    compile_packages()
    figures: dict[str, object] = {}
    if given.plan:
        figures["plan"] = found = plan_figures(given.work)
        print(
            f"plan of {PLANNED_MODEL} for 1,64,4: {found['chunks']:,} chunks, {found['seconds']:.2f} s,"
            f" peak {format_bytes(found['peak_nbytes'])}, {format_bytes(found['above_inspect_nbytes'])} above prep inspect"
        )
    if given.start:
        figures["start"] = found = start_figures(given.work)
        print(f"prep --help: {found['help']:.2f} s; prep inspect of {PLANNED_MODEL}: {found['inspect']:.2f} s")
    if not (given.plan or given.start):
        figures |= _table_figures(given)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


def _table_figures(given: argparse.Namespace) -> dict[str, object]:
    with contextlib.ExitStack() as stack:
        work, slow = given.work, ""
        if given.slow_disk:
            nbytes = 3 * weights_nbytes(published_config(given.model, given.dtype, given.layers)) + SPARE_NBYTES
            work = stack.enter_context(slow_disk(given.work, given.slow_disk, nbytes))
            slow = f", held to {given.slow_disk} MB/s: {measure_rates(work)}"
            print(f"disk{slow}", flush=True)
        model = make_model(work, given.model, given.layers, dtype=given.dtype)
        disk, how = file_system(work), drop_page_cache([model])
        rows = measure_cases(BenchPaths(model, work), given.cases, given.pairs, given.memory)
    print(f"{model.name}, cold by {how}, {os.cpu_count()} cores{slow}\n{evidence_text(rows, disk)}")
    ratios = [
        {"to_fastest": r.to_fastest, "to_median": r.to_median, "to_floor": r.to_floor, "to_target": r.to_target}
        for r in rows
    ]
    shown = [asdict(row) | found for row, found in zip(rows, ratios)]
    return {"model": model.name, "file_system": disk, "cold": how, "slow": slow, "rows": shown}


if __name__ == "__main__":
    main()
