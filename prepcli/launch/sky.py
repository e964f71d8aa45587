"""The managed job of SkyPilot for a command with one process per node. The functions do no I/O.

Keys: https://docs.skypilot.co/en/latest/reference/yaml-spec.html.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from prepcli.core.errors import STOPPED, Option, text, usage_error
from prepcli.core.json_types import JsonObject
from prepcli.core.process_address import DEFAULT_PORT
from prepcli.launch.command import check_text
from prepcli.launch.gke import yaml_text
from prepcli.launch.job import LaunchJob, check_label
from prepcli.launch.options import SkyOptions
from prepcli.launch.shell import NOT_RUN, RESTARTABLE, command_line, comment, script
from prepcli.launch.sky_machines import sky_accelerator

# First version with `recover_on_exit_codes`.
MIN_VERSION = "0.11.2"
BUCKET_FOLDER = "/bucket"
RECIPE_FOLDER = "~/.prep-launch"
# `K`, `M` and `T` of other engines would be silently read as something else.
_GIBIBYTES = re.compile(r"([0-9]+)(G|GB|Gi|GiB)?")


def sky_task(job: LaunchJob, options: SkyOptions, *, recipe_text: str = "") -> str:
    """Return the YAML of a managed job.

    SkyPilot starts all nodes again after a preemption, and if a process exits with 75 or is killed. It has no limit on
    these restarts.

    The setup lines are part of `run`. SkyPilot runs its `setup` in another shell: variables and the working folder
    would be lost, and a failed line would be ignored.

    Args:
        job: The job.
        options: Options of the job.
        recipe_text: Text of the recipe of a training.
    """
    check_label(job.name)
    task: JsonObject = {
        "name": job.name,
        "num_nodes": options["nodes"],
        "resources": _resources(options),
    }
    if job.env:
        task["envs"] = dict(job.env)
    if options["bucket"]:
        _check_bucket(options["bucket"])
        task["file_mounts"] = {BUCKET_FOLDER: {"source": options["bucket"], "mode": "MOUNT"}}
    task["run"] = _run_script(job, options, recipe_text)
    head = [
        comment(
            f"Runs `{job.command.title}` with one process per node. Submit with `sky jobs launch FILE`."
        ),
        comment(f"SkyPilot {MIN_VERSION} or newer. {NOT_RUN} SkyPilot's own parser accepts it."),
    ]
    return f"{script(head)}{yaml_text([task])}"


def _resources(options: SkyOptions) -> JsonObject:
    """Return the machines of a job."""
    resources: JsonObject = {}
    if options["infra"]:
        check_text(text("{}", Option("infra")), options["infra"])
        resources["infra"] = options["infra"]
    accelerator = sky_accelerator(options)
    if accelerator is not None and accelerator.tpu_type:
        resources["accelerators"] = accelerator.name
        if accelerator.runtime_version is not None:
            resources["accelerator_args"] = {"runtime_version": accelerator.runtime_version}
    elif accelerator is not None:
        resources["accelerators"] = f"{accelerator.name}:{accelerator.count}"
    if options["cpus"]:
        # More cores are accepted: few machines have an exact number.
        resources["cpus"] = f"{options['cpus']}+"
    if options["mem"]:
        resources["memory"] = f"{_gibibytes(options['mem'])}+"
    if options["image"]:
        resources["image_id"] = f"docker:{options['image']}"
    resources["use_spot"] = options["spot"]
    # Without 137: after an error of one node SkyPilot kills the other ones, and reports 137 for them.
    resources["job_recovery"] = {"recover_on_exit_codes": [STOPPED]}
    return resources


def _check_bucket(bucket: str) -> None:
    """Raise UsageError for a name without a scheme. SkyPilot would upload a local folder of this name."""
    if "://" not in bucket:
        what = text("{} is not a URL", Option("bucket", bucket))
        why = "without gs:// or s3:// it is a local folder"
        raise usage_error(what, why, text("{}", Option("bucket", f"gs://{bucket}")))


def _gibibytes(memory: str) -> str:
    """Return the number of a size such as `900G`. SkyPilot counts memory in GiB.

    >>> _gibibytes("900G")
    '900'
    """
    match = _GIBIBYTES.fullmatch(memory)
    if match is None:
        what = text("{} is invalid", Option("mem", memory))
        raise usage_error(what, "SkyPilot counts memory in GiB", text("{}", Option("mem", "900G")))
    return match[1]


def _divides_nodes(job: LaunchJob, options: SkyOptions) -> bool:
    """Return whether the processes get their numbers from SkyPilot.

    SkyPilot starts the command on each host of a TPU slice, and counts the hosts as nodes. A training gets its
    numbers from the TPU VM: JAX numbers the processes in the order of the chips.
    """
    if options["nodes"] > 1:
        return True
    accelerator = sky_accelerator(options)
    return accelerator is not None and bool(accelerator.tpu_type) and job.command.has_shares


def _run_script(job: LaunchJob, options: SkyOptions, recipe_text: str) -> str:
    """Return the commands of every node. They exit with 75 if the process is killed."""
    lines = ["set -e"]
    if _divides_nodes(job, options):
        lines += [
            f'export JAX_COORDINATOR_ADDRESS="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{DEFAULT_PORT}"',
            'export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES"',
            'export JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"',
        ]
    command = command_line(["prep", *job.command.words])
    if job.command.recipe:
        name, _, *words = job.command.words
        recipe = f"{RECIPE_FOLDER}/{command_line([PurePosixPath(job.command.recipe).name])}"
        command = f"prep {name} {recipe} {command_line(words)}".rstrip()
        lines.append(f"mkdir -p {RECIPE_FOLDER}")
        lines.append(f"printf %s {command_line([recipe_text])} > {recipe}")
    lines += [
        *job.setup,
        "code=0",
        f"{command} || code=$?",
        f"case $code in {RESTARTABLE}) exit {STOPPED} ;; esac",
        'exit "$code"',
    ]
    return script(lines)
