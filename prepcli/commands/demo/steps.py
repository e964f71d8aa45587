"""Steps of the demo, and helpers that run the commands a user types."""

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

from prepcli.core.errors import PrepError
from prepcli.core.formatting import format_bytes

# In the demo's folder.
CACHE_FOLDER = ".jax-cache"
POLL_EVERY_S = 0.0005
# The command may end before it is killed.
MAX_KILL_TRIES = 5
# The largest single file of the demo has 20 MB. A write that fails leaves less than that.
MIN_FREE_NBYTES = 32 << 20


class CommandError(PrepError):
    """A command of a step failed. Running it again shows its whole message."""


class FullDiskError(PrepError):
    """A step failed because a disk is full."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a finished step, as printed with `--json`.

    Attributes:
        step: Title of the step.
        command: The command as a user would type it in the demo's folder, empty if there is none.
        seconds: Duration.
        bytes: Bytes written.
        peak: Peak memory in bytes, or 0 if the command does not report it.
        result: Line with the result, or the error.
        ok: Whether the step succeeded.
        hint: Command to type after a failure.
    """

    step: str
    command: str
    seconds: float
    bytes: int
    peak: int
    result: str
    ok: bool
    hint: str = ""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Outcome of a step: a line for the user, the bytes written, and the peak memory."""

    result: str
    nbytes: int
    peak_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class DemoStep:
    """A step of the demo.

    Attributes:
        title: Title for the user.
        args: Arguments of the command, empty if the step runs none.
        run: Called with the demo's folder and `args`. Raises PrepError if the step fails.
        env: Environment variables of the command.
        count_parts: Returns the finished and all parts of a step that takes long, given the demo's folder.
    """

    title: str
    args: tuple[str, ...]
    run: Callable[[Path, Sequence[str]], StepOutcome]
    env: Mapping[str, str] = field(default_factory=dict)
    count_parts: Callable[[Path], tuple[int, int]] | None = None


def run_step(step: DemoStep, folder: Path) -> StepOutcome:
    """Run a step in the demo's folder.

    Raises:
        FullDiskError: The step failed, and the disk of `folder` or of temporary files is full.
        PrepError: The step failed for another reason.
    """
    try:
        return step.run(folder, step.args)
    except (OSError, PrepError) as error:
        # The message of a killed or crashed process may lack the name of the disk that was full.
        for path in (folder, Path(os.environ.get("TMPDIR") or "/tmp")):
            if _is_disk_full(path):
                raise FullDiskError(
                    f"the disk that holds {path} is full",
                    str(error),
                    "free some space, and try again",
                ) from error
        if isinstance(error, OSError):
            what = f"cannot read or write {error.filename or folder}"
            hint = "check the permissions of the folder"
            raise PrepError(what, error.strerror or str(error), hint) from error
        raise


def _is_disk_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < MIN_FREE_NBYTES
    except OSError:
        return False


def prep_argv(args: Sequence[str]) -> list[str]:
    """Return the argument list of a process that runs prep."""
    # -P: the working folder of the demo is not on sys.path.
    return [sys.executable, "-P", "-m", "prepcli", *args, "--json", "--quiet"]


def step_environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a step: no network access, and one cache of compiled programs for all steps.

    Three steps train the same model. With the cache only the first one compiles it.
    """
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str((folder / CACHE_FOLDER).resolve()),
        # By default JAX caches only programs that took more than a second to compile. Those of a tiny model are faster.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    # A cache that the user has set wins. The demo is offline in any case.
    return {**cache, **os.environ, "HF_HUB_OFFLINE": "1", **more}


def run_prep(folder: Path, args: Sequence[str], **variables: str) -> dict[str, Any]:
    """Run a command in `folder` and return its JSON object. CommandError with its message if it fails."""
    process = subprocess.run(
        prep_argv(args),
        cwd=folder,
        env=step_environment(folder, **variables),
        capture_output=True,
        text=True,
    )
    try:
        report = json.loads(process.stdout)
    except ValueError:
        raise CommandError(
            f"prep {args[0]} ended with {process.returncode}", process.stderr.strip()[-200:]
        ) from None
    if process.returncode or not report["ok"]:
        raise CommandError(
            f"prep {args[0]} ended with {process.returncode}",
            report["error"]["what"],
            report["error"]["why"],
        )
    return report


def run_and_kill(
    folder: Path, args: Sequence[str], should_kill: Callable[[], bool], **variables: str
) -> bool:
    """Start a command and kill it with SIGKILL when `should_kill` is true.

    Return False if it ended before.
    """
    process = subprocess.Popen(
        prep_argv(args),
        cwd=folder,
        env=step_environment(folder, **variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None and not should_kill():
            time.sleep(POLL_EVERY_S)
    finally:
        # Also after Ctrl-C and errors of `should_kill`: no process outlives the demo.
        process.kill()
        _, stderr = process.communicate()
    # A negative code is a signal, and 0 means that the command ended before the kill.
    if process.returncode > 0:
        raise CommandError(f"prep {args[0]} ended with {process.returncode}", stderr.strip()[-200:])
    return process.returncode == -signal.SIGKILL


def check(condition: bool, message: str) -> None:
    """Raise PrepError with the message unless the condition holds.

    The message is the whole error: a wrong result of a step has no cause that a user could change.
    """
    if not condition:
        raise PrepError(message)


def retry_note(tries: int) -> str:
    """Return a note for the outcome of a kill if earlier runs ended before they were killed."""
    if tries == 1:
        return ""
    return f" (try {tries}: it was too fast)"


def never_killed_error() -> PrepError:
    """Return the error of a step with runs that all ended before they were killed."""
    why = "this machine is too fast, or too busy to look at the run in time"
    what = f"the run ended {MAX_KILL_TRIES} times before it could be killed"
    return PrepError(what, why, "try again")


def conversion_outcome(report: Mapping[str, Any], result: str) -> StepOutcome:
    """Return the outcome of a conversion from its report. Raise PrepError if it exceeded its memory budget."""
    memory = report["memory"]
    check(memory["peak"] <= memory["budget"], f"it took {format_bytes(memory['peak'])} of memory")
    return StepOutcome(result, report["bytes"]["written"], memory["peak"])


def remove_output(out: Path) -> None:
    """Remove an output, complete or partial."""
    for folder in (out, partial_path(out)):
        shutil.rmtree(folder, ignore_errors=True)
    if out.is_file():
        out.unlink()


def partial_path(out: Path) -> Path:
    """Return the path of an output before it is complete."""
    return out.with_name(out.name + ".partial")


def list_files(folder: Path) -> list[str]:
    """Return the relative paths of all files below a folder, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
