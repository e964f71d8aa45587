"""The managed job of SkyPilot for a command with one process per node. The functions do no I/O.

Keys: https://docs.skypilot.co/en/latest/reference/yaml-spec.html.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Annotated

from prepcli.core.errors import STOPPED, Option, text, usage_error
from prepcli.core.json_values import JsonObject
from prepcli.core.option_spec import flag, option
from prepcli.core.process_address import DEFAULT_PORT
from prepcli.launch.hardware import (
    GKE,
    RUNTIME_VERSIONS,
    Hardware,
    Training,
    plain_hardware,
    tpu_vm_hardware,
)
from prepcli.launch.job import (
    NOT_RUN,
    RESTARTABLE,
    LaunchedCommand,
    LaunchJob,
    NodeOptions,
    ScriptOptions,
    check_label,
    check_texts,
    comment,
    fill_template,
    yaml_text,
)

# First version with `recover_on_exit_codes`.
MIN_VERSION = "0.11.2"
BUCKET_FOLDER = "/bucket"
RECIPE_FOLDER = "~/.prep-launch"
# `K`, `M` and `T` of other engines would be silently read as something else.
_GIBIBYTES = re.compile(r"([0-9]+)(G|GB|Gi|GiB)?")
# Prefix of TPUs in SkyPilot's names.
TPU = "tpu-"
# `H100`, `H100:8`, `tpu-v5p-16`. SkyPilot also accepts fractions, which no process of prep can use.
_ACCELERATOR = re.compile(r"([^\s:]+)(?::([1-9][0-9]{0,5}))?")
# Kubernetes names its TPUs `tpu-v5p-slice`, with a count.
_TPU_VM = re.compile(r"tpu-([^-]+-[0-9]+)")
# The setup lines are here. SkyPilot runs its `setup` in another shell: variables and the working folder would be lost,
# and a failed line would be ignored.
_RUN_SCRIPT = """\
set -e
@before
code=0
@command || code=$?
case $code in @restartable) exit @stopped ;; esac
exit "$code"
"""
_NUMBERS = f"""\
export JAX_COORDINATOR_ADDRESS="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{DEFAULT_PORT}"
export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES"
export JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"\
"""


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


def sky_task(job: LaunchJob, options: SkyOptions) -> str:
    """Return the YAML of a managed job.

    SkyPilot starts all nodes again after a preemption, and if a process exits with 75 or is killed. It has no limit on
    these restarts.
    """
    check_label(job.name)
    accelerator = sky_accelerator(options)
    task: JsonObject = {
        "name": job.name,
        "num_nodes": options["nodes"],
        "resources": _resources(options, accelerator),
    }
    if job.env:
        task["envs"] = dict(job.env)
    bucket = options["bucket"]
    if bucket:
        if "://" not in bucket:
            # SkyPilot would upload a local folder of this name.
            what = text("{} is not a URL", Option("bucket", bucket))
            why = "without gs:// or s3:// it is a local folder"
            raise usage_error(what, why, text("{}", Option("bucket", f"gs://{bucket}")))
        task["file_mounts"] = {BUCKET_FOLDER: {"source": bucket, "mode": "MOUNT"}}
    before: list[str] = []
    # SkyPilot starts the command on each host of a TPU slice, and counts the hosts as nodes. A training gets its
    # numbers from the TPU VM: JAX numbers the processes in the order of the chips.
    is_slice = accelerator is not None and bool(accelerator.tpu_type)
    if options["nodes"] > 1 or (is_slice and job.command.has_shares):
        before.append(_NUMBERS)
    recipe = f"{RECIPE_FOLDER}/{shlex.quote(job.command.recipe_name)}"
    if job.command.recipe:
        before.append(f"mkdir -p {RECIPE_FOLDER}")
        before.append(f"printf %s {shlex.quote(job.recipe_text)} > {recipe}")
    task["run"] = fill_template(
        _RUN_SCRIPT,
        before=[*before, *job.setup],
        command=job.command.line(recipe),
        restartable=RESTARTABLE,
        stopped=STOPPED,
    )
    submission = "Submit with `sky jobs launch FILE`."
    title = comment(f"Runs `{job.command.title}` with one process per node. {submission}")
    version = f"SkyPilot {MIN_VERSION} or newer."
    origin = comment(f"{version} {NOT_RUN} SkyPilot's own parser accepts it.")
    return f"{title}\n{origin}\n{yaml_text([task])}"


def _resources(options: SkyOptions, accelerator: SkyAccelerator | None) -> JsonObject:
    """Return the machines of a job."""
    resources: JsonObject = {}
    check_texts(infra=options["infra"])
    if options["infra"]:
        resources["infra"] = options["infra"]
    if accelerator is not None and accelerator.tpu_type:
        resources["accelerators"] = accelerator.name
        # SkyPilot's default is wrong for v5e and old for v2 to v4.
        version = RUNTIME_VERSIONS.get(accelerator.tpu_type.partition("-")[0])
        if version is not None:
            resources["accelerator_args"] = {"runtime_version": version}
    elif accelerator is not None:
        resources["accelerators"] = f"{accelerator.name}:{accelerator.count}"
    if options["cpus"]:
        # More cores are accepted: few machines have an exact number.
        resources["cpus"] = f"{options['cpus']}+"
    memory = options["mem"]
    if memory:
        match = _GIBIBYTES.fullmatch(memory)
        if match is None:
            what = text("{} is invalid", Option("mem", memory))
            hint = text("{}", Option("mem", "900G"))
            raise usage_error(what, "SkyPilot counts memory in GiB", hint)
        resources["memory"] = f"{match[1]}+"
    if options["image"]:
        resources["image_id"] = f"docker:{options['image']}"
    resources["use_spot"] = options["spot"]
    # Without 137: after an error of one node SkyPilot kills the other ones, and reports 137 for them.
    resources["job_recovery"] = {"recover_on_exit_codes": [STOPPED]}
    return resources


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyAccelerator:
    """The accelerators of a node.

    Attributes:
        name: Name in SkyPilot, e.g. `H100` or `tpu-v5p-16`.
        count: Number per node. A slice of TPU VMs is one.
        tpu_type: Type of a slice of TPU VMs, e.g. `v5p-16`. Empty for other accelerators.
    """

    name: str
    count: int
    tpu_type: str = ""


def sky_accelerator(options: SkyOptions) -> SkyAccelerator | None:
    """Return the accelerators of a node, or None without `--accelerator`.

    Raises:
        UsageError: SkyPilot would refuse the name or the number, or take another one.
    """
    devices = options["devices_per_node"]
    devices_option = Option("devices_per_node", devices)
    if not options["accelerator"]:
        if devices:
            what = text("{} is missing", Option("accelerator"))
            why = text("{} counts accelerators", devices_option)
            raise usage_error(what, why, text("{}", Option("accelerator", "H100")))
        return None
    invalid = text("{} is invalid", Option("accelerator", options["accelerator"]))
    match = _ACCELERATOR.fullmatch(options["accelerator"])
    if match is None:
        hint = text("{}", Option("accelerator", "H100:8"))
        raise usage_error(invalid, "the form is NAME or NAME:N", hint)
    name, count = match.groups()
    if name.lower().startswith(TPU):
        # SkyPilot accepts capitals, and does not see that the slice has several hosts.
        name = name.lower()
    vm = _TPU_VM.fullmatch(name)
    if devices and vm is not None:
        what = text("{} has no effect on {}", devices_option, name)
        why = "the number in the name of a TPU is its size"
        raise usage_error(what, why, text("remove {}", devices_option))
    if devices and count:
        what = text("{} excludes {}", Option("accelerator", f"{name}:{count}"), devices_option)
        raise usage_error(what, f"`:{count}` is the number", text("remove {}", devices_option))
    if vm is None:
        # Without a number SkyPilot takes one.
        return SkyAccelerator(name=name, count=devices or int(count or 1))
    if count not in (None, "1"):
        hint = text("{}", Option("accelerator", name))
        raise usage_error(invalid, "a job has one slice, with all of its hosts", hint)
    return SkyAccelerator(name=name, count=1, tpu_type=vm[1])


def sky_hardware(
    options: SkyOptions, command: LaunchedCommand, training: Training | None
) -> Hardware:
    """Return the nodes and devices of a job. A command without a mesh has no training.

    Raises:
        UsageError: The accelerator is invalid, or SkyPilot cannot start this number of slices.
    """
    nodes = options["nodes"]
    accelerator = sky_accelerator(options)
    if accelerator is None:
        return plain_hardware(nodes, None)
    num_devices = None if training is None else training.num_devices
    if not accelerator.tpu_type:
        fitting_options = ""
        if num_devices and num_devices % nodes == 0:
            fitting = f"{accelerator.name}:{num_devices // nodes}"
            fitting_options = text("{}", Option("accelerator", fitting))
        return plain_hardware(nodes, accelerator.count, fitting_options=fitting_options)
    hardware = tpu_vm_hardware(accelerator.tpu_type, num_devices, prefix=TPU)
    if hardware is not None and nodes == 1:
        return hardware
    if hardware is not None and (hardware.nodes > 1 or command.has_mesh):
        what = text("{} is not supported with {}", Option("nodes", nodes), accelerator.name)
        hint = text("{}: the slice has all of its hosts", Option("nodes", 1))
        if command.has_mesh:
            hint = text("{}, or use {}, which starts several slices", Option("nodes", 1), GKE)
        raise usage_error(what, "prep starts one slice of TPUs with SkyPilot", hint)
    return plain_hardware(nodes, None)
