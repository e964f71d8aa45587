"""Options of jobs of batch systems such as SLURM, and what their scripts have in common. The functions do no I/O."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.option_spec import PositiveInt, option
from prepcli.launch.hardware import Hardware, Training, plain_hardware
from prepcli.launch.job import (
    GraceOptions,
    LaunchedCommand,
    LaunchJob,
    NodeOptions,
    RestartOptions,
    ScriptOptions,
    comment,
)


class BatchOptions(NodeOptions, GraceOptions, ScriptOptions, RestartOptions):
    """Options of a batch job. None means the default of the cluster."""

    array: Annotated[
        PositiveInt | None, option("N", "Run N array tasks, with a share each.", position=3)
    ]
    time: Annotated[
        str | None, option("LIMIT", "Set the time limit, such as 24:00:00.", position=5)
    ]
    account: Annotated[str | None, option("NAME", "Charge this account.", position=5)]
    module: Annotated[
        Sequence[str], option("NAME", "Load a module. Repeatable.", default=(), position=5)
    ]


def batch_title(job: LaunchJob, options: BatchOptions, submit: str) -> str:
    """Return the comment at the head of a script. `submit` is the program that takes it."""
    processes = "process per node" if options["array"] is None else "array task per share"
    return comment(f"Runs `{job.command.title}` with one {processes}. Submit with `{submit}`.")


def batch_command(job: LaunchJob, options: BatchOptions, task: str) -> str:
    """Return the shell command of a process. `task` is the shell variable with the index of an array task."""
    name, *words = job.command.words
    tasks = options["array"]
    if tasks is None:
        return shlex.join(["prep", name, *words])
    return f'prep {name} --processes {tasks}/"${task}" {shlex.join(words)}'


def module_lines(options: BatchOptions) -> list[str]:
    """Return the lines to load the modules."""
    return [shlex.join(["module", "load", module]) for module in options["module"]]


def check_array(job: LaunchJob, options: BatchOptions) -> None:
    """Raise UsageError for an array of a command without shares, or of several nodes."""
    tasks = options["array"]
    if tasks is None:
        return
    array = Option("array", tasks)
    if not job.command.has_shares:
        name = f"`prep {job.command.name}`"
        why = f"{name} has no shares: its processes work together, or there is one"
        what = text("{} is for conversions only", array)
        raise usage_error(what, why, text("{} instead", Option("nodes", tasks)))
    nodes = Option("nodes", options["nodes"])
    if options["nodes"] > 1:
        hint = text("remove {}, or {}", nodes, array)
        what = text("{} excludes {}", array, nodes)
        raise usage_error(what, "each task of an array has one process", hint)


def check_grace(options: BatchOptions, limit_s: int | None) -> None:
    """Raise UsageError if the command would stop at the start of each restart. `limit_s` is None or 0 for no limit."""
    grace_s = options["grace"]
    if limit_s and grace_s >= limit_s:
        why = "the command would stop at its start, after each restart"
        hint = text("{}, or a longer {}", Option("grace", max(limit_s // 2, 1)), Option("time"))
        limit = Option("time", options["time"])
        raise usage_error(text("{} excludes {}", limit, Option("grace", grace_s)), why, hint)


def batch_hardware(
    options: BatchOptions, command: LaunchedCommand, training: Training | None
) -> Hardware:
    """Return the nodes and devices of a job."""
    return plain_hardware(options["nodes"], options["devices_per_node"])
