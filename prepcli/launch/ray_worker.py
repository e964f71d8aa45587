"""Run a command of `prep` in a worker of Ray. Only the driver of `prep launch ray` imports Ray itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prepcli.core.errors import FAILED, OK, STOPPED
from prepcli.core.launchers import PARENT_VARIABLE
from prepcli.launch.local import free_port

# First version with `JaxTrainer`.
MIN_VERSION = (2, 50)
# Signals after which the command resumes. SIGHUP and SIGINT are absent: a user ends the job with them.
SIGNALS = range(3, 32)


class RestartError(Exception):
    """A process was stopped or killed, and the same command resumes."""


def check_ray_version(version: str) -> None:
    """End the driver with one message if Ray, of version `ray.__version__`, is too old."""
    numbers = tuple(int(number) for number in version.split(".")[:2])
    if numbers < MIN_VERSION:
        minimum = ".".join(map(str, MIN_VERSION))
        sys.exit(
            f"error: Ray {version} is not supported: JaxTrainer is part of Ray {minimum}\n"
            f" hint: pip install 'ray[train]>={minimum}'"
        )


def coordinator_address(host: str) -> str:
    """Return an address for process 0 with a free port of this host."""
    return f"{host}:{free_port()}"


class ExitCode:
    """Actor with the exit code of a job: the first failure of a process, apart from 75 and kills."""

    def __init__(self) -> None:
        self.code = OK

    def record(self, code: int) -> None:
        """Record the exit code of a process."""
        self.code = self.code or code

    def get(self) -> int:
        """Return the recorded code."""
        return self.code


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCommand:
    """A command of `prep` for the workers of a job, with a process in each.

    The process has a main thread, so it handles signals as on the command line.

    Attributes:
        name: Name of the command.
        recipe_name: File name of its recipe, or empty.
        recipe_text: Text of the recipe.
        arguments: Words after the name, or after the recipe.
        folder: Working folder. None: the one of the worker.
        env: Environment variables.
    """

    name: str
    recipe_name: str = ""
    recipe_text: str = ""
    arguments: tuple[str, ...] = ()
    folder: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def run_together(self, index: int, count: int, address: str) -> int:
        """Run process `index` of `count` of a job, connected to the address of process 0, and return its exit code.

        Raises:
            RestartError: The process was stopped or killed.
        """
        place = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
        }
        return self._run([], place)

    def run_share(self, index: int, count: int) -> int:
        """Write share `index` of `count` of the output, and return the exit code. With one share it is the whole work.

        Raises:
            RestartError: The process was stopped or killed.
        """
        options = ["--processes", f"{count}/{index}"] if count > 1 else []
        return self._run(options, {})

    def _run(self, options: Sequence[str], place: Mapping[str, str]) -> int:
        """Run the command with more options, and with the variables of its place in a job."""
        if self.folder is not None and not Path(self.folder).is_dir():
            # An exception would restart the job, at most `--max-restarts` times.
            print(f"error: `{self.folder}` is no folder on {socket.gethostname()}", file=sys.stderr)
            return FAILED
        words = [self.name, *options]
        with tempfile.TemporaryDirectory(prefix="prep-") as folder:
            if self.recipe_name:
                recipe = Path(folder) / self.recipe_name
                recipe.write_text(self.recipe_text, "utf-8")
                words.append(str(recipe))
            # The process ends with this worker, also after a SIGKILL: see `die_with_parent`.
            env = {**os.environ, **self.env, **place, PARENT_VARIABLE: str(os.getpid())}
            command = [sys.executable, "-m", "prepcli", *words, *self.arguments]
            code = subprocess.run(command, cwd=self.folder, env=env, check=False).returncode
        if code == STOPPED or -code in SIGNALS:
            raise RestartError(f"`prep {self.name}` ended with {code}, and resumes")
        # Killed by SIGHUP or SIGINT: -2 -> 130, as a shell reports it. A negative code would be less than 0 in `max`.
        return code if code >= 0 else 128 - code
