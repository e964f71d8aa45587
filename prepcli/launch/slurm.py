"""The batch script of a command under SLURM: one process per node, or one array task per share. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.option_spec import option
from prepcli.launch.batch import (
    BatchOptions,
    batch_command,
    batch_title,
    check_array,
    check_grace,
    module_lines,
)
from prepcli.launch.job import RESTARTABLE, LaunchJob, check_texts, fill_template

# Minimum time for the remaining tasks to end after the first one.
MIN_WAIT_S = 300
# Added to the heartbeat's time-out. After the time-out, the tasks know that another task is lost.
HEARTBEAT_MARGIN_S = 240

_TIME_LIMIT = re.compile(r"([0-9]{1,6}-)?[0-9]{1,6}(:[0-9]{1,6}){0,2}")
# Texts of sbatch for a job without a limit.
_NO_LIMIT = ("UNLIMITED", "INFINITE", "-1")
_PLAIN = r"A-Za-z0-9_@%+=:,./-"
_SCRIPT = """\
#!/bin/bash
@title
@directives

set -e
@environment

code=0
@srun || code=$?

# 75: stopped before the time limit, or a process was lost. 131 to 159: a signal killed a process.
case $code in
    @restartable)
        if [ "${SLURM_RESTART_COUNT:-0}" -lt @max_restarts ]; then
            scontrol requeue @job_id
        fi ;;
esac
exit "$code"
"""


class SlurmOptions(BatchOptions):
    """Options of a SLURM job. None means the default of the cluster."""

    partition: Annotated[str | None, option("NAME", "Use this partition.", position=5)]
    sbatch: Annotated[
        Sequence[str],
        option("OPTION", "Add an sbatch option. Repeatable.", default=(), position=5),
    ]
    log: Annotated[str | None, option("FILE", "Log to FILE. Default: NAME-%j.log.", position=5)]


def slurm_script(job: LaunchJob, options: SlurmOptions) -> str:
    """Return the batch script of a job.

    `--signal` without `B:` signals the tasks of `srun`, not the batch shell: every process saves and exits with 75, and
    the script requeues the job.
    """
    _check_options(job, options)
    job_id = '"$SLURM_JOB_ID"'
    if options["array"] is not None:
        # One task of an array has the number of the whole array as its SLURM_JOB_ID, and with it all tasks would be
        # requeued.
        job_id = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
    command = batch_command(job, options, "SLURM_ARRAY_TASK_ID")
    # `srun` ignores the `--cpus-per-task` of the job since SLURM 22.05.
    cpus = f" --cpus-per-task={options['cpus']}" if options["cpus"] else ""
    # The end of the first task must not kill the remaining ones while they save. With the default heartbeat of 60 s:
    # max(300, 60 + 240) = 300 s.
    wait_s = max(MIN_WAIT_S, math.ceil(job.heartbeat_timeout_s + HEARTBEAT_MARGIN_S))
    return fill_template(
        _SCRIPT,
        title=batch_title(job, options, "sbatch"),
        directives=[f"#SBATCH {directive}" for directive in _sbatch_directives(job, options)],
        environment=[*module_lines(options), *job.environment_lines],
        srun=f"srun --label --kill-on-bad-exit=0 --wait={wait_s}{cpus} {command}",
        restartable=RESTARTABLE,
        max_restarts=job.max_restarts,
        job_id=job_id,
    )


def _sbatch_directives(job: LaunchJob, options: SlurmOptions) -> list[str]:
    array = options["array"]
    devices = options["devices_per_node"]
    # `%` and `/` of the job's name would be a pattern of sbatch and a folder.
    log_name = job.name.replace("%", "%%").replace("/", "-")
    values = {
        "job-name": job.name,
        "nodes": options["nodes"],
        "ntasks-per-node": 1,
        "array": array and f"0-{array - 1}",
        "gres": devices and f"gpu:{devices}",
        "cpus-per-task": options["cpus"],
        "mem": options["mem"],
        "time": options["time"],
        "partition": options["partition"],
        "account": options["account"],
        "output": options["log"] or f"{log_name}-{'%A_%a' if array else '%j'}.log",
        # A requeued job continues its log.
        "open-mode": "append",
        "signal": f"USR1@{options['grace']}",
    }
    given = [
        f"--{name}={_quote_value(str(value))}"
        for name, value in values.items()
        if value is not None
    ]
    return [*given, "--requeue", *options["sbatch"]]


def _quote_value(value: str) -> str:
    r"""Return a value as `sbatch` reads it from a directive: quotes keep spaces, and `\` escapes also inside them."""
    if re.fullmatch(f"[{_PLAIN}]+", value):
        return value
    escaped = re.sub(rf"[^ \t{_PLAIN}]", lambda match: "\\" + match[0], value)
    return f'"{escaped}"'


def _check_options(job: LaunchJob, options: SlurmOptions) -> None:
    check_array(job, options)
    names = ("mem", "time", "partition", "account", "log", "module", "sbatch")
    check_texts(**{name: options[name] for name in names})
    limit = options["time"]
    if limit is None:
        return
    limit_s = time_limit_s(limit)
    if limit_s is None and limit.upper() not in _NO_LIMIT:
        what = text("{} is invalid", Option("time", limit))
        why = "sbatch takes minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS"
        raise usage_error(what, why, text("{}", Option("time", "24:00:00")))
    # SLURM has no limit with 0.
    check_grace(options, limit_s)


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
