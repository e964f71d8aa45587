"""The batch script of a command under SLURM: one process per node, or one array task per share.

The functions do no I/O.
"""

from __future__ import annotations

import math
import re

from prepcli.core.errors import Option, text, usage_error
from prepcli.launch.command import check_text
from prepcli.launch.job import LaunchJob
from prepcli.launch.options import SlurmOptions
from prepcli.launch.shell import RESTARTABLE, command_line, comment, environment_lines, script

# Minimum time for the remaining tasks to end after the first one.
MIN_WAIT_S = 300
# Added to the heartbeat's time-out. After the time-out, the tasks know that another task is lost.
HEARTBEAT_MARGIN_S = 240

_TIME_LIMIT = re.compile(r"([0-9]{1,6}-)?[0-9]{1,6}(:[0-9]{1,6}){0,2}")
# Texts of sbatch for a job without a limit.
_NO_LIMIT = ("UNLIMITED", "INFINITE", "-1")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def slurm_script(
    job: LaunchJob, options: SlurmOptions, *, heartbeat_timeout_s: float = 60.0
) -> str:
    """Return the batch script of a job.

    `--signal` without `B:` signals the tasks of `srun`, not the batch shell: every process saves and exits with 75, and
    the script requeues the job.

    Args:
        job: The job.
        options: Options of the job.
        heartbeat_timeout_s: Seconds until the processes notice a lost one.
    """
    _check_options(job, options)
    srun = f"{_srun_command(options, heartbeat_timeout_s)} {_task_command(job, options)}"
    return script(
        [
            "#!/bin/bash",
            comment(f"Runs `{job.command.title}` {_processes(options)}. Submit with `sbatch`."),
            *(f"#SBATCH {directive}" for directive in _sbatch_directives(job, options)),
            "",
            "set -e",
            *(command_line(["module", "load", module]) for module in options["module"]),
            *environment_lines(job),
            "",
            # `set -e` would end the script at a failed srun, before the requeue.
            "code=0",
            f"{srun} || code=$?",
            "",
            "# 75: stopped before the time limit, or a process was lost. 131 to 159: a signal killed a process.",
            "case $code in",
            f"    {RESTARTABLE})",
            f'        if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_restarts} ]; then',
            f"            scontrol requeue {_job_id(options)}",
            "        fi ;;",
            "esac",
            'exit "$code"',
        ]
    )


def _processes(options: SlurmOptions) -> str:
    return "with one array task per share" if options["array"] else "with one process per node"


def _task_command(job: LaunchJob, options: SlurmOptions) -> str:
    """Return the command of a task. An array task writes the share of its index."""
    name, *words = job.command.words
    if options["array"] is None:
        return command_line(["prep", name, *words])
    share = f'--processes {options["array"]}/"$SLURM_ARRAY_TASK_ID"'
    return f"prep {name} {share} {command_line(words)}"


def _job_id(options: SlurmOptions) -> str:
    """Return the number of the job to requeue.

    One task of an array has the number of the whole array as its SLURM_JOB_ID, and with it all tasks would be requeued.
    """
    if options["array"] is None:
        return '"$SLURM_JOB_ID"'
    return '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'


def _sbatch_directives(job: LaunchJob, options: SlurmOptions) -> list[str]:
    """Return the options of sbatch."""
    devices = options["devices_per_node"]
    values = {
        "job-name": job.name,
        "nodes": str(options["nodes"]),
        "ntasks-per-node": "1",
        "array": f"0-{options['array'] - 1}" if options["array"] else None,
        "gres": f"gpu:{devices}" if devices else None,
        "cpus-per-task": str(options["cpus"]) if options["cpus"] else None,
        "mem": options["mem"],
        "time": options["time"],
        "partition": options["partition"],
        "account": options["account"],
        "output": options["log"] or _log_file(job, options),
        # A requeued job continues its log.
        "open-mode": "append",
        "signal": f"USR1@{options['grace']}",
    }
    given = [
        f"--{name}={_quote_value(value)}" for name, value in values.items() if value is not None
    ]
    return [*given, "--requeue", *options["sbatch"]]


def _log_file(job: LaunchJob, options: SlurmOptions) -> str:
    """Return the log file of a job, e.g. `llama-13b-%j.log`."""
    # `%` and `/` of the job's name would be a pattern of sbatch and a folder.
    name = job.name.replace("%", "%%").replace("/", "-")
    return f"{name}-%A_%a.log" if options["array"] else f"{name}-%j.log"


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


def _check_options(job: LaunchJob, options: SlurmOptions) -> None:
    if options["array"] is not None:
        _check_array(job, options["array"], options["nodes"])
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
    _check_time(options)
    for module in options["module"]:
        check_text(text("{}", Option("module")), module)
    for directive in options["sbatch"]:
        check_text(text("{}", Option("sbatch")), directive)


def _check_time(options: SlurmOptions) -> None:
    """Raise UsageError for an invalid time limit, or if the command would stop at the start of each restart."""
    limit = options["time"]
    if limit is None:
        return
    limit_s = time_limit_s(limit)
    if limit_s is None and limit.upper() not in _NO_LIMIT:
        what = text("{} is invalid", Option("time", limit))
        why = "sbatch takes minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS"
        raise usage_error(what, why, text("{}", Option("time", "24:00:00")))
    # SLURM has no limit with 0.
    if limit_s and options["grace"] >= limit_s:
        grace = Option("grace", options["grace"])
        why = "the command would stop at its start, after each restart"
        hint = text("{}, or a longer {}", Option("grace", max(limit_s // 2, 1)), Option("time"))
        raise usage_error(text("{} excludes {}", Option("time", limit), grace), why, hint)


def time_limit_s(limit: str) -> int | None:
    """Return the seconds of a time limit of `sbatch`. None for other texts, e.g. `UNLIMITED`.

    >>> time_limit_s("90"), time_limit_s("24:00:00"), time_limit_s("1-12")
    (5400, 86400, 129600)
    """
    if not _TIME_LIMIT.fullmatch(limit):
        return None
    days, _, time = limit.rpartition("-")
    numbers = time.split(":")
    # With days the first number is hours, as it is with three numbers. Otherwise it is minutes.
    unit_s = 3600 if days or len(numbers) == 3 else 60
    total_s = int(days or "0") * 86400
    for number in numbers:
        total_s += int(number) * unit_s
        unit_s //= 60
    return total_s


def _check_array(job: LaunchJob, tasks: int, nodes: int) -> None:
    """Raise UsageError if the tasks of an array cannot divide the work of the command."""
    array = Option("array", tasks)
    if not job.command.has_shares:
        why = (
            f"`prep {job.command.name}` has no shares: its processes work together, or there is one"
        )
        what = text("{} is for conversions only", array)
        raise usage_error(what, why, text("{} instead", Option("nodes", tasks)))
    if nodes > 1:
        why = "each task of an array has one process"
        hint = text("remove {}, or {}", Option("nodes", nodes), array)
        raise usage_error(text("{} excludes {}", array, Option("nodes", nodes)), why, hint)
