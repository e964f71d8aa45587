"""What a step of the demo is, and how it runs the commands that a user types."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prepcli.console.formatting import format_bytes
from prepcli.errors import PrepError

POLL_EVERY_S = 0.0005


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step as it went; `command` as a user would type it, in the demo's folder."""

    step: str
    command: str
    seconds: float
    bytes: int
    peak: int  # bytes of memory, 0 where no command told
    result: str
    ok: bool


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step came to: a line, and bytes that were written and taken at most."""

    result: str
    nbytes: int
    peak_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class DemoStep:
    """A step to be done: `work` is given the demo's folder and the words of the command; PrepError if it goes wrong.

    `variables`: those of the environment that the command line begins with.
    """

    title: str
    args: tuple[str, ...]
    run: Callable[[Path, Sequence[str]], StepOutcome]
    env: Mapping[str, str] = field(default_factory=dict)


def prep_argv(args: Sequence[str]) -> list[str]:
    """The command as a process."""
    return [sys.executable, "-P", "-m", "prepcli", *args, "--json", "--quiet"]


def offline_environment(**more: str) -> dict[str, str]:
    """Nothing here needs the network, so nothing may use it."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", **more}


def run_prep(folder: Path, args: Sequence[str], **variables: str) -> dict[str, Any]:
    """Run a command in `folder`; its JSON object. PrepError with its message if it fails."""
    done = subprocess.run(
        prep_argv(args), cwd=folder, env=offline_environment(**variables), capture_output=True, text=True
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise PrepError(f"prep {args[0]} ended with {done.returncode}", done.stderr.strip()[-200:]) from None
    if done.returncode or not found["ok"]:
        raise PrepError(f"prep {args[0]} ended with {done.returncode}", found["error"]["what"], found["error"]["why"])
    return found


def run_and_kill(folder: Path, args: Sequence[str], should_kill: Callable[[], bool], **variables: str) -> bool:
    """Start a command and kill it, by a real SIGKILL, when it is time; False if it was over before."""
    process = subprocess.Popen(
        prep_argv(args),
        cwd=folder,
        env=offline_environment(**variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None and not should_kill():
            time.sleep(POLL_EVERY_S)
    finally:
        process.kill()
        _, told = process.communicate()
    if process.returncode > 0:
        raise PrepError(f"prep {args[0]} ended with {process.returncode}", told.strip()[-200:])
    return process.returncode == -signal.SIGKILL


def check(condition: bool, message: str) -> None:
    """PrepError unless something is as it should be."""
    if not condition:
        raise PrepError(message)


def conversion_outcome(report: Mapping[str, Any], result: str) -> StepOutcome:
    """What a conversion did; PrepError if it took more memory than it was given."""
    memory = report["memory"]
    check(memory["peak"] <= memory["budget"], f"it took {format_bytes(memory['peak'])} of memory")
    return StepOutcome(result, report["bytes"]["written"], memory["peak"])


def remove_output(out: Path) -> None:
    """Remove an output, whole or not."""
    for folder in (out, partial_path(out)):
        shutil.rmtree(folder, ignore_errors=True)
    if out.is_file():
        out.unlink()


def partial_path(out: Path) -> Path:
    """An output until it is whole."""
    return out.with_name(out.name + ".partial")


def list_files(folder: Path) -> list[str]:
    """Every file below a folder, by its path there."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
