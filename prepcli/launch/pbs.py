"""The batch script of a command under PBS Professional or OpenPBS. The functions do no I/O.

JAX detects no processes of PBS, so the script numbers them: `pbsdsh` of PBS starts one per node, with the variables of
JAX. It needs no MPI and no ssh. It does not return the exit codes of its tasks, so each task writes its own to a file.
Users cannot requeue a job of PBS. The script submits itself again instead.

Manual pages: https://github.com/openpbs/openpbs/tree/master/doc/man1, `qsub` and `pbsdsh`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Annotated

from prepcli.core.errors import STOPPED, Option, text, usage_error
from prepcli.core.option_spec import option
from prepcli.core.process_address import FIRST_DYNAMIC_PORT, NUM_DYNAMIC_PORTS
from prepcli.launch.batch import (
    BatchOptions,
    batch_command,
    batch_title,
    check_array,
    check_grace,
    module_lines,
)
from prepcli.launch.job import RESTARTABLE, LaunchJob, check_texts, comment, fill_template

_NOT_RUN = "The authors of prep have not run this file on a real cluster."
# Letters of a job's name that `qsub -N` accepts, and its length.
_NAME_LETTERS = "A-Za-z0-9+_.-"
MAX_NAME_CHARS = 230
_TIME_LIMIT = re.compile(r"([0-9]{1,6}:){0,2}[0-9]{1,9}")
# `$0` is a copy of the script, which PBS keeps until the job ends. A restarted task of an array is a job of its own.
_SCRIPT = """\
#!/bin/bash
@title
@origin
@directives

cd "$PBS_O_WORKDIR" || exit 1
# The next job has other numbers in these lines.
prep_restarts=0
@task

codes=$(mktemp -d "$PWD/.prep-launch-XXXXXX") || exit 1
trap 'rm -rf "$codes"' EXIT
@coordinator
process=@process
for ((index = 0; index < @nodes; index++)); do
@start
done
wait

# 75: stopped before the time limit, or a process was lost. 131 to 159: a signal killed a process. An error wins.
code=0
for ((index = 0; index < @nodes; index++)); do
    read -r ended < "$codes/$index" || ended=@stopped
    case $ended in
        0) ;;
        @restartable) [ "$code" -ne 0 ] || code=$ended ;;
        *) code=$ended ;;
    esac
done
case $code in
    @restartable)
        if [ "$prep_restarts" -lt @max_restarts ]; then
            sed @changes "$0" | qsub
        fi ;;
esac
exit "$code"
"""
# PBS starts tasks in the home folder, with few variables: a login shell defines PATH and `module`.
_PROCESS_SCRIPT = """\
(
set -e
cd "$PBS_O_WORKDIR"
@environment
@timer
@command
)
echo "$?" > "$PREP_EXIT_FILE"\
"""


class PbsOptions(BatchOptions):
    """Options of a PBS job. None means the default of the cluster."""

    queue: Annotated[str | None, option("NAME", "Use this queue.", position=5)]
    qsub: Annotated[
        Sequence[str],
        option("OPTION", "Add a qsub option. Repeatable.", default=(), position=5),
    ]


def pbs_script(job: LaunchJob, options: PbsOptions) -> str:
    """Return the batch script of a job.

    PBS signals a job only seconds before it kills it. So `timeout` sends SIGUSR1 to the command of each node: every
    process saves and exits with 75, and the script submits the next job.
    """
    limit_s = _check_options(job, options)
    command = batch_command(job, options, "PREP_TASK")
    nodes = options["nodes"]
    # The variables of a task, which the batch script expands
    variables = ['PREP_EXIT_FILE="$codes/$index"']
    changes = ['-e "s/^prep_restarts=.*/prep_restarts=$((prep_restarts + 1))/"']
    task: list[str] = []
    coordinator: list[str] = []
    timer: list[str] = []
    if options["array"] is not None:
        task.append('prep_task="$PBS_ARRAY_INDEX"')
        variables.append('PREP_TASK="$prep_task"')
        changes.append('-e "s/^prep_task=.*/prep_task=$prep_task/" -e "/^#PBS -J /d"')
    if nodes > 1:
        # `17.server` is job 17. Two jobs on one node have different ports.
        port = f"$(({FIRST_DYNAMIC_PORT} + ${{PBS_JOBID%%[^0-9]*}} % {NUM_DYNAMIC_PORTS}))"
        coordinator.append(f'coordinator="$(head -n 1 "$PBS_NODEFILE"):{port}"')
        variables += [
            'JAX_COORDINATOR_ADDRESS="$coordinator"',
            f"JAX_NUM_PROCESSES={nodes}",
            'JAX_PROCESS_ID="$index"',
        ]
    if limit_s:
        stop_s = limit_s - options["grace"]
        # The lines before it take a part of the time. With 0, `timeout` would never stop the command.
        timer.append(f"stop_s=$((SECONDS < {stop_s} ? {stop_s} - SECONDS : 1))")
        command = f'timeout --preserve-status --signal=USR1 "$stop_s" {command}'
    process = fill_template(
        _PROCESS_SCRIPT,
        environment=[*module_lines(options), *job.environment_lines],
        timer=timer,
        command=command,
    )
    start = ["env", *variables, 'bash -l -c "$process" < /dev/null &']
    if nodes > 1:
        start[0] = 'pbsdsh -n "$index" -- env'
    return fill_template(
        _SCRIPT,
        title=batch_title(job, options, "qsub"),
        origin=comment(_NOT_RUN),
        directives=[f"#PBS {directive}" for directive in _directives(job, options)],
        task=task,
        coordinator=coordinator,
        nodes=nodes,
        process=shlex.quote(process),
        start="    " + " \\\n        ".join(start),
        stopped=STOPPED,
        restartable=RESTARTABLE,
        max_restarts=job.max_restarts,
        changes=" ".join(changes),
    )


def _directives(job: LaunchJob, options: PbsOptions) -> list[str]:
    chunk = {
        "ncpus": options["cpus"],
        # One line of the node file, and so one process, for each node
        "mpiprocs": 1,
        "ngpus": options["devices_per_node"],
        "mem": options["mem"],
    }
    resources = [f"{name}={value}" for name, value in chunk.items() if value is not None]
    words = [
        ["-N", _job_name(job.name)],
        ["-l", ":".join([f"select={options['nodes']}", *resources])],
    ]
    if options["nodes"] > 1:
        words.append(["-l", "place=scatter"])
    if options["array"] is not None:
        words.append(["-J", f"0-{options['array'] - 1}"])
    values = {
        "-l": options["time"] and f"walltime={options['time']}",
        "-q": options["queue"],
        "-A": options["account"],
    }
    words += [[name, value] for name, value in values.items() if value]
    # One log, which is written while the job runs. PBS runs the job again after a lost node.
    words += [["-j", "oe"], ["-k", "doe"], ["-r", "y"]]
    # `qsub` reads the quotes of a shell in a directive.
    return [*map(shlex.join, words), *options["qsub"]]


def _job_name(name: str) -> str:
    """Return a name that `qsub -N` accepts, e.g. `7b run` -> `prep-7b-run`."""
    plain = re.sub(f"[^{_NAME_LETTERS}]+", "-", name)
    if not plain[0].isalpha():
        plain = f"prep-{plain.strip('-')}"
    return plain[:MAX_NAME_CHARS]


def _check_options(job: LaunchJob, options: PbsOptions) -> int | None:
    """Return the seconds of the time limit, or None without one. Raise UsageError for invalid options."""
    check_array(job, options)
    if options["array"] == 1:
        what = text("{} is invalid", Option("array", 1))
        raise usage_error(what, "an array of PBS has at least two tasks", "remove the option")
    names = ("mem", "time", "queue", "account", "module", "qsub")
    check_texts(**{name: options[name] for name in names})
    limit = options["time"]
    if limit is None:
        return None
    limit_s = walltime_s(limit)
    if not limit_s:
        what = text("{} is invalid", Option("time", limit))
        why = "PBS takes seconds or HOURS:MINUTES:SECONDS"
        raise usage_error(what, why, text("{}", Option("time", "24:00:00")))
    check_grace(options, limit_s)
    return limit_s


def walltime_s(limit: str) -> int | None:
    """Return the seconds of a walltime of PBS. None for other texts.

    >>> walltime_s("90"), walltime_s("1:30"), walltime_s("24:00:00")
    (90, 90, 86400)
    """
    if not _TIME_LIMIT.fullmatch(limit):
        return None
    total_s = 0
    for number in limit.split(":"):
        total_s = total_s * 60 + int(number)
    return total_s
