"""SIGKILL at random points of every command that writes checkpoints, and then the same command again.

    python -m bench.kills --work FOLDER [--count 200] [--seed 1] [--commands save-init,export]

In a share of the cases some bytes of what the killed run left are flipped, cut off or added before the second run. Its
output is compared, bit by bit, with that of a run that was not killed. A second run may also refuse with an error that
says what to do: then `--restart` has to lead to the same output. Prints one row per command; `wrong` has to be 0.

Conversions are forked from this process, with Python's modules loaded: a kill then hits the work, not the start.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from bench.damage import damage_file
from prepcli.cli.main import main as prep
from prepcli.console.ui import format_table
from prepcli.demo.tiny_model import VOCABULARY, write_tiny_model
from prepcli.execution.locks import is_locked
from prepcli.execution.run_folder import saved_steps

INIT_COMMAND = ("save-init", "./model", "--pad-vocab", "8")
COMMANDS = {
    "pad-vocab": ("pad-vocab", "./model", "--multiple", "8", "--init", "mean"),
    "save-init": ("save-init", "./model"),
    "save-init --mesh": ("save-init", "./model", "--mesh", "1,8,4", "--pad-vocab", "auto"),
    "save-init --dtype": ("save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "auto", "--dtype", "bfloat16"),
    "save-init --workers": ("save-init", "./model", "--workers", "2", "--memory", "160MiB"),
    "save-init --compress": ("save-init", "./model", "--mesh", "1,2,2", "--pad-vocab", "auto", "--compress", "zstd"),
    "reshard": ("reshard", "init", "--mesh", "1,4,8"),
    "export": ("export", "init"),
    "train": ("train", "recipe.toml"),
}
TRAIN = "train"
TRAIN_SHARE = 0.1
DAMAGED_SHARE = 0.5
KILL_POINTS = ("any time", "between syncs", "after a sync", "at commit")
LOCK_TIMEOUT_S = 120.0
RECIPE = """\
seed = 1
model.path = "init"
data = { type = "text", path = "text.txt", seq_length = 16 }
batch.size = 2
optimizer.lr = 1e-3
train.steps = 4
checkpoint = { every = 1, keep = 2 }
"""


@dataclass(slots=True)
class KillCounts:
    """What came of the kills of one command."""

    kills: int = 0
    resumed: int = 0
    damaged: int = 0
    refused: int = 0
    wrong: int = 0
    redone_nbytes: list[int] = field(
        default_factory=list
    )  # bytes written before the kill and again after it, if undamaged


@dataclass(frozen=True, slots=True)
class KillBench:
    """A folder with the sources, and of each command an output that was not killed, its bytes and its seconds."""

    folder: Path
    written_nbytes: dict[str, int]
    duration_s: dict[str, float]

    def reference_output(self, name: str) -> Path:
        """The output of a run that was not killed."""
        return self.folder / f"whole.{list(COMMANDS).index(name)}"


def command_line(name: str, out: str) -> list[str]:
    """The command line of a command."""
    memory = () if name == TRAIN or "--memory" in COMMANDS[name] else ("--memory", "32MiB")
    return [*COMMANDS[name], "--out", out, *memory, "--json", "--progress", "none"]


def start_command(folder: Path, command: Sequence[str]) -> BaseProcess:
    """Start a command in a folder, where `said.out` and `said.err` take what it says."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(folder, command))
    process.start()
    return process


def _run(folder: Path, command: Sequence[str]) -> None:
    os.chdir(folder)
    for number, name in ((1, "said.out"), (2, "said.err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    if command[0] == TRAIN:  # jax does not survive a fork
        os.execv(sys.executable, [sys.executable, "-m", "prepcli", *command])
    sys.exit(prep(list(command)))


def make_bench(folder: Path, names: Sequence[str]) -> KillBench:
    """Make the sources and the outputs to compare with in an empty folder."""
    folder.mkdir(parents=True)
    write_tiny_model(folder / "model")
    draw = random.Random(0)
    (folder / "text.txt").write_text(" ".join(draw.choice(VOCABULARY[2:]) for _ in range(2000)))
    (folder / "recipe.toml").write_text(RECIPE)
    _whole(folder, [*INIT_COMMAND, "--out", "init", "-q"])
    bench = KillBench(folder, {}, {})
    for name in names:
        began = time.monotonic()
        said = _whole(folder, command_line(name, bench.reference_output(name).name))
        bench.duration_s[name] = time.monotonic() - began
        bench.written_nbytes[name] = _written(said)
    return bench


def _whole(folder: Path, command: Sequence[str]) -> str:
    """Run a command to its end; what it printed. RuntimeError where it fails."""
    process = start_command(folder, command)
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{command[0]} ended with {process.exitcode}: {(folder / 'said.err').read_text()}")
    return (folder / "said.out").read_text()


def _written(printed: str) -> int:
    return json.loads(printed).get("bytes", {}).get("written", 0)


def compared_folder(folder: Path) -> Path:
    """The part of an output that is compared: of a training run its last step."""
    steps = saved_steps(folder)
    return folder / str(steps[-1]) if steps else folder


def have_same_files(a: Path, b: Path) -> bool:
    """Whether two folders hold the same files, bit by bit."""
    files = [{path.relative_to(root): path for path in root.rglob("*") if path.is_file()} for root in (a, b)]
    return files[0].keys() == files[1].keys() and all(
        path.read_bytes() == files[1][name].read_bytes() for name, path in files[0].items()
    )


def data_nbytes(partial: Path) -> int:
    """Return the bytes of tensors that a killed run has written, without holes and unwritten extents."""
    folders = [partial / ".prep/raw/d", partial / "d", partial]
    found = next((folder for folder in folders if folder.is_dir() and any(map(is_data, folder.iterdir()))), None)
    return sum(_nbytes_with_data(path) for path in found.iterdir() if is_data(path)) if found else 0


def _nbytes_with_data(path: Path) -> int:
    with path.open("rb") as file:
        size, at, found = os.fstat(file.fileno()).st_size, 0, 0
        while at < size:
            try:
                low = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                break
            at = os.lseek(file.fileno(), low, os.SEEK_HOLE)
            found += at - low
    return found


def is_data(path: Path) -> bool:
    """Whether a file of a staging folder holds tensors."""
    return path.is_file() and (path.suffix == ".safetensors" or path.parent.name == "d")


def kill_condition(point: str, partial: Path, duration_s: float, rng: random.Random) -> Callable[[], bool]:
    """What tells that the point is reached at which a run is killed."""
    at, after_s = time.monotonic(), rng.uniform(0.0, 0.05)
    journal, syncs = partial / ".prep/journal.0", rng.randint(1, 5)
    events: dict[str, Callable[[], bool]] = {
        "between syncs": lambda: data_nbytes(partial) > 0,
        "after a sync": lambda: journal.exists() and journal.read_bytes().count(b"\n") > 1 + syncs,
        "at commit": lambda: any((partial / name).exists() for name in ("config.json", "hf", "_METADATA")),
    }
    if point not in events:
        latest = rng.uniform(0.1, 1.0) * duration_s
        return lambda: time.monotonic() - at >= latest
    seen: list[float] = []

    def reached() -> bool:
        try:
            if not seen and events[point]():
                seen.append(time.monotonic())
        except OSError:  # renamed while it was looked at
            pass
        return bool(seen) and time.monotonic() - seen[0] >= after_s

    return reached


def start_and_kill(bench: KillBench, name: str, out: Path, rng: random.Random) -> bool:
    """Start a command and kill it; whether it was at work."""
    partial = out.with_name(f"{out.name}.partial")
    point = rng.choice(KILL_POINTS) if name != TRAIN else KILL_POINTS[0]
    process = start_command(bench.folder, command_line(name, out.name))
    is_time = kill_condition(point, partial, bench.duration_s[name], rng)
    while process.is_alive() and not is_time():
        time.sleep(0.0005)
    process.kill()
    process.join()
    until = time.monotonic() + LOCK_TIMEOUT_S
    while (partial / ".prep/lock").exists() and is_locked(partial / ".prep/lock"):  # workers end with their parent
        if time.monotonic() > until:
            raise TimeoutError(f"{partial} is still locked")
        time.sleep(0.01)
    return process.exitcode == -signal.SIGKILL


def run_again(bench: KillBench, name: str, out: Path, *more: str) -> tuple[int, str, int]:
    """Run a command to its end: exit code, what it said, and the bytes that it wrote."""
    process = start_command(bench.folder, [*command_line(name, out.name), *more])
    process.join()
    said = [(bench.folder / file).read_text() for file in ("said.out", "said.err")]
    return process.exitcode or 0, "\n".join(said), 0 if process.exitcode else _written(said[0])


def is_clear_error(output: str) -> bool:
    """Whether a refusal is an error with a reason."""
    return "error" in output and "Traceback" not in output and "bug in prep" not in output


def run_case(bench: KillBench, name: str, out: Path, rng: random.Random, counts: KillCounts) -> None:
    """Kill a run, maybe spoil what it left, run it again, and compare."""
    partial = out.with_name(f"{out.name}.partial")
    while not start_and_kill(bench, name, out, rng):  # it came too late
        shutil.rmtree(out, ignore_errors=True)
    counts.kills += 1
    there = data_nbytes(partial)
    left = partial if name != TRAIN else next(out.glob("*.partial"), None)
    how = damage_file(left, rng) if left and left.exists() and rng.random() < DAMAGED_SHARE else ""
    counts.damaged += bool(how)
    code, said, written = run_again(bench, name, out)
    if code:
        counts.refused += 1
        clear, first = is_clear_error(said), said[:400]
        code, said, written = run_again(bench, name, out, "--restart")
        code = code or not clear
        log(f"refused: {name}, {how or 'undamaged'}: {first}")
    elif "resuming" in said or name == TRAIN:
        counts.resumed += 1
    if not how and name != TRAIN:
        counts.redone_nbytes.append(max(0, there + written - bench.written_nbytes[name]))
    if code or not have_same_files(compared_folder(out), compared_folder(bench.reference_output(name))):
        counts.wrong += 1
        log(f"WRONG: {name}, {how or 'undamaged'}, exit {code}\n{said}")
        out.rename(out.with_name(f"wrong-{counts.wrong}-{out.name}")) if out.exists() else None
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)


def kills_per_command(names: Sequence[str], count: int) -> dict[str, int]:
    """How many of the kills each command has."""
    train = max(1, round(count * TRAIN_SHARE)) if TRAIN in names else 0
    others = [name for name in names if name != TRAIN]
    each = {name: (count - train + at) // len(others) for at, name in enumerate(others)} if others else {}
    return each | ({TRAIN: train if others else count} if train else {})


def kills_text(rows: dict[str, KillCounts]) -> str:
    """The table."""
    head = ("command", "kills", "damaged", "resumed", "refused", "wrong", "redone, mean MiB", "most MiB")
    shown = []
    for name, row in rows.items():
        mean, most = (sum(row.redone_nbytes) / max(1, len(row.redone_nbytes)), max(row.redone_nbytes, default=0))
        counts = (row.kills, row.damaged, row.resumed, row.refused, row.wrong)
        shown.append((name, *counts, f"{mean / 2**20:.1f}", f"{most / 2**20:.1f}"))
    totals = [sum(row[column] for row in shown) for column in range(1, 6)]
    return format_table([*shown, ("all", *totals, "", "")], head, right_aligned=head[6:])


def log(text: str) -> None:
    """What happens meanwhile, on stderr."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill what the arguments ask for; print the table. 1 where an output was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.kills", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="a new folder; deleted at the end")
    parser.add_argument("--count", type=int, default=200, help="default: 200")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--commands", default=",".join(COMMANDS), help="default: all")
    given = parser.parse_args(arguments)
    names = given.commands.split(",")
    if unknown := [name for name in names if name not in COMMANDS]:
        parser.error(f"no command {unknown[0]!r}; there are {', '.join(COMMANDS)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    bench = make_bench(given.work, names)
    rows = {name: KillCounts() for name in names}
    try:
        for name, count in kills_per_command(names, given.count).items():
            for number in range(count):
                draw = random.Random(f"{given.seed} {name} {number}")
                run_case(bench, name, given.work / "out", draw, rows[name])
            log(f"{name}: {rows[name]}")
    finally:
        print(kills_text(rows))
    wrong = sum(row.wrong for row in rows.values())
    if not wrong:
        shutil.rmtree(given.work)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
