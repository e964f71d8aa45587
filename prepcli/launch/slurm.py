"""The batch script that trains under SLURM with one process per node. The functions do no I/O."""

from __future__ import annotations

import math
import re

from prepcli.errors import Option, text
from prepcli.launch.job import LaunchJob, check_text
from prepcli.launch.options import SlurmOptions
from prepcli.launch.shell import RESTARTABLE, command_line, comment, environment_lines, script

# Minimum time for the remaining tasks to end after the first one.
MIN_WAIT_S = 300
# Added to the heartbeat's time-out. After the time-out, the tasks know that another task is lost.
HEARTBEAT_MARGIN_S = 240

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def slurm_script(
    job: LaunchJob, options: SlurmOptions, *, heartbeat_timeout_s: float = 60.0
) -> str:
    """Return the batch script of a job.

    `--signal` without `B:` signals the tasks of `srun`, not the batch shell: every process saves the same step and
    exits with 75, and the script requeues the job.

    Args:
        job: The training.
        options: Options of the job.
        heartbeat_timeout_s: Seconds until the processes notice a lost one.
    """
    _check_options(options)
    return script(
        [
            "#!/bin/bash",
            comment(f"Trains {job.recipe} with one process per node. Submit with `sbatch`."),
            *(f"#SBATCH {directive}" for directive in _sbatch_directives(job, options)),
            "",
            "set -e",
            *(command_line(["module", "load", module]) for module in options["module"]),
            *environment_lines(job),
            "",
            # `set -e` would end the script at a failed srun, before the requeue.
            "code=0",
            f"{_srun_command(options, heartbeat_timeout_s)} {command_line(job.command)} || code=$?",
            "",
            "# 75: stopped before the time limit, or a process was lost. 131 to 159: a signal killed a process.",
            "case $code in",
            f"    {RESTARTABLE})",
            f'        if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_restarts} ]; then',
            '            scontrol requeue "$SLURM_JOB_ID"',
            "        fi ;;",
            "esac",
            'exit "$code"',
        ]
    )


def _sbatch_directives(job: LaunchJob, options: SlurmOptions) -> list[str]:
    """Return the options of sbatch."""
    devices = options["devices_per_node"]
    values = {
        "job-name": job.name,
        "nodes": str(options["nodes"]),
        "ntasks-per-node": "1",
        "gres": f"gpu:{devices}" if devices else None,
        "cpus-per-task": str(options["cpus"]) if options["cpus"] else None,
        "mem": options["mem"],
        "time": options["time"],
        "partition": options["partition"],
        "account": options["account"],
        # `%` and `/` of the job's name would be a pattern of sbatch and a folder.
        "output": options["log"] or f"{job.name.replace('%', '%%').replace('/', '-')}-%j.log",
        # A requeued job continues its log.
        "open-mode": "append",
        "signal": f"USR1@{options['grace']}",
    }
    given = [
        f"--{name}={_quote_value(value)}" for name, value in values.items() if value is not None
    ]
    return [*given, "--requeue", *options["sbatch"]]


def _srun_command(options: SlurmOptions, heartbeat_timeout_s: float) -> str:
    """Return `srun` with options.

    `srun` ignores the `--cpus-per-task` of the job since SLURM 22.05. The end of the first task must not kill the
    remaining ones while they save.
    """
    cpus = f" --cpus-per-task={options['cpus']}" if options["cpus"] else ""
    # With the default heartbeat of 60 s: max(300, 60 + 240) = 300 s.
    wait_s = max(MIN_WAIT_S, math.ceil(heartbeat_timeout_s + HEARTBEAT_MARGIN_S))
    return f"srun --label --kill-on-bad-exit=0 --wait={wait_s}{cpus}"


def _quote_value(value: str) -> str:
    r"""Return a value as `sbatch` reads it from a directive: quotes keep spaces, and `\` escapes also inside them."""
    if _PLAIN.fullmatch(value):
        return value
    return (
        '"'
        + "".join(
            char if char in " \t" or _PLAIN.fullmatch(char) else f"\\{char}" for char in value
        )
        + '"'
    )


def _check_options(options: SlurmOptions) -> None:
    values = {
        "mem": options["mem"],
        "time": options["time"],
        "partition": options["partition"],
        "account": options["account"],
        "log": options["log"],
    }
    for name, value in values.items():
        if value is not None:
            check_text(text("{}", Option(name)), value)
    for module in options["module"]:
        check_text(text("{}", Option("module")), module)
    for directive in options["sbatch"]:
        check_text(text("{}", Option("sbatch")), directive)
