"""Commands that tests kill midway, and checks of the output in the end."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.adapters import make_adapter
from tests.helpers.fork_server import ForkedProcess, run_prep, start_prep
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint
from tests.helpers.training_folder import write_tokenizer
from tests.helpers.waiting import MAX_S

LARGE: dict[str, Any] = {
    "hidden_size": 512,
    "num_layers": 4,
    "num_heads": 8,
    "vocab_size": 12007,
    "attention_types": [[["global"], 4]],
}
CAST = ["save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "8"]
COMMANDS = {
    "pad-vocab": ["pad-vocab", "./model", "--multiple", "8", "--init", "mean"],
    "add-tokens": ["add-tokens", "./model", "--tokens", "tokens.txt"],
    "remove-tokens": ["remove-tokens", "./with-tokens"],
    "save-init": ["save-init", "./model", "--mesh", "1,8,4", "--pad-vocab", "auto"],
    "reshard": ["reshard", "init", "--mesh", "1,4,8"],
    "export": ["export", "init"],
    "cast": [*CAST, "--init", "mean", "--dtype", "bfloat16"],
    "verbatim": ["save-init", "./model", "--verbatim", "--mesh", "1,2,2"],
    "merge": ["merge", "./adapter", "./model"],
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
class UndisturbedRun:
    """A command that ran without kills.

    Attributes:
        out: Its output.
        report: What it prints with `--json`.
        took_s: Its duration.
    """

    out: Path
    report: dict[str, Any]
    took_s: float


@dataclass(frozen=True)
class KillSetup:
    """A model on disk, its init, and undisturbed runs of the commands.

    Attributes:
        folder: Folder of the model and the init.
        runs: The undisturbed runs so far, by command.
    """

    folder: Path
    runs: dict[str, UndisturbedRun] = field(default_factory=dict)

    def undisturbed(self, name: str) -> UndisturbedRun:
        """Return the undisturbed run of a command; the first call runs the command."""
        if name not in self.runs:
            started_s = time.monotonic()
            process = run_command(self, name, f"{name}-whole", "--json")
            assert process.returncode == 0, process.stderr
            took_s = time.monotonic() - started_s
            self.runs[name] = UndisturbedRun(
                self.folder / f"{name}-whole", json.loads(process.stdout), took_s
            )
        return self.runs[name]

    def expected_files(self, name: str) -> dict[str, bytes]:
        """Return the bytes of all files of a command's output, by relative path."""
        return read_files(self.undisturbed(name).out)


def command_words(name: str, out: str, *more: str) -> list[str]:
    """Return the arguments of prep that run the command."""
    return [*COMMANDS[name], "--out", out, "--memory", "32MiB", "--progress", "none", *more]


def make_setup(folder: Path) -> KillSetup:
    """Make a setup in an empty folder."""
    make_checkpoint(folder / "model", GPT_NEO, **LARGE)
    write_tokenizer(folder / "model", [f"w{number}" for number in range(LARGE["vocab_size"])])
    (folder / "tokens.txt").write_text("<tool>\nw1 w2\n")
    layers = range(LARGE["num_layers"])
    make_adapter(folder / "adapter", {f"transformer.h.{n}.mlp.c_fc": (2048, 512) for n in layers})
    assert (
        run_prep("save-init", "./model", "--out", "init", "--pad-vocab", "8", cwd=folder).returncode
        == 0
    )
    words = ("add-tokens", "./model", "--tokens", "tokens.txt", "--out", "with-tokens")
    assert run_prep(*words, cwd=folder).returncode == 0
    return KillSetup(folder)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder, by relative path."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def start_command(setup: KillSetup, name: str, out: str, *more: str) -> ForkedProcess:
    """Start a command."""
    return start_prep(*command_words(name, out, *more), cwd=setup.folder)


def run_command(
    setup: KillSetup, name: str, out: str, *more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command, and return its exit code and output."""
    return run_prep(*command_words(name, out, *more), cwd=setup.folder)


def run_and_kill(
    setup: KillSetup, name: str, out: str, launch: Sequence[Sequence[str]], rng: random.Random
) -> list[int]:
    """Run the processes of a launch, kill each at a random moment, and return their exit codes."""
    took_s = setup.undisturbed(name).took_s
    latest_s = max(1.5 * took_s, took_s + 0.5 * (len(launch) - 1))
    moments = sorted((rng.uniform(0.2, 1.0) * latest_s, index) for index in range(len(launch)))
    started_s = time.monotonic()
    processes = [start_command(setup, name, out, *more) for more in launch]
    for moment_s, index in moments:
        time.sleep(max(0.0, started_s + moment_s - time.monotonic()))
        processes[index].kill()
    for process in processes:
        process.communicate(timeout=MAX_S)
    return [process.wait() for process in processes]


def check_killed(
    setup: KillSetup, name: str, kills: int, seed: int, launches: Sequence[Sequence[Sequence[str]]]
) -> None:
    """Kill runs repeatedly, then let one end. Every file equals that of the undisturbed run; the source is unchanged.

    A launch is a list of additional arguments for each process; each run uses one of `launches`.
    """
    rng = random.Random(seed)
    source = read_files(setup.folder / COMMANDS[name][1])
    out = setup.folder / f"{name}-{seed}"
    for _ in range(kills):
        codes = run_and_kill(setup, name, out.name, rng.choice(launches), rng)
        assert set(codes) <= {0, -signal.SIGKILL}
        assert out.exists() <= (
            published_names(out) == published_names(setup.undisturbed(name).out)
        )
        if out.exists():
            break
    processes = [start_command(setup, name, out.name, *more) for more in rng.choice(launches)]
    for process in processes:
        _, err = process.communicate(timeout=MAX_S)
        assert process.returncode == 0, err.decode()
    assert read_files(out) == setup.expected_files(name)
    assert not out.with_name(out.name + ".partial").exists()
    assert read_files(setup.folder / COMMANDS[name][1]) == source
    shutil.rmtree(out)


def published_names(folder: Path) -> set[str]:
    """Return the files of a published output without `.prep`, a leftover of kills after the rename."""
    return {
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and ".prep" not in p.parts
    }


def num_durable(partial: Path) -> int:
    """Return the number of parts of an unfinished output that are noted as durable."""
    return len([*partial.glob(".prep/done/*")])


def act_when_durable(
    setup: KillSetup, name: str, out: str, act: Callable[[ForkedProcess], None], *more: str
) -> ForkedProcess:
    """Run a command, and call `act` as soon as some of its bytes are durable."""
    process = start_command(setup, name, out, *more)
    while process.poll() is None:
        if num_durable(setup.folder / f"{out}.partial"):
            act(process)
            break
        time.sleep(0.001)
    return process
