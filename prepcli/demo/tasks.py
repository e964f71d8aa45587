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

from prepcli.console.formatting import bytes_text
from prepcli.errors import PrepError

LOOK_EVERY_S = 0.0005


@dataclass(frozen=True, slots=True)
class Step:
    """A step as it went; `command` as a user would type it, in the demo's folder."""

    step: str
    command: str
    seconds: float
    bytes: int
    peak: int  # bytes of memory, 0 where no command told
    result: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step came to: a line, and bytes that were written and taken at most."""

    result: str
    nbytes: int
    peak_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """A step to be done: `work` is given the demo's folder and the words of the command; PrepError if it goes wrong.

    `variables`: those of the environment that the command line begins with.
    """

    title: str
    words: tuple[str, ...]
    work: Callable[[Path, Sequence[str]], Outcome]
    variables: Mapping[str, str] = field(default_factory=dict)


def argv(words: Sequence[str]) -> list[str]:
    """The command as a process."""
    return [sys.executable, "-P", "-m", "prepcli", *words, "--json", "--quiet"]


def environment(**more: str) -> dict[str, str]:
    """Nothing here needs the network, so nothing may use it."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", **more}


def prep(folder: Path, words: Sequence[str], **variables: str) -> dict[str, Any]:
    """Run a command in `folder`; its JSON object. PrepError with its message if it fails."""
    done = subprocess.run(argv(words), cwd=folder, env=environment(**variables), capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise PrepError(f"prep {words[0]} ended with {done.returncode}", done.stderr.strip()[-200:]) from None
    if done.returncode or not found["ok"]:
        raise PrepError(f"prep {words[0]} ended with {done.returncode}", found["error"]["what"], found["error"]["why"])
    return found


def killed(folder: Path, words: Sequence[str], is_time: Callable[[], bool], **variables: str) -> bool:
    """Start a command and kill it, by a real SIGKILL, when it is time; False if it was over before."""
    process = subprocess.Popen(
        argv(words),
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None and not is_time():
            time.sleep(LOOK_EVERY_S)
    finally:
        process.kill()
        _, told = process.communicate()
    if process.returncode > 0:
        raise PrepError(f"prep {words[0]} ended with {process.returncode}", told.strip()[-200:])
    return process.returncode == -signal.SIGKILL


def check(is_so: bool, otherwise: str) -> None:
    """PrepError unless something is as it should be."""
    if not is_so:
        raise PrepError(otherwise)


def converted(found: Mapping[str, Any], result: str) -> Outcome:
    """What a conversion did; PrepError if it took more memory than it was given."""
    memory = found["memory"]
    check(memory["peak"] <= memory["budget"], f"it took {bytes_text(memory['peak'])} of memory")
    return Outcome(result, found["bytes"]["written"], memory["peak"])


def remove(made: Path) -> None:
    """Remove an output, whole or not."""
    for folder in (made, partial(made)):
        shutil.rmtree(folder, ignore_errors=True)
    if made.is_file():
        made.unlink()


def partial(out: Path) -> Path:
    """An output until it is whole."""
    return out.with_name(out.name + ".partial")


def files_of(folder: Path) -> list[str]:
    """Every file below a folder, by its path there."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
