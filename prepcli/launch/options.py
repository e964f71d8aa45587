"""The options of the targets of `prep launch`, each defined once. See `prepcli.commands.operations.options`.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypedDict

from prepcli.core.option_spec import REQUIRED, NonNegativeInt, PathLike, PositiveInt, flag, option
from prepcli.launch.job import DEFAULT_GRACE_S, MAX_RESTARTS

# Position in the help of options of several targets: after the options of one target.
_SCRIPT = 20


class JobOptions(TypedDict):
    """Environment of the processes of a job."""

    env: Annotated[
        Sequence[str],
        option(
            "KEY=VALUE",
            "Set an environment variable. Repeatable.",
            default=(),
            position=_SCRIPT + 1,
        ),
    ]


class SubmitOptions(JobOptions):
    """Options of the targets with a file to write and submit."""

    job_name: Annotated[
        str | None,
        option("NAME", "Name the job. Default: by the recipe or command.", position=_SCRIPT),
    ]
    out: Annotated[
        PathLike | None, option("FILE", "Write to FILE. Default: stdout.", position=_SCRIPT + 2)
    ]
    submit: Annotated[bool, flag("Submit the job.", position=_SCRIPT + 2)]


class ScriptOptions(SubmitOptions):
    """Options of targets with a shell script."""

    setup: Annotated[
        Sequence[str],
        option(
            "LINE", "Run LINE before the command. Repeatable.", default=(), position=_SCRIPT + 2
        ),
    ]


class RestartOptions(TypedDict):
    """Limit of restarts of a job."""

    max_restarts: Annotated[
        NonNegativeInt,
        option(
            "N",
            "Restart at most N times after a stop or a kill.",
            default=MAX_RESTARTS,
            position=_SCRIPT + 2,
        ),
    ]


class NodeOptions(TypedDict):
    """The nodes of a job with one process each."""

    nodes: Annotated[
        PositiveInt, option("N", "Use N nodes, with a process each.", default=1, position=2)
    ]
    devices_per_node: Annotated[
        PositiveInt | None, option("N", "Use N devices of each node.", position=2)
    ]
    cpus: Annotated[
        PositiveInt | None,
        option("N", "Use N CPU cores of each node.", position=4),
    ]
    mem: Annotated[str | None, option("SIZE", "Use SIZE memory of each node.", position=4)]


class GraceOptions(TypedDict):
    """The time between a signal and the end of a job."""

    grace: Annotated[
        PositiveInt,
        option(
            "SECONDS",
            "Stop and save SECONDS before the job is killed.",
            default=DEFAULT_GRACE_S,
            position=6,
        ),
    ]


class SlurmOptions(NodeOptions, GraceOptions, ScriptOptions, RestartOptions):
    """Options of a SLURM job. None means the default of the cluster."""

    array: Annotated[
        PositiveInt | None, option("N", "Run N array tasks, with a share each.", position=3)
    ]
    time: Annotated[
        str | None, option("LIMIT", "Set the time limit, such as 24:00:00.", position=5)
    ]
    partition: Annotated[str | None, option("NAME", "Use this partition.", position=5)]
    account: Annotated[str | None, option("NAME", "Charge this account.", position=5)]
    module: Annotated[
        Sequence[str], option("NAME", "Load a module. Repeatable.", default=(), position=5)
    ]
    sbatch: Annotated[
        Sequence[str],
        option("OPTION", "Add an sbatch option. Repeatable.", default=(), position=5),
    ]
    log: Annotated[str | None, option("FILE", "Log to FILE. Default: NAME-%j.log.", position=5)]


class TpuOptions(ScriptOptions, RestartOptions):
    """Options of a Cloud TPU. `accelerator` and `zone` are required."""

    accelerator: Annotated[str, option("TYPE", "Create a TPU, such as v5p-256.", default=REQUIRED)]
    zone: Annotated[str, option("ZONE", "Create it in ZONE.", default=REQUIRED)]
    project: Annotated[
        str | None,
        option("NAME", "Use this project."),
    ]
    runtime_version: Annotated[
        str | None, option("NAME", "Use this TPU software. Default: by TYPE.")
    ]
    spot: Annotated[bool, flag("Use a TPU that may be preempted.")]
    detach: Annotated[bool, flag("Start the command and return.")]
    gcloud: Annotated[
        Sequence[str], option("FLAG", "Add a flag of gcloud. Repeatable.", default=())
    ]


class GkeOptions(NodeOptions, GraceOptions, ScriptOptions, RestartOptions):
    """Options of a JobSet. `image` is required."""

    image: Annotated[
        str, option("IMAGE", "Run this container with prep.", default=REQUIRED, position=1)
    ]
    accelerator: Annotated[
        str | None, option("LABEL", "Use nodes with this GPU or TPU label.", position=3)
    ]
    topology: Annotated[str | None, option("4x4x8", "Use this TPU topology.", position=3)]
    claim: Annotated[
        str | None, option("NAME", "Work in this persistent volume claim.", position=5)
    ]
    queue: Annotated[str | None, option("NAME", "Wait in this Kueue queue.", position=5)]
    spot: Annotated[bool, flag("Use nodes that may be preempted.", position=5)]


class SkyOptions(NodeOptions, ScriptOptions):
    """Options of a managed job of SkyPilot."""

    accelerator: Annotated[
        str | None, option("TYPE", "Use this accelerator, such as H100.", position=3)
    ]
    infra: Annotated[
        str | None, option("NAME", "Run on this cloud, such as gcp/us-east5.", position=3)
    ]
    image: Annotated[str | None, option("IMAGE", "Run this container with prep.", position=5)]
    bucket: Annotated[str | None, option("URL", "Mount this bucket at /bucket.", position=5)]
    spot: Annotated[bool, flag("Use machines that may be preempted.", position=5)]


class RayOptions(SubmitOptions, RestartOptions):
    """Options of a job on a Ray cluster."""

    workers: Annotated[
        PositiveInt, option("N", "Start N workers, one per node.", default=1, position=1)
    ]
    gpus: Annotated[
        PositiveInt | None,
        option("N", "Use N GPUs in each worker.", position=2),
    ]
    tpus: Annotated[
        PositiveInt | None,
        option("N", "Use N TPU chips in each worker.", position=2),
    ]
    cpus: Annotated[
        PositiveInt, option("N", "Use N CPU cores in each worker.", default=1, position=2)
    ]
    accelerator: Annotated[
        str | None, option("TYPE", "Use this accelerator, such as TPU-V6E.", position=3)
    ]
    topology: Annotated[str | None, option("4x4", "Use this TPU topology.", position=3)]
    folder: Annotated[
        str | None, option("FOLDER", "Work in FOLDER, which all nodes see.", position=5)
    ]


class LocalOptions(JobOptions):
    """Options of processes on this machine."""

    processes: Annotated[
        PositiveInt,
        option("N", "Start N processes.", default=2, maximum=64, position=1),
    ]
    devices: Annotated[
        PositiveInt, option("M", "Use M CPU devices in each.", default=1, position=1)
    ]
