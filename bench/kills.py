"""Kill every command that writes checkpoints at random points with SIGKILL, and then run the same command again.

    python -m bench.kills --work FOLDER [--count 200] [--seed 1] [--commands save-init,export]

In a share of the cases, bytes of the killed run's files are flipped, cut off or appended before the second run. The
output of the second run must equal that of an uninterrupted run, bit by bit. The second run may also fail with an
error that has a hint; then `--restart` must produce the same output. Prints one row per command. `wrong` must be 0.

Conversions are forked from this process with all modules loaded, so that a kill interrupts the work, not the imports.
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
from prepcli.commands.cli.main import main as prep
from prepcli.commands.demo.tiny_model import VOCABULARY, write_tiny_model
from prepcli.core.tables import format_table
from prepcli.execution.folder_output import is_locked
from prepcli.formats.manifest import saved_steps
from tests.helpers.adapters import make_adapter

INIT_COMMAND = ("save-init", "./model", "--pad-vocab", "8")
COMMANDS = {
    "pad-vocab": ("pad-vocab", "./model", "--multiple", "8", "--init", "mean"),
    "save-init": ("save-init", "./model"),
    "save-init --mesh": ("save-init", "./model", "--mesh", "1,8,4", "--pad-vocab", "auto"),
    "save-init --dtype": (
        "save-init",
        "./model",
        "--mesh",
        "1,2,4",
        "--pad-vocab",
        "auto",
        "--dtype",
        "bfloat16",
    ),
    "save-init --workers": ("save-init", "./model", "--workers", "2", "--memory", "160MiB"),
    "save-init --compress": (
        "save-init",
        "./model",
        "--mesh",
        "1,2,2",
        "--pad-vocab",
        "auto",
        "--compress",
        "zstd",
    ),
    "reshard": ("reshard", "init", "--mesh", "1,4,8"),
    "reshard --storage": ("reshard", "init", "--mesh", "1,2,4", "--storage", "zarr3"),
    "export": ("export", "init"),
    "add-tokens": ("add-tokens", "./model", "--tokens", "tokens.txt"),
    "remove-tokens": ("remove-tokens", "./added"),
    "merge": ("merge", "./adapter", "./model"),
    "train": ("train", "recipe.toml"),
}
# Of the tiny model.
NUM_LAYERS, WIDTH = 4, 512
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
    """Outcomes of the kills of one command."""

    kills: int = 0
    resumed: int = 0
    damaged: int = 0
    refused: int = 0
    wrong: int = 0
    # Bytes that an undamaged run has written twice: before and after the kill.
    redone_nbytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class KillBench:
    """Folder with the sources and the reference outputs, and the written bytes and duration of each command."""

    folder: Path
    written_nbytes: dict[str, int]
    duration_s: dict[str, float]

    def reference_output(self, name: str) -> Path:
        """Return the output of the uninterrupted run."""
        return self.folder / f"whole.{list(COMMANDS).index(name)}"


def command_line(name: str, out: str) -> list[str]:
    """Return the arguments of a command."""
    memory = () if name == TRAIN or "--memory" in COMMANDS[name] else ("--memory", "32MiB")
    return [*COMMANDS[name], "--out", out, *memory, "--json", "--progress", "none"]


def start_command(folder: Path, command: Sequence[str]) -> BaseProcess:
    """Start a command in a folder. Its output goes to `stdout.txt` and `stderr.txt` there."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(folder, command))
    process.start()
    return process


def _run(folder: Path, command: Sequence[str]) -> None:
    os.chdir(folder)
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    if command[0] == TRAIN:  # JAX does not support fork
        # The package of the tests sets 8 devices, which do not divide the batch.
        os.environ["JAX_NUM_CPU_DEVICES"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "prepcli", *command])
    sys.exit(prep(list(command)))


def make_bench(folder: Path, names: Sequence[str]) -> KillBench:
    """Write the sources and the reference outputs into a new folder."""
    folder.mkdir(parents=True)
    write_tiny_model(folder / "model")
    rng = random.Random(0)
    (folder / "text.txt").write_text(" ".join(rng.choice(VOCABULARY[2:]) for _ in range(2000)))
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "tokens.txt").write_text("<first>\n<second>\n")
    modules = [f"transformer.h.{layer}.attn.attention.q_proj" for layer in range(NUM_LAYERS)]
    make_adapter(folder / "adapter", dict.fromkeys(modules, (WIDTH, WIDTH)))
    _run_to_end(folder, [*INIT_COMMAND, "--out", "init", "-q"])
    _run_to_end(folder, [*COMMANDS["add-tokens"], "--out", "added", "-q"])
    bench = KillBench(folder, {}, {})
    for name in names:
        start = time.monotonic()
        output = _run_to_end(folder, command_line(name, bench.reference_output(name).name))
        bench.duration_s[name] = time.monotonic() - start
        bench.written_nbytes[name] = _written_nbytes(output)
    return bench


def _run_to_end(folder: Path, command: Sequence[str]) -> str:
    """Run a command to its end and return its stdout. Raise RuntimeError if it fails."""
    process = start_command(folder, command)
    process.join()
    if process.exitcode:
        raise RuntimeError(
            f"{command[0]} ended with {process.exitcode}: {(folder / 'stderr.txt').read_text()}"
        )
    return (folder / "stdout.txt").read_text()


def _written_nbytes(printed: str) -> int:
    return json.loads(printed).get("bytes", {}).get("written", 0)


def compared_folder(folder: Path) -> Path:
    """Return the part of an output to compare: the last step of a training run, or the output itself."""
    steps = saved_steps(folder)
    return folder / str(steps[-1]) if steps else folder


def have_same_files(a: Path, b: Path) -> bool:
    """Return whether two folders hold the same files, bit by bit."""
    files = [
        {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}
        for root in (a, b)
    ]
    return files[0].keys() == files[1].keys() and all(
        path.read_bytes() == files[1][name].read_bytes() for name, path in files[0].items()
    )


def data_nbytes(partial: Path) -> int:
    """Return the bytes of tensors written by a killed run, without holes and unwritten extents."""
    folders = [partial / "d", partial]
    data_folder = next(
        (folder for folder in folders if folder.is_dir() and any(map(is_data, folder.iterdir()))),
        None,
    )
    return (
        sum(_nbytes_with_data(path) for path in data_folder.iterdir() if is_data(path))
        if data_folder
        else 0
    )


def _nbytes_with_data(path: Path) -> int:
    with path.open("rb") as file:
        size, offset, data_total = os.fstat(file.fileno()).st_size, 0, 0
        while offset < size:
            try:
                data_start = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            except OSError:  # the rest is a hole
                break
            offset = os.lseek(file.fileno(), data_start, os.SEEK_HOLE)
            data_total += offset - data_start
    return data_total


def is_data(path: Path) -> bool:
    """Return whether a file of a staging folder holds tensors."""
    return path.is_file() and (path.suffix == ".safetensors" or path.parent.name == "d")


def kill_condition(
    point: str, partial: Path, duration_s: float, rng: random.Random
) -> Callable[[], bool]:
    """Return a function that tells whether the run has reached the point of its kill."""
    start, delay_s = time.monotonic(), rng.uniform(0.0, 0.05)
    num_notes = rng.randint(1, 5)
    events: dict[str, Callable[[], bool]] = {
        "between syncs": lambda: data_nbytes(partial) > 0,
        "after a sync": lambda: len([*partial.glob(".prep/done/*")]) >= num_notes,
        "at commit": lambda: any(
            (partial / name).exists() for name in ("config.json", "hf", "_METADATA")
        ),
    }
    if point not in events:
        latest = rng.uniform(0.1, 1.0) * duration_s
        return lambda: time.monotonic() - start >= latest
    event_times: list[float] = []

    def reached() -> bool:
        try:
            if not event_times and events[point]():
                event_times.append(time.monotonic())
        except OSError:  # a file was renamed meanwhile
            pass
        return bool(event_times) and time.monotonic() - event_times[0] >= delay_s

    return reached


def start_and_kill(bench: KillBench, name: str, out: Path, rng: random.Random) -> bool:
    """Start a command, kill it, and return whether it was still running."""
    partial = out.with_name(f"{out.name}.partial")
    point = rng.choice(KILL_POINTS) if name != TRAIN else KILL_POINTS[0]
    process = start_command(bench.folder, command_line(name, out.name))
    has_reached_point = kill_condition(point, partial, bench.duration_s[name], rng)
    while process.is_alive() and not has_reached_point():
        time.sleep(0.0005)
    process.kill()
    process.join()
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    # Workers end a moment after their parent.
    while (partial / ".prep/lock").exists() and is_locked(partial / ".prep/lock"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{partial} is still locked")
        time.sleep(0.01)
    return process.exitcode == -signal.SIGKILL


def run_again(bench: KillBench, name: str, out: Path, *extra: str) -> tuple[int, str, int]:
    """Run a command to its end, and return exit code, output and written bytes."""
    process = start_command(bench.folder, [*command_line(name, out.name), *extra])
    process.join()
    outputs = [(bench.folder / file).read_text() for file in ("stdout.txt", "stderr.txt")]
    return (
        process.exitcode or 0,
        "\n".join(outputs),
        0 if process.exitcode else _written_nbytes(outputs[0]),
    )


def is_clear_error(output: str) -> bool:
    """Return whether the output of a failed run is an error of prep and not a crash."""
    return "error" in output and "Traceback" not in output and "bug in prep" not in output


def run_case(
    bench: KillBench, name: str, out: Path, rng: random.Random, counts: KillCounts
) -> None:
    """Kill a run, damage its files in a share of the cases, run it again, and compare the output."""
    partial = out.with_name(f"{out.name}.partial")
    while not start_and_kill(bench, name, out, rng):  # the kill came too late
        shutil.rmtree(out, ignore_errors=True)
    counts.kills += 1
    killed_nbytes = data_nbytes(partial)
    damage_target = partial if name != TRAIN else next(out.glob("*.partial"), None)
    damage = (
        damage_file(damage_target, rng)
        if damage_target and damage_target.exists() and rng.random() < DAMAGED_SHARE
        else ""
    )
    counts.damaged += bool(damage)
    code, output, written_nbytes = run_again(bench, name, out)
    if code:
        counts.refused += 1
        has_clear_error, first_output = is_clear_error(output), output[:400]
        code, output, written_nbytes = run_again(bench, name, out, "--restart")
        code = code or not has_clear_error
        log(f"refused: {name}, {damage or 'undamaged'}: {first_output}")
    elif "resuming" in output or name == TRAIN:
        counts.resumed += 1
    if not damage and name != TRAIN:
        counts.redone_nbytes.append(
            max(0, killed_nbytes + written_nbytes - bench.written_nbytes[name])
        )
    if code or not have_same_files(
        compared_folder(out), compared_folder(bench.reference_output(name))
    ):
        counts.wrong += 1
        log(f"WRONG: {name}, {damage or 'undamaged'}, exit {code}\n{output}")
        out.rename(out.with_name(f"wrong-{counts.wrong}-{out.name}")) if out.exists() else None
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)


def kills_per_command(names: Sequence[str], count: int) -> dict[str, int]:
    """Return the number of kills of each command."""
    train_count = max(1, round(count * TRAIN_SHARE)) if TRAIN in names else 0
    conversions = [name for name in names if name != TRAIN]
    counts = (
        {
            name: (count - train_count + position) // len(conversions)
            for position, name in enumerate(conversions)
        }
        if conversions
        else {}
    )
    return counts | ({TRAIN: train_count if conversions else count} if train_count else {})


def kills_text(rows: dict[str, KillCounts]) -> str:
    """Return the table of results."""
    header = (
        "command",
        "kills",
        "damaged",
        "resumed",
        "refused",
        "wrong",
        "redone, mean MiB",
        "most MiB",
    )
    lines = []
    for name, counts in rows.items():
        mean, maximum = (
            sum(counts.redone_nbytes) / max(1, len(counts.redone_nbytes)),
            max(counts.redone_nbytes, default=0),
        )
        numbers = (counts.kills, counts.damaged, counts.resumed, counts.refused, counts.wrong)
        lines.append((name, *numbers, f"{mean / 2**20:.1f}", f"{maximum / 2**20:.1f}"))
    totals = [sum(counts[column] for counts in lines) for column in range(1, 6)]
    return format_table([*lines, ("all", *totals, "", "")], header, right_aligned=header[6:])


def log(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill the requested commands, print the table, and return 1 if an output was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kills", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--work", type=Path, required=True, metavar="FOLDER", help="new folder, deleted at the end"
    )
    parser.add_argument("--count", type=int, default=200, help="default: 200")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--commands", default=",".join(COMMANDS), help="default: all")
    options = parser.parse_args(arguments)
    names = options.commands.split(",")
    if unknown := [name for name in names if name not in COMMANDS]:
        parser.error(f"no command {unknown[0]!r}; there are {', '.join(COMMANDS)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    bench = make_bench(options.work, names)
    rows = {name: KillCounts() for name in names}
    try:
        for name, count in kills_per_command(names, options.count).items():
            for number in range(count):
                rng = random.Random(f"{options.seed} {name} {number}")
                run_case(bench, name, options.work / "out", rng, rows[name])
            log(f"{name}: {rows[name]}")
    finally:
        print(kills_text(rows))
    wrong = sum(row.wrong for row in rows.values())
    if not wrong:
        shutil.rmtree(options.work)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
