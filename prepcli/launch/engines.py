"""The engines of `prep launch`. A new one is a module with its options, its script and its hardware, and a row here.

Every start of `prep` reads this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from prepcli.core.errors import Option
from prepcli.launch.batch import batch_hardware
from prepcli.launch.gke import GkeOptions, gke_hardware, gke_manifest
from prepcli.launch.hardware import Hardware, Training
from prepcli.launch.job import LaunchedCommand, LaunchJob
from prepcli.launch.pbs import PbsOptions, pbs_script
from prepcli.launch.ray import RayOptions, ray_driver, ray_hardware
from prepcli.launch.sky import SkyOptions, sky_hardware, sky_task
from prepcli.launch.slurm import SlurmOptions, slurm_script
from prepcli.launch.tpu import TpuOptions, tpu_hardware, tpu_script


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine of jobs.

    Attributes:
        options: TypedDict of its options.
        help: The help of its command.
        script: Returns the script of a job with the options of the engine.
        hardware: Returns the nodes and devices of the options, or None if they are unknown.
        submit: Command that submits a script.
        submitted: The script that the command gets: from stdin, as a file, or as a program in a word.
        waits: Whether the command ends with the job.
        disk_end: Event that ends the disk of a process. Empty if its files are kept.
        kept_disk: Option for a permanent disk, if there is one.
        has_labels: Whether the name of a job is a label.
    """

    options: type
    help: str
    script: Callable[[LaunchJob, Any], str]
    hardware: Callable[[Any, LaunchedCommand, Training | None], Hardware | None]
    submit: tuple[str, ...]
    submitted: Literal["stdin", "file", "program"] = "stdin"
    waits: bool = False
    disk_end: str = ""
    kept_disk: Option | None = None
    has_labels: bool = True


ENGINES = {
    "slurm": Engine(
        options=SlurmOptions,
        help="""Write a SLURM batch script, or submit it.

        The job saves and stops before its time limit. SLURM then requeues it, and it resumes.
        With --array, each task of a job array writes its share of a conversion.

        Examples:
          prep launch slurm llama-13b --nodes 2 --devices-per-node 8
          prep launch slurm run.toml --nodes 4 --time 24:00:00 --module cuda --submit
          prep launch slurm run.toml --setup 'source env/bin/activate' -- --set seed=1
          prep launch slurm --array 8 -- save-init llama-13b --mesh 1,64,4
        """,
        script=slurm_script,
        hardware=batch_hardware,
        # `--parsable` prints the job id without a sentence around it.
        submit=("sbatch", "--parsable"),
        has_labels=False,
    ),
    "pbs": Engine(
        options=PbsOptions,
        help="""Write a batch script of PBS Professional, or submit it.

        The job saves and stops before its time limit. Then it submits itself again, and resumes.
        With --array, each task of a job array writes its share of a conversion.

        Examples:
          prep launch pbs llama-13b --nodes 2 --devices-per-node 8 --cpus 64
          prep launch pbs run.toml --queue gpu --time 24:00:00 --submit
          prep launch pbs --array 8 --cpus 4 -- save-init llama-13b --mesh 1,64,4
        """,
        script=pbs_script,
        hardware=batch_hardware,
        submit=("qsub",),
        has_labels=False,
    ),
    "tpu": Engine(
        options=TpuOptions,
        help="""Write a script that creates a Cloud TPU, or run it.

        The TPU runs the command. Commands without a mesh run on the first host.

        Examples:
          prep launch tpu run.toml --accelerator v5p-512 --zone us-east5-a
          prep launch tpu run.toml --accelerator v4-64 --zone us-central2-b --spot
          prep launch tpu --accelerator v4-8 --zone us-central2-b -- eval m --data d
        """,
        script=tpu_script,
        hardware=tpu_hardware,
        submit=("bash", "-s"),
        waits=True,
    ),
    "gke": Engine(
        options=GkeOptions,
        help="""Write a JobSet for Kubernetes, or create it.

        Examples:
          prep launch gke run.toml --image I --devices-per-node 8 --claim runs
          prep launch gke run.toml --image I --devices-per-node 8 -- --out gs://B/RUN
          prep launch gke --image I --nodes 4 --claim runs -- save-init llama-13b
        """,
        script=gke_manifest,
        hardware=gke_hardware,
        submit=("kubectl", "create", "-f", "-"),
        disk_end="a pod ends",
        kept_disk=Option("claim", "NAME"),
    ),
    "sky": Engine(
        options=SkyOptions,
        help="""Write a managed job of SkyPilot, or submit it.

        SkyPilot starts the job again after a preemption, and it resumes.

        Examples:
          prep launch sky run.toml --accelerator tpu-v5p-8 -- --out gs://B/RUN
          prep launch sky --spot -- export gs://B/RUN --out gs://B/MODEL
        """,
        script=sky_task,
        hardware=sky_hardware,
        # `sky` reads its file several times, so it cannot be a pipe. `--async` ends it when the job is accepted.
        submit=("sky", "jobs", "launch", "--yes", "--async"),
        submitted="file",
        disk_end="a machine is preempted",
    ),
    "ray": Engine(
        options=RayOptions,
        help="""Write the driver of a Ray job, or submit it.

        Training runs in JaxTrainer of Ray Train. Conversions run as tasks with a share each.

        Examples:
          prep launch ray run.toml --workers 4 --gpus 8 --folder /shared/runs
          prep launch ray --workers 4 --folder /shared -- save-init llama-13b
        """,
        script=ray_driver,
        hardware=ray_hardware,
        # The driver is a word of its own command, so that no file has to reach the cluster.
        submit=("ray", "job", "submit", "--no-wait", "--log-color", "false", "--", "python", "-c"),
        submitted="program",
        disk_end="the job ends",
        kept_disk=Option("folder", "FOLDER"),
    ),
}
