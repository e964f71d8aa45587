"""Submit the script of a job with the program of its engine."""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prepcli.core.errors import FAILED, Option, PrepError, text

# Commands that read the script from stdin.
STDIN_COMMANDS = {
    # `--parsable` prints the job id without a sentence around it.
    "slurm": ("sbatch", "--parsable"),
    "tpu": ("bash", "-s"),
    "gke": ("kubectl", "create", "-f", "-"),
}
# `sky` reads its file several times, so it cannot be a pipe. `--async` ends it when the job is accepted.
SKY_COMMAND = ("sky", "jobs", "launch", "--yes", "--async")
NOT_SUBMITTED = "the job was not submitted"
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
        program = _ray_program(f"$(base64 < {file} | tr -d '\\n')")
        return f'{shlex.join(RAY_COMMAND)} "{program}"'
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
        program = _ray_program(base64.b64encode(os.fsencode(script)).decode())
        return _run([*RAY_COMMAND, program], name=shlex.join(RAY_COMMAND))
    # The script of a TPU waits for the command.
    failure = "the job failed" if target == "tpu" else NOT_SUBMITTED
    return _run(STDIN_COMMANDS[target], stdin=script, failure=failure)


def _ray_program(encoded: str) -> str:
    """Return the Python program to run a driver in base64.

    Ray passes the words of a job through a shell. Ray 2.50 quotes them with the rules of Windows, and the shell would
    expand `$` and backticks in the driver. The program has no such characters. Ray quotes it because it has spaces.
    """
    return f"import base64; exec(base64.b64decode('{encoded}'))"


def _run(
    command: Sequence[str], *, stdin: str = "", name: str = "", failure: str = NOT_SUBMITTED
) -> str:
    """Run a command and return its stdout.

    Args:
        command: Words of the command.
        stdin: Text of its stdin.
        name: The command in an error. Default: all words.
        failure: First line of the error if the command fails.
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
        raise PrepError(NOT_SUBMITTED, why, hint) from None
    except OSError as error:
        # E.g. a driver of more than 128 KiB, the limit of Linux for one word.
        why = f"`{name or command[0]}`: {error.strerror}"
        raise PrepError(NOT_SUBMITTED, why, text("{}", Option("out", "FILE"))) from None
    if result.returncode:
        why = f"`{name or shlex.join(command)}` exited with {result.returncode}"
        raise PrepError(failure, why, "its message is above", FAILED)
    return result.stdout.strip()
