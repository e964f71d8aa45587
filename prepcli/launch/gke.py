"""The JobSet for a command on Kubernetes with one process per pod. The functions do no I/O."""

from __future__ import annotations

import re
import shlex
from typing import Annotated

from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import JsonObject
from prepcli.core.option_spec import REQUIRED, flag, option
from prepcli.core.process_address import DEFAULT_PORT
from prepcli.launch.hardware import (
    TPU_GENERATIONS,
    Hardware,
    TpuGeneration,
    Training,
    num_chips,
    number_of_chips,
    plain_hardware,
)
from prepcli.launch.job import (
    NOT_RUN,
    RESTARTABLE_CODES,
    GraceOptions,
    LaunchedCommand,
    LaunchJob,
    NodeOptions,
    RestartOptions,
    ScriptOptions,
    as_label,
    check_label,
    comment,
    fill_template,
    yaml_text,
)
from prepcli.models.mesh import num_slices

# Folder of the recipe and the start script in a container.
FILES_FOLDER = "/etc/prep"
START_FILE = "start.sh"
# Folder in a container where the volume with checkpoints, data and runs is mounted.
WORK_FOLDER = "/work"
CONTAINER = "prep"
PODS = "train"
# Label that JobSet gives to its pods.
JOB_SET_KEY = "jobset.sigs.k8s.io/jobset-name"
JOB_INDEX_FIELD = "metadata.labels['jobset.sigs.k8s.io/job-index']"
# Environment variable with the index of the Job. Each Job is one TPU slice.
SLICE_INDEX = "MEGASCALE_SLICE_ID"
# Label by which Kueue finds the queue of a JobSet.
QUEUE_KEY = "kueue.x-k8s.io/queue-name"
# Label and taint of spot nodes.
SPOT_KEY = "cloud.google.com/gke-spot"
EXCLUSIVE_KEY = "alpha.jobset.sigs.k8s.io/exclusive-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"
# RFC 1123: parts of letters, digits and inner hyphens, e.g. `team-a.runs`
_NAME_PART = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_OBJECT_NAME = re.compile(rf"{_NAME_PART}(\.{_NAME_PART})*")
# The name of a queue is the value of a label.
_MAX_NAME_CHARS = {"queue": 63, "claim": 253}
# `exec` makes prep receive the signals of the pod.
_START_SCRIPT = """\
set -e
export JAX_COORDINATOR_ADDRESS=@address
export JAX_NUM_PROCESSES=@nodes
export JAX_PROCESS_ID=@index
@environment
exec @command
"""


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


def gke_manifest(job: LaunchJob, options: GkeOptions) -> str:
    """Return the YAML of a job: a ConfigMap with the recipe and the start script, and the JobSet.

    All pods restart if one exits with 75 or is killed, or if its node is lost. An error of the command ends the job.
    """
    check_label(job.name)
    for key, max_chars in _MAX_NAME_CHARS.items():
        name: str | None = options[key]
        if name is not None and not (len(name) <= max_chars and _OBJECT_NAME.fullmatch(name)):
            why = f"a name has up to {max_chars} letters a-z and digits, with `-` and `.` between them"
            what = text("{} is invalid", Option(key, name))
            raise usage_error(what, why, text("{}", Option(key, as_label(name))))
    num_jobs = job.num_slices if _is_tpu(options) else 1
    # Keys of a ConfigMap are file names.
    recipe = re.sub(r"[^-._a-zA-Z0-9]", "-", job.command.recipe_name)
    index = "$JOB_COMPLETION_INDEX"
    if num_jobs > 1:
        # Counted over all slices, e.g. 2 slices of 4 nodes: pod 1 of slice 1 is 4 * 1 + 1 = 5.
        index = f"$(({options['nodes'] // num_jobs} * {SLICE_INDEX} + JOB_COMPLETION_INDEX))"
    files: JsonObject = {recipe: job.recipe_text} if recipe else {}
    files[START_FILE] = fill_template(
        _START_SCRIPT,
        address=f"{_first_host(job)}:{DEFAULT_PORT}",
        nodes=options["nodes"],
        index=index,
        environment=job.environment_lines,
        command=job.command.line(shlex.quote(f"{FILES_FOLDER}/{recipe}")),
    )
    config_map: JsonObject = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job.name},
        "data": files,
    }
    submission = "Submit with `kubectl create -f FILE`."
    title = comment(f"Runs `{job.command.title}` with one process per pod. {submission}")
    origin = comment(f"{NOT_RUN} It follows the schema of JobSet v1alpha2.")
    documents = yaml_text([config_map, _job_set(job, options, num_jobs)])
    return f"{title}\n{origin}\n{documents}"


def _job_set(job: LaunchJob, options: GkeOptions, num_jobs: int) -> JsonObject:
    """Return the JobSet: one Job per slice of TPUs, or one Job with all nodes of GPUs."""
    metadata: JsonObject = {"name": job.name}
    if options["queue"]:
        metadata["labels"] = {QUEUE_KEY: options["queue"]}
    if _is_tpu(options):
        # The nodes of a slice are one node pool. Without the annotation, the pods of a Job may be
        # in several slices.
        metadata["annotations"] = {EXCLUSIVE_KEY: NODE_POOL}
    nodes = options["nodes"] // num_jobs
    # The first matching rule applies. A drained pod counts as a failure that the JobSet may
    # restart, before its exit code is compared.
    drained: JsonObject = {
        "action": "Count",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    codes: JsonObject = {
        "containerName": CONTAINER,
        # A restart would repeat any other error, e.g. 127 of a missing program.
        "operator": "NotIn",
        "values": [*RESTARTABLE_CODES],
    }
    pods: JsonObject = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        # No restart of a single pod: the JobSet restarts all pods together.
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [drained, {"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": _pod(job, options, num_jobs)},
    }
    end_rule: JsonObject = {
        "name": "endAfterError",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [end_rule]},
            "replicatedJobs": [{"name": PODS, "replicas": num_jobs, "template": {"spec": pods}}],
        },
    }


def _pod(job: LaunchJob, options: GkeOptions, num_jobs: int) -> JsonObject:
    pod: JsonObject = {}
    selector = _node_selector(options)
    if selector:
        pod["nodeSelector"] = selector
    if options["spot"]:
        pod["tolerations"] = [
            {"key": SPOT_KEY, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    if options["nodes"] > 1 and not _is_tpu(options):
        # Without it, two pods share a node if each requests a part of its GPUs.
        term: JsonObject = {
            "labelSelector": {"matchLabels": {JOB_SET_KEY: job.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
        pod["affinity"] = {
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        }
    work: JsonObject = {"emptyDir": {}}
    if options["claim"]:
        work = {"persistentVolumeClaim": {"claimName": options["claim"]}}
    return {
        **pod,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options["grace"],
        "containers": [_container(job, options, num_jobs)],
        "volumes": [{"name": "files", "configMap": {"name": job.name}}, {"name": "work", **work}],
    }


def _container(job: LaunchJob, options: GkeOptions, num_jobs: int) -> JsonObject:
    container: JsonObject = {
        "name": CONTAINER,
        "image": options["image"],
        # A file, because Kubernetes expands `$(NAME)` in inline commands.
        "command": ["bash", f"{FILES_FOLDER}/{START_FILE}"],
        "workingDir": WORK_FOLDER,
        "volumeMounts": [
            {"name": "files", "mountPath": FILES_FOLDER},
            {"name": "work", "mountPath": WORK_FOLDER},
        ],
    }
    if num_jobs > 1:
        # Variables of libtpu and JAX, see `jax/_src/clusters/cloud_tpu_cluster.py`. The address has no port: libtpu
        # and JAX have ports of their own.
        container["env"] = [
            {"name": SLICE_INDEX, "valueFrom": {"fieldRef": {"fieldPath": JOB_INDEX_FIELD}}},
            {"name": "MEGASCALE_NUM_SLICES", "value": str(num_jobs)},
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": _first_host(job)},
        ]
    device = "google.com/tpu" if _is_tpu(options) else "nvidia.com/gpu"
    counts = {device: options["devices_per_node"], "cpu": options["cpus"], "memory": options["mem"]}
    resources: JsonObject = {name: str(count) for name, count in counts.items() if count}
    if resources:
        container["resources"] = {"requests": resources, "limits": resources}
    return container


def _first_host(job: LaunchJob) -> str:
    """Return the host name of pod 0 of the first Job.

    JobSet names pods JOBSET-JOB-INDEX-POD, and its headless service has the name of the JobSet.
    """
    return f"{job.name}-{PODS}-0-0.{job.name}"


def _node_selector(options: GkeOptions) -> JsonObject:
    prefix = "cloud.google.com/gke"
    selector: JsonObject = {}
    if options["accelerator"]:
        device = "tpu-accelerator" if _is_tpu(options) else "accelerator"
        selector[f"{prefix}-{device}"] = options["accelerator"]
    if options["topology"]:
        selector[f"{prefix}-tpu-topology"] = options["topology"]
    if options["spot"]:
        selector[SPOT_KEY] = "true"
    return selector


def _is_tpu(options: GkeOptions) -> bool:
    return (options["accelerator"] or "").startswith("tpu")


def gke_hardware(
    options: GkeOptions, command: LaunchedCommand, training: Training | None
) -> Hardware:
    """Return the hardware of a JobSet. A command without a mesh has no training.

    Raises:
        UsageError: An option is missing, and the pods would get no devices, or the options contradict each other.
    """
    if training is None:
        return plain_hardware(options["nodes"], None)
    label = options["accelerator"]
    labels = {known.gke_label: known for known in TPU_GENERATIONS.values() if known.gke_label}
    if _is_tpu(options):
        if label not in labels:
            example = Option("accelerator", next(iter(labels)))
            hint = did_you_mean(label or "", labels) or text("{}", example)
            raise usage_error(f"unknown TPU label `{label}`", f"known: {', '.join(labels)}", hint)
        return _tpu_pod_hardware(options, labels[label], training)
    if options["topology"]:
        topology = Option("topology")
        what = text("{} is for TPUs only", topology)
        why = text("{} names no TPU", Option("accelerator", label))
        raise usage_error(what, why, text("remove {}", topology))
    if options["devices_per_node"] is None:
        count, rest = divmod(training.num_devices or 0, options["nodes"])
        raise _missing_devices_error(count if count and not rest else 8)
    return plain_hardware(options["nodes"], options["devices_per_node"])


def _missing_devices_error(suggested: int) -> PrepError:
    why = "a pod gets the devices that it requests, and without a request it gets none"
    what = text("{} is missing", Option("devices_per_node"))
    return usage_error(what, why, text("{}", Option("devices_per_node", suggested)))


def _tpu_pod_hardware(
    options: GkeOptions, generation: TpuGeneration, training: Training
) -> Hardware:
    """Return the hardware of TPU slices with several nodes. Raise PrepError if the options contradict them."""
    slices = num_slices(training.slices)
    topology = options["topology"]
    # The topology of a slice of the training's size, or an empty text.
    chips = number_of_chips(generation, training.devices_per_slice)
    fitting = next((shape for shape in generation.slices if num_chips(shape) == chips), "")
    if topology is None:
        why = "GKE finds the nodes of a slice by its topology"
        example = Option("topology", fitting or generation.slices[-1])
        raise usage_error(text("{} is missing", Option("topology")), why, text("{}", example))
    if not generation.has_slice(topology):
        what = text("{} is invalid", Option("topology", topology))
        hint = text("use {} with one of: {}", Option("topology"), ", ".join(generation.slices))
        if fitting:
            hint = text("{}", Option("topology", fitting))
        raise usage_error(what, f"no slice of {generation.name} has this topology", hint)
    sizes = generation.node_sizes(topology)
    devices = options["devices_per_node"]
    if devices is None:
        raise _missing_devices_error(sizes[0])
    if devices not in sizes:
        what = text("{} is invalid", Option("devices_per_node", devices))
        known = " or ".join(map(str, sizes))
        why = f"a node of a {generation.name} of {topology} has {known} chips"
        raise usage_error(what, why, text("{}", Option("devices_per_node", sizes[0])))
    # 2 slices of 4x4x8 with 4 chips per node: 2 * 128 / 4 = 64 nodes.
    nodes = slices * num_chips(topology) // devices
    slices_text = f"{slices} {'slice' if slices == 1 else 'slices'}"
    if options["nodes"] != nodes:
        why = f"{slices_text} of {topology} with {devices} chips per node: {nodes} in all"
        what = text("{} is invalid", Option("nodes", options["nodes"]))
        raise usage_error(what, why, text("{}", Option("nodes", nodes)))
    fitting_options = ""
    if fitting:
        fitting_nodes = slices * num_chips(fitting) // generation.node_sizes(fitting)[0]
        fitting_options = text(
            "{} and {}", Option("topology", fitting), Option("nodes", fitting_nodes)
        )
    return Hardware(
        name=f"{slices_text} of {generation.name}:{topology}",
        nodes=nodes,
        node_devices=devices * generation.devices_per_chip,
        fitting_options=fitting_options,
    )
