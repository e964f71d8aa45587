"""The driver of a Ray job with a command in several workers. The functions do no I/O.

`JaxTrainer` of Ray Train (https://docs.ray.io/en/latest/train/getting-started-jax.html) places the workers of a
training and restarts all of them. Each share of a conversion is a task, and a stopped task runs again.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Annotated

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.option_spec import PositiveInt, option
from prepcli.launch.hardware import Hardware, Training, plain_hardware
from prepcli.launch.job import (
    LaunchedCommand,
    LaunchJob,
    RestartOptions,
    SubmitOptions,
    check_label,
    comment,
    fill_template,
)

# Workers share their host only if there are fewer hosts than workers.
STRATEGY = "SPREAD"
_COMMAND = """\
COMMAND = RayCommand(
    name=@name,
    recipe_name=@recipe_name,
    recipe_text=@recipe_text,
    arguments=@arguments,
    folder=@folder,
    env=@env,
)\
"""
# Its exit codes 1 and 2 end the job without a restart.
_TRAINING = """\
@title
import os
import sys

# Ray Train reads the variable when it is imported.
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

import ray

from prepcli.launch.ray_worker import (
    ExitCode,
    RayCommand,
    check_ray_version,
    coordinator_address,
)

check_ray_version(ray.__version__)

from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError
from ray.train.v2.jax import JaxConfig, JaxTrainer

@command


def run_worker(config):
    exit_code = config["exit_code"]
    address = broadcast_from_rank_zero(coordinator_address(ray.util.get_node_ip_address()))
    if ray.get(exit_code.get.remote()):
        return
    context = get_context()
    code = COMMAND.run_together(context.get_world_rank(), context.get_world_size(), address)
    ray.get(exit_code.record.remote(code))


exit_code = ray.remote(num_cpus=0)(ExitCode).remote()
trainer = JaxTrainer(
    run_worker,
    train_loop_config={"exit_code": exit_code},
    # The processes of prep connect by themselves.
    jax_config=JaxConfig(use_tpu=False),
    scaling_config=ScalingConfig(
@scaling
    ),
    run_config=RunConfig(
        name=@job_name,
@storage
        failure_config=FailureConfig(max_failures=@max_restarts),
    ),
)
try:
    trainer.fit()
except (ControllerError, WorkerGroupError) as error:
    sys.exit(f"error: {error}")
sys.exit(ray.get(exit_code.get.remote()))
"""
# A conversion, or a command with one process.
_TASKS = """\
@title
import sys

import ray

from prepcli.launch.ray_worker import RayCommand, RestartError

@command
SHARES = @workers


@@ray.remote(
@resources
    max_retries=@max_restarts,
    retry_exceptions=[RestartError],
    scheduling_strategy=@strategy,
)
def run_share(index):
    return COMMAND.run_share(index, SHARES)


try:
    codes = ray.get([run_share.remote(index) for index in range(SHARES)])
except RestartError as error:
    sys.exit(f"error: {error}")
sys.exit(max(codes))
"""


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


def ray_driver(job: LaunchJob, options: RayOptions) -> str:
    """Return the Python program to start the workers and to wait for them."""
    check_label(job.name)
    _check_devices(job, options)
    env = dict(job.env)
    if job.command.has_mesh and not (options["gpus"] or options["tpus"]):
        # Otherwise JAX would use an accelerator that Ray has not reserved.
        env.setdefault("JAX_PLATFORMS", "cpu")
    title = comment(f"Runs `{job.command.title}` on a Ray cluster with prep on its nodes.")
    command = fill_template(
        _COMMAND,
        name=repr(job.command.name),
        recipe_name=repr(job.command.recipe_name),
        recipe_text=repr(job.recipe_text),
        arguments=repr(job.command.arguments),
        folder=repr(options["folder"]),
        env=repr(env),
    )
    if not job.command.has_mesh:
        resources = {
            "num_cpus": options["cpus"],
            "num_gpus": options["gpus"],
            "accelerator_type": options["accelerator"],
        }
        return fill_template(
            _TASKS,
            title=title,
            command=command,
            workers=options["workers"],
            resources=[f"    {name}={value!r}," for name, value in resources.items() if value],
            max_restarts=job.max_restarts,
            strategy=repr(STRATEGY),
        )
    counts = {"CPU": options["cpus"], "GPU": options["gpus"], "TPU": options["tpus"]}
    scaling = {
        "num_workers": options["workers"],
        "resources_per_worker": {name: count for name, count in counts.items() if count},
        "placement_strategy": STRATEGY,
        "use_gpu": bool(options["gpus"]),
        "use_tpu": bool(options["tpus"]),
        "accelerator_type": options["accelerator"],
        "topology": options["topology"],
    }
    # The folder of Ray's own files. Its default is on the disk of each node.
    storage = [str(PurePosixPath(options["folder"], ".ray"))] if options["folder"] else []
    return fill_template(
        _TRAINING,
        title=title,
        command=command,
        scaling=[f"        {name}={value!r}," for name, value in scaling.items() if value],
        job_name=repr(job.name),
        storage=[f"        storage_path={path!r}," for path in storage],
        max_restarts=job.max_restarts,
    )


def ray_hardware(
    options: RayOptions, command: LaunchedCommand, training: Training | None
) -> Hardware:
    """Return the workers and their devices. Raise UsageError for a relative folder."""
    folder = options["folder"]
    if folder is not None and not os.path.isabs(folder):
        what = text("{} is a relative path", Option("folder", folder))
        hint = text("{}", Option("folder", os.path.abspath(folder)))
        raise usage_error(what, "each worker starts in a folder of its own", hint)
    devices = options["tpus"] or options["gpus"]
    return plain_hardware(options["workers"], devices, option="workers")


def _check_devices(job: LaunchJob, options: RayOptions) -> None:
    """Raise UsageError if Ray would refuse the devices of a worker, or if the command uses no TPUs."""
    tpus = Option("tpus")
    without_tpus = text("remove {}", tpus)
    if options["gpus"] and options["tpus"]:
        what = text("{} excludes {}", Option("gpus"), tpus)
        raise usage_error(what, "a worker has devices of one kind", without_tpus)
    if options["tpus"] and not job.command.has_mesh:
        what = text("{} is for training, eval and generate only", tpus)
        raise usage_error(what, f"`prep {job.command.name}` computes on CPUs", without_tpus)
    if not options["tpus"]:
        if options["topology"]:
            what = text("{} is for TPUs only", Option("topology"))
            why = text("{} is missing", tpus)
            raise usage_error(what, why, text("remove {}", Option("topology")))
        return
    examples = {"accelerator": "TPU-V6E", "topology": "4x4"}
    for name, example in examples.items():
        if options[name] is None:
            why = "Ray finds the hosts of a slice by it"
            hint = text("{}", Option(name, example))
            raise usage_error(text("{} is missing", Option(name)), why, hint)
