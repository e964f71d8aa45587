"""The driver of a Ray job with a command in several workers. The functions do no I/O.

`JaxTrainer` of Ray Train (https://docs.ray.io/en/latest/train/getting-started-jax.html) places the workers of a
training and restarts all of them. Each share of a conversion is a task, and a stopped task runs again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from prepcli.core.errors import Option, text, usage_error
from prepcli.launch.job import LaunchJob, check_label
from prepcli.launch.options import RayOptions
from prepcli.launch.shell import comment, script

# Workers share their host only if there are fewer hosts than workers.
STRATEGY = "SPREAD"


def ray_driver(job: LaunchJob, options: RayOptions, *, recipe_text: str = "") -> str:
    """Return the Python program to start the workers and to wait for them.

    Args:
        job: The job.
        options: Options of the workers.
        recipe_text: Text of the recipe of a training.
    """
    check_label(job.name)
    _check_devices(job, options)
    command = _command_lines(job, options, recipe_text)
    head = [comment(f"Runs `{job.command.title}` on a Ray cluster with prep on its nodes.")]
    if job.command.has_mesh:
        return script([*head, *_trainer_lines(job, options, command)])
    return script([*head, *_task_lines(job, options, command)])


def _command_lines(job: LaunchJob, options: RayOptions, recipe_text: str) -> list[str]:
    """Return the assignment of the command with its environment."""
    env = dict(job.env)
    if job.command.has_mesh and not _num_devices(options):
        # Otherwise JAX would use an accelerator that Ray has not reserved.
        env.setdefault("JAX_PLATFORMS", "cpu")
    return [
        "COMMAND = RayCommand(",
        f"    name={job.command.name!r},",
        f"    recipe_name={PurePosixPath(job.command.recipe).name!r},",
        f"    recipe_text={recipe_text!r},",
        f"    arguments={job.command.arguments!r},",
        f"    folder={options['folder']!r},",
        f"    env={env!r},",
        ")",
    ]


def _trainer_lines(job: LaunchJob, options: RayOptions, command: list[str]) -> list[str]:
    """Return the driver of a training. Its exit codes 1 and 2 end the job without a restart."""
    return [
        "import os",
        "import sys",
        "",
        "# Ray Train reads the variable when it is imported.",
        'os.environ["RAY_TRAIN_V2_ENABLED"] = "1"',
        "",
        "import ray",
        "",
        "from prepcli.launch.ray_worker import (",
        "    ExitCode,",
        "    RayCommand,",
        "    check_ray_version,",
        "    coordinator_address,",
        ")",
        "",
        "check_ray_version(ray.__version__)",
        "",
        "from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context",
        "from ray.train.collective import broadcast_from_rank_zero",
        "from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError",
        "from ray.train.v2.jax import JaxConfig, JaxTrainer",
        "",
        *command,
        "",
        "",
        "def run_worker(config):",
        '    exit_code = config["exit_code"]',
        "    address = broadcast_from_rank_zero(coordinator_address(ray.util.get_node_ip_address()))",
        "    if ray.get(exit_code.get.remote()):",
        "        return",
        "    context = get_context()",
        "    code = COMMAND.run_together(context.get_world_rank(), context.get_world_size(), address)",
        "    ray.get(exit_code.record.remote(code))",
        "",
        "",
        "exit_code = ray.remote(num_cpus=0)(ExitCode).remote()",
        "trainer = JaxTrainer(",
        "    run_worker,",
        '    train_loop_config={"exit_code": exit_code},',
        "    # The processes of prep connect by themselves.",
        "    jax_config=JaxConfig(use_tpu=False),",
        "    scaling_config=ScalingConfig(",
        *(f"        {name}={value!r}," for name, value in _scaling(options).items()),
        "    ),",
        "    run_config=RunConfig(",
        f"        name={job.name!r},",
        *_storage_lines(options),
        f"        failure_config=FailureConfig(max_failures={job.max_restarts}),",
        "    ),",
        ")",
        "try:",
        "    trainer.fit()",
        "except (ControllerError, WorkerGroupError) as error:",
        '    sys.exit(f"error: {error}")',
        "sys.exit(ray.get(exit_code.get.remote()))",
    ]


def _storage_lines(options: RayOptions) -> list[str]:
    """Return the folder of Ray's own files. Its default is on the disk of each node."""
    if options["folder"] is None:
        return []
    return [f"        storage_path={str(PurePosixPath(options['folder'], '.ray'))!r},"]


def _scaling(options: RayOptions) -> Mapping[str, object]:
    """Return the arguments of `ScalingConfig`."""
    resources = {"CPU": options["cpus"], "GPU": options["gpus"], "TPU": options["tpus"]}
    scaling: dict[str, object] = {
        "num_workers": options["workers"],
        "resources_per_worker": {name: count for name, count in resources.items() if count},
        "placement_strategy": STRATEGY,
    }
    if options["gpus"]:
        scaling["use_gpu"] = True
    if options["tpus"]:
        scaling["use_tpu"] = True
    if options["accelerator"]:
        scaling["accelerator_type"] = options["accelerator"]
    if options["topology"]:
        scaling["topology"] = options["topology"]
    return scaling


def _task_lines(job: LaunchJob, options: RayOptions, command: list[str]) -> list[str]:
    """Return the driver of a conversion, or of a command with one process."""
    resources: dict[str, object] = {"num_cpus": options["cpus"]}
    if options["gpus"]:
        resources["num_gpus"] = options["gpus"]
    if options["accelerator"]:
        resources["accelerator_type"] = options["accelerator"]
    return [
        "import sys",
        "",
        "import ray",
        "",
        "from prepcli.launch.ray_worker import RayCommand, RestartError",
        "",
        *command,
        f"SHARES = {options['workers']}",
        "",
        "",
        "@ray.remote(",
        *(f"    {name}={value!r}," for name, value in resources.items()),
        f"    max_retries={job.max_restarts},",
        "    retry_exceptions=[RestartError],",
        f"    scheduling_strategy={STRATEGY!r},",
        ")",
        "def run_share(index):",
        "    return COMMAND.run_share(index, SHARES)",
        "",
        "",
        "try:",
        "    codes = ray.get([run_share.remote(index) for index in range(SHARES)])",
        "except RestartError as error:",
        '    sys.exit(f"error: {error}")',
        "sys.exit(max(codes))",
    ]


def _num_devices(options: RayOptions) -> int | None:
    return options["gpus"] or options["tpus"]


def _check_devices(job: LaunchJob, options: RayOptions) -> None:
    """Raise UsageError if Ray would refuse the devices of a worker, or if the command uses no TPUs."""
    if options["gpus"] and options["tpus"]:
        what = text("{} excludes {}", Option("gpus"), Option("tpus"))
        raise usage_error(
            what, "a worker has devices of one kind", text("remove {}", Option("tpus"))
        )
    if options["tpus"] and not job.command.has_mesh:
        what = text("{} is for training, eval and generate only", Option("tpus"))
        raise usage_error(
            what,
            f"`prep {job.command.name}` computes on CPUs",
            text("remove {}", Option("tpus")),
        )
    if not options["tpus"]:
        if options["topology"]:
            what = text("{} is for TPUs only", Option("topology"))
            why = text("{} is missing", Option("tpus"))
            raise usage_error(what, why, text("remove {}", Option("topology")))
        return
    examples = {"accelerator": "TPU-V6E", "topology": "4x4"}
    for name, example in examples.items():
        if options[name] is None:
            why = "Ray finds the hosts of a slice by it"
            hint = text("{}", Option(name, example))
            raise usage_error(text("{} is missing", Option(name)), why, hint)
