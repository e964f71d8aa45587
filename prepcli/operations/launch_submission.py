"""Submit the script of a job with the program of its engine."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prepcli.errors import FAILED, Option, PrepError, text

# Commands that read the script from stdin.
STDIN_COMMANDS = {
    # `--parsable` prints the job id without a sentence around it.
    "slurm": ("sbatch", "--parsable"),
    "tpu": ("bash", "-s"),
    "gke": ("kubectl", "create", "-f", "-"),
}
# `sky` reads its file several times, so it cannot be a pipe. `--async` ends it when the job is accepted.
SKY_COMMAND = ("sky", "jobs", "launch", "--yes", "--async")
# The driver is a word of its own command, so that no file has to reach the cluster.
RAY_COMMAND = ("ray", "job", "submit", "--no-wait", "--log-color", "false", "--", "python", "-c")


def submit_line(target: str, path: Path) -> str:
    """Return the shell command to submit the script in a file.

    >>> submit_line("slurm", Path("job.sh"))
    'sbatch --parsable < job.sh'
    >>> submit_line("sky", Path("job.yaml"))
    'sky jobs launch --yes --async job.yaml'
    """
    file = shlex.quote(str(path))
    if target == "sky":
        return f"{shlex.join(SKY_COMMAND)} {file}"
    if target == "ray":
        return f'{shlex.join(RAY_COMMAND)} "$(cat {file})"'
    return f"{shlex.join(STDIN_COMMANDS[target])} < {file}"


def submit_script(target: str, script: str) -> str:
    """Submit a script and return the reply of the engine.

    Raises:
        PrepError: The program of the engine is not installed, or it failed.
    """
    if target == "sky":
        with tempfile.TemporaryDirectory(prefix="prep-") as folder:
            path = Path(folder) / "job.yaml"
            path.write_bytes(os.fsencode(script))
            return _run([*SKY_COMMAND, str(path)])
    if target == "ray":
        return _run([*RAY_COMMAND, script], name=shlex.join(RAY_COMMAND))
    return _run(STDIN_COMMANDS[target], stdin=script)


def _run(command: Sequence[str], *, stdin: str = "", name: str = "") -> str:
    """Run a command and return its stdout.

    Args:
        command: Words of the command.
        stdin: Text of its stdin.
        name: The command in an error. Default: all words.
    """
    try:
        result = subprocess.run(
            command,
            input=stdin,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except FileNotFoundError:
        why = f"`{command[0]}` is not installed on this machine"
        hint = text("{}, and submit it on a login node", Option("out", "FILE"))
        raise PrepError("the job was not submitted", why, hint) from None
    if result.returncode:
        why = f"`{name or shlex.join(command)}` exited with {result.returncode}"
        raise PrepError("the job was not submitted", why, "its message is above", FAILED)
    return result.stdout.strip()
