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

from tests.helpers.models import GPT_NEO, make

LARGE = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 12007, "attention_types": [[["global"], 4]]}
COMMANDS = {
    "pad-vocab": ["pad-vocab", "./model", "--multiple", "8", "--init", "mean"],
    "save-init": ["save-init", "./model", "--mesh", "1,8,4", "--pad-vocab", "auto"],
    "reshard": ["reshard", "init", "--mesh", "1,4,8"],
    "export": ["export", "init"],
    "cast": ["save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "8", "--init", "mean", "--dtype", "bfloat16"],
    "compress": ["reshard", "init", "--mesh", "1,2,2", "--compress", "zstd"],
}
ALONE: tuple[tuple[tuple[str, ...], ...], ...] = (((),),)
TOGETHER: tuple[tuple[tuple[str, ...], ...], ...] = (
    ((),),
    (("--workers", "2", "--memory", "160MiB"),),
    (("--processes", "2/0"), ("--processes", "2/1")),
    (("--processes", "3/0"), ("--processes", "3/1"), ("--processes", "3/2")),
)


@dataclass(frozen=True)
class Bench:
    """A model on disk, its init, and for each command an unbroken output and the seconds that it took."""

    folder: Path
    whole: dict[str, Path]
    took_s: dict[str, float]


def command(name: str, out: str, *more: str) -> list[str]:
    words = [*COMMANDS[name], "--out", out, "--memory", "32MiB", "--progress", "none", *more]
    return [sys.executable, "-m", "prepcli", *words]


def make_bench(folder: Path) -> Bench:
    """A bench in an empty folder."""
    make(folder / "model", GPT_NEO, **LARGE)
    subprocess.run([sys.executable, "-m", "prepcli", "save-init", "./model", "--out", "init", "--pad-vocab", "8"],
                   cwd=folder, check=True, capture_output=True)  # fmt: skip
    whole, took_s = {}, {}
    for name in COMMANDS:
        began = time.monotonic()
        subprocess.run(command(name, f"{name}-whole"), cwd=folder, check=True, capture_output=True)
        took_s[name] = time.monotonic() - began
        whole[name] = folder / f"{name}-whole"
    return Bench(folder, whole, took_s)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def start(bench: Bench, name: str, out: str, *more: str) -> subprocess.Popen[bytes]:
    """Begin a command."""
    return subprocess.Popen(command(name, out, *more), cwd=bench.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def killed(bench: Bench, name: str, out: str, way: Sequence[Sequence[str]], draw: random.Random) -> list[int]:
    """Run the processes of a way and kill each at some moment; their exit codes."""
    latest_s = max(1.5 * bench.took_s[name], bench.took_s[name] + 0.5 * (len(way) - 1))
    moments = sorted((draw.uniform(0.2, 1.0) * latest_s, at) for at in range(len(way)))
    began, processes = time.monotonic(), [start(bench, name, out, *more) for more in way]
    for moment_s, at in moments:
        time.sleep(max(0.0, began + moment_s - time.monotonic()))
        processes[at].kill()
    for process in processes:
        process.communicate(timeout=60)
    return [process.returncode for process in processes]


def check_killed(bench: Bench, name: str, kills: int, seed: int, ways: Sequence[Sequence[Sequence[str]]]) -> None:
    """Kill runs over and over, then let one end: every file as in the unbroken run, the source as before.

    A way: further words of the command line for each process that takes part. Each run goes one of the ways.
    """
    draw = random.Random(seed)
    source = content(bench.folder / COMMANDS[name][1])
    out = bench.folder / f"{name}-{seed}"
    for _ in range(kills):
        codes = killed(bench, name, out.name, draw.choice(ways), draw)
        assert set(codes) <= {0, -signal.SIGKILL}
        assert out.exists() <= (content_names(out) == content_names(bench.whole[name]))
        if out.exists():
            break
    last = [start(bench, name, out.name, *more) for more in draw.choice(ways)]
    for process in last:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
    assert content(out) == content(bench.whole[name])
    assert not out.with_name(out.name + ".partial").exists()
    assert content(bench.folder / COMMANDS[name][1]) == source
    shutil.rmtree(out)


def content_names(folder: Path) -> set[str]:
    """The files of a published output; `.prep` may still lie there when a kill came right after the rename."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and ".prep" not in p.parts}


def when_durable(
    bench: Bench, name: str, out: str, then: Callable[[subprocess.Popen[bytes]], None], *more: str
) -> subprocess.Popen[bytes]:
    """Run a command and act as soon as the journal of process 0 says that something is durable."""
    process = start(bench, name, out, *more)
    journal = bench.folder / f"{out}.partial" / ".prep" / "journal.0"
    while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > 3:
            then(process)
            break
        time.sleep(0.001)
    return process
