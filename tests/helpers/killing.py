"""Commands that are killed midway, and what has to come of them in the end: for the tests."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint

LARGE = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 12007, "attention_types": [[["global"], 4]]}
COMMANDS = {
    "pad-vocab": ["pad-vocab", "./model", "--multiple", "8", "--init", "mean"],
    "save-init": ["save-init", "./model", "--mesh", "1,8,4", "--pad-vocab", "auto"],
    "reshard": ["reshard", "init", "--mesh", "1,4,8"],
    "export": ["export", "init"],
    "cast": ["save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "8", "--init", "mean", "--dtype", "bfloat16"],
    "compress": ["reshard", "init", "--mesh", "1,2,2", "--compress", "zstd"],
}
ONE_PROCESS: tuple[tuple[tuple[str, ...], ...], ...] = (((),),)
SEVERAL_PROCESSES: tuple[tuple[tuple[str, ...], ...], ...] = (
    ((),),
    (("--workers", "2", "--memory", "160MiB"),),
    (("--processes", "2/0"), ("--processes", "2/1")),
    (("--processes", "3/0"), ("--processes", "3/1"), ("--processes", "3/2")),
)


@dataclass(frozen=True)
class KillSetup:
    """A model on disk, its init, and for each command an unbroken output and the seconds that it took."""

    folder: Path
    expected: dict[str, Path]
    took_s: dict[str, float]


def command_line(name: str, out: str, *more: str) -> list[str]:
    words = [*COMMANDS[name], "--out", out, "--memory", "32MiB", "--progress", "none", *more]
    return [sys.executable, "-m", "prepcli", *words]


def make_setup(folder: Path) -> KillSetup:
    """A bench in an empty folder."""
    make_checkpoint(folder / "model", GPT_NEO, **LARGE)
    subprocess.run([sys.executable, "-m", "prepcli", "save-init", "./model", "--out", "init", "--pad-vocab", "8"],
                   cwd=folder, check=True, capture_output=True)  # fmt: skip
    whole, took_s = {}, {}
    for name in COMMANDS:
        began = time.monotonic()
        subprocess.run(command_line(name, f"{name}-whole"), cwd=folder, check=True, capture_output=True)
        took_s[name] = time.monotonic() - began
        whole[name] = folder / f"{name}-whole"
    return KillSetup(folder, whole, took_s)


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def start_command(bench: KillSetup, name: str, out: str, *more: str) -> subprocess.Popen[bytes]:
    """Begin a command."""
    return subprocess.Popen(
        command_line(name, out, *more), cwd=bench.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run_and_kill(
    bench: KillSetup, name: str, out: str, launch: Sequence[Sequence[str]], draw: random.Random
) -> list[int]:
    """Run the processes of a way and kill each at some moment; their exit codes."""
    latest_s = max(1.5 * bench.took_s[name], bench.took_s[name] + 0.5 * (len(launch) - 1))
    moments = sorted((draw.uniform(0.2, 1.0) * latest_s, at) for at in range(len(launch)))
    began, processes = time.monotonic(), [start_command(bench, name, out, *more) for more in launch]
    for moment_s, at in moments:
        time.sleep(max(0.0, began + moment_s - time.monotonic()))
        processes[at].kill()
    for process in processes:
        process.communicate(timeout=60)
    return [process.returncode for process in processes]


def check_killed(
    bench: KillSetup, name: str, kills: int, seed: int, launches: Sequence[Sequence[Sequence[str]]]
) -> None:
    """Kill runs over and over, then let one end: every file as in the unbroken run, the source as before.

    A way: further words of the command line for each process that takes part. Each run goes one of the ways.
    """
    draw = random.Random(seed)
    source = read_files(bench.folder / COMMANDS[name][1])
    out = bench.folder / f"{name}-{seed}"
    for _ in range(kills):
        codes = run_and_kill(bench, name, out.name, draw.choice(launches), draw)
        assert set(codes) <= {0, -signal.SIGKILL}
        assert out.exists() <= (published_names(out) == published_names(bench.expected[name]))
        if out.exists():
            break
    last = [start_command(bench, name, out.name, *more) for more in draw.choice(launches)]
    for process in last:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
    assert read_files(out) == read_files(bench.expected[name])
    assert not out.with_name(out.name + ".partial").exists()
    assert read_files(bench.folder / COMMANDS[name][1]) == source
    shutil.rmtree(out)


def published_names(folder: Path) -> set[str]:
    """The files of a published output; `.prep` may still lie there when a kill came right after the rename."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and ".prep" not in p.parts}


def act_when_durable(
    bench: KillSetup, name: str, out: str, act: Callable[[subprocess.Popen[bytes]], None], *more: str
) -> subprocess.Popen[bytes]:
    """Run a command and act as soon as the journal of process 0 says that something is durable."""
    process = start_command(bench, name, out, *more)
    journal = bench.folder / f"{out}.partial" / ".prep" / "journal.0"
    while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > 3:
            act(process)
            break
        time.sleep(0.001)
    return process
