"""The JobSet for a command on Kubernetes with one process per pod. The functions do no I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

import yaml

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.json_types import JsonObject, JsonValue
from prepcli.core.process_address import DEFAULT_PORT
from prepcli.launch.job import LaunchJob, as_label, check_label
from prepcli.launch.options import GkeOptions
from prepcli.launch.shell import (
    NOT_RUN,
    RESTARTABLE_CODES,
    command_line,
    comment,
    environment_lines,
    script,
)

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
MAX_NAME_CHARS = 253
# The name of a queue is the value of a label.
MAX_LABEL_CHARS = 63
# Keys that no YAML parser takes for another type. YAML 1.1 takes `y` and `n` for booleans.
PLAIN_KEY = re.compile("[A-Za-z][-A-Za-z0-9_./]+")


def _check_object_name(option: str, name: str | None, max_chars: int) -> None:
    """Raise UsageError for an invalid name of an object of Kubernetes."""
    if name is None or (len(name) <= max_chars and _OBJECT_NAME.fullmatch(name)):
        return
    what = text("{} is invalid", Option(option, name))
    why = f"a name has up to {max_chars} letters a-z and digits, with `-` and `.` between them"
    raise usage_error(what, why, text("{}", Option(option, as_label(name))))


def gke_manifest(
    job: LaunchJob, options: GkeOptions, *, recipe_text: str = "", num_slices: int = 1
) -> str:
    """Return the YAML of a job: a ConfigMap with the recipe and the start script, and the JobSet.

    All pods restart if one exits with 75 or is killed, or if its node is lost. An error of the command ends the job.

    Args:
        job: The job.
        options: Options of the JobSet. `check_training` checks them.
        recipe_text: Text of the recipe of a training.
        num_slices: Number of TPU slices. Each has an equal part of the nodes.
    """
    check_label(job.name)
    _check_object_name("queue", options["queue"], MAX_LABEL_CHARS)
    _check_object_name("claim", options["claim"], MAX_NAME_CHARS)
    num_jobs = num_slices if _is_tpu(options) else 1
    files: JsonObject = {START_FILE: _start_script(job, options, num_jobs)}
    if job.command.recipe:
        files = {_recipe_file(job): recipe_text, **files}
    config_map: JsonObject = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job.name},
        "data": files,
    }
    head = [
        comment(
            f"Runs `{job.command.title}` with one process per pod. Submit with `kubectl create -f FILE`."
        ),
        comment(f"{NOT_RUN} It follows the schema of JobSet v1alpha2."),
    ]
    return f"{script(head)}{yaml_text([config_map, _job_set(job, options, num_jobs)])}"


def yaml_text(documents: Iterable[JsonObject]) -> str:
    """Return mappings as YAML documents in block style.

    All strings are quoted or literal blocks. PyYAML would leave e.g. `1e3` plain, and the parser
    of Kubernetes would take it for a number.
    """
    return yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        # Folded lines would be hard to read in a manifest.
        width=math.inf,
    )


class _Dumper(yaml.SafeDumper):
    """Dumper with quoted strings, literal blocks for scripts, and without aliases."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True: a dict in two places, such as the requests and limits of resources, is written twice."""
        return True

    def represent_text(self, value: str) -> yaml.ScalarNode:
        """Represent text of several lines as a literal block, and other text in quotes.

        Raises:
            UsageError: The text has bytes of a path without UTF-8.
        """
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"{value[max(error.start - 20, 0) : error.end]!a} is not UTF-8"
            raise usage_error(what, "YAML is UTF-8", "rename the file") from None
        style = '"'
        lines = value.split("\n")
        # Other line breaks than "\n" do not survive in a literal block.
        if len(lines) > 1 and all(line.isprintable() for line in lines):
            style = "|"
        return self.represent_scalar("tag:yaml.org,2002:str", value, style)

    def represent_sequence_of_numbers(self, values: list[JsonValue]) -> yaml.SequenceNode:
        """Represent a list of numbers in one line."""
        node = self.represent_list(values)
        node.flow_style = bool(values) and all(isinstance(value, int) for value in values)
        return node

    def represent_object(self, mapping: JsonObject) -> yaml.MappingNode:
        """Represent a mapping without quotes around usual keys."""
        node = self.represent_dict(mapping)
        for key, _ in node.value:
            if PLAIN_KEY.fullmatch(key.value):
                # PyYAML still quotes the words that it takes for other types, such as `null`.
                key.style = None
        return node


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_sequence_of_numbers)
_Dumper.add_representer(dict, _Dumper.represent_object)


def _job_set(job: LaunchJob, options: GkeOptions, num_jobs: int) -> JsonObject:
    """Return the JobSet: one Job per slice of TPUs, or one Job with all nodes of GPUs."""
    end_rule: JsonObject = {
        "name": "endAfterError",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    metadata: JsonObject = {"name": job.name}
    if options["queue"]:
        metadata["labels"] = {QUEUE_KEY: options["queue"]}
    if _is_tpu(options):
        # The nodes of a slice are one node pool. Without the annotation, the pods of a Job may be
        # in several slices.
        metadata["annotations"] = {EXCLUSIVE_KEY: NODE_POOL}
    pods = _pods(job, options, num_jobs)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [end_rule]},
            "replicatedJobs": [{"name": PODS, "replicas": num_jobs, "template": {"spec": pods}}],
        },
    }


def _pods(job: LaunchJob, options: GkeOptions, num_jobs: int) -> JsonObject:
    """Return the Job: one pod per node. The first failure ends all pods."""
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
    return {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        # No restart of a single pod: the JobSet restarts all pods together.
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [drained, {"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": _pod(job, options, num_jobs)},
    }


def _pod(job: LaunchJob, options: GkeOptions, num_jobs: int) -> JsonObject:
    work: JsonObject = {"emptyDir": {}}
    if options["claim"]:
        work = {"persistentVolumeClaim": {"claimName": options["claim"]}}
    pod: JsonObject = {}
    selector = _node_selector(options)
    if selector:
        pod["nodeSelector"] = selector
    if options["spot"]:
        pod["tolerations"] = [
            {"key": SPOT_KEY, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    if options["nodes"] > 1 and not _is_tpu(options):
        pod["affinity"] = _one_pod_per_node(job)
    return {
        **pod,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options["grace"],
        "containers": [_container(job, options, num_jobs)],
        "volumes": [{"name": "files", "configMap": {"name": job.name}}, {"name": "work", **work}],
    }


def _one_pod_per_node(job: LaunchJob) -> JsonObject:
    """Return the anti-affinity of a job's pods.

    Without it, two pods share a node if each requests a part of its GPUs.
    """
    term: JsonObject = {
        "labelSelector": {"matchLabels": {JOB_SET_KEY: job.name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _container(job: LaunchJob, options: GkeOptions, num_jobs: int) -> JsonObject:
    """Return the spec of the container."""
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
        container["env"] = _slice_variables(job, num_jobs)
    resources = _resources(options)
    if resources:
        container["resources"] = {"requests": resources, "limits": resources}
    return container


def _slice_variables(job: LaunchJob, num_jobs: int) -> list[JsonValue]:
    """Return the variables of libtpu and JAX for the slices of a job.

    See `jax/_src/clusters/cloud_tpu_cluster.py`. The address has no port: libtpu and JAX have ports of their own.
    """
    index: JsonObject = {"fieldRef": {"fieldPath": JOB_INDEX_FIELD}}
    return [
        {"name": SLICE_INDEX, "valueFrom": index},
        {"name": "MEGASCALE_NUM_SLICES", "value": str(num_jobs)},
        {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": _first_host(job)},
    ]


def _first_host(job: LaunchJob) -> str:
    """Return the host name of pod 0 of the first Job.

    JobSet names pods JOBSET-JOB-INDEX-POD, and its headless service has the name of the JobSet.
    """
    return f"{job.name}-{PODS}-0-0.{job.name}"


def _start_script(job: LaunchJob, options: GkeOptions, num_jobs: int) -> str:
    """Return the script of a container. `exec` makes prep receive the signals of the pod."""
    index = "$JOB_COMPLETION_INDEX"
    if num_jobs > 1:
        # Counted over all slices, e.g. 2 slices of 4 nodes: pod 1 of slice 1 is 4 * 1 + 1 = 5.
        index = f"$(({options['nodes'] // num_jobs} * {SLICE_INDEX} + JOB_COMPLETION_INDEX))"
    words = job.command.words_with_recipe(f"{FILES_FOLDER}/{_recipe_file(job)}")
    lines = [
        "set -e",
        f"export JAX_COORDINATOR_ADDRESS={_first_host(job)}:{DEFAULT_PORT}",
        f"export JAX_NUM_PROCESSES={options['nodes']}",
        f"export JAX_PROCESS_ID={index}",
        *environment_lines(job),
        f"exec {command_line(['prep', *words])}",
    ]
    return script(lines)


def _resources(options: GkeOptions) -> JsonObject:
    device = "google.com/tpu" if _is_tpu(options) else "nvidia.com/gpu"
    counts = {device: options["devices_per_node"], "cpu": options["cpus"], "memory": options["mem"]}
    return {name: str(count) for name, count in counts.items() if count}


def _node_selector(options: GkeOptions) -> JsonObject:
    """Return the labels of the nodes."""
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


def _recipe_file(job: LaunchJob) -> str:
    """Return the name of the recipe in the ConfigMap. Its keys are file names."""
    return re.sub(r"[^-._a-zA-Z0-9]", "-", PurePosixPath(job.command.recipe).name)
