"""The JobSet that trains on Kubernetes with one process per pod. Pure, no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from prepcli.errors import FAILED, USAGE
from prepcli.launch.job import DEFAULT_GRACE_S, LaunchJob, check_label
from prepcli.launch.shell import command_line, comment, environment_lines, script
from prepcli.launch.yaml_text import Yaml, yaml_document
from trainer.models.process_address import DEFAULT_PORT

FILES_FOLDER = "/etc/prep"  # in a container: the recipe and the start script
START_FILE = "start.sh"
WORK_FOLDER = "/work"  # in a container: the volume with checkpoints, data and runs
CONTAINER = "prep"
PODS = "train"
JOB_SET_KEY = "jobset.sigs.k8s.io/jobset-name"  # label of pods
JOB_INDEX_FIELD = "metadata.labels['jobset.sigs.k8s.io/job-index']"
JOB_INDEX = "JOB_INDEX"  # variable with the index of the Job, which is that of the slice
EXCLUSIVE_KEY = "alpha.jobset.sigs.k8s.io/exclusive-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"


@dataclass(frozen=True, slots=True, kw_only=True)
class GkeOptions:
    """Options of a JobSet.

    Attributes:
        image: Container image with prep.
        nodes: Number of pods of all slices, one per node.
        devices_per_node: GPUs or TPU chips of each pod.
        accelerator: Label of the nodes: a GPU such as `nvidia-h100-80gb`, or a TPU such as `tpu-v5p-slice`.
        topology: Topology of a TPU slice, such as `4x4x8`.
        cpus: CPU cores of each pod.
        mem: Memory of each pod, such as `900Gi`.
        claim: Persistent volume claim, mounted as the working folder; None for a folder that ends with the pod.
        grace_s: Seconds that a pod has to save when its node is drained.
    """

    image: str
    nodes: int = 1
    devices_per_node: int | None = None
    accelerator: str | None = None
    topology: str | None = None
    cpus: int | None = None
    mem: str | None = None
    claim: str | None = None
    grace_s: int = DEFAULT_GRACE_S


def gke_manifest(job: LaunchJob, options: GkeOptions, *, recipe_text: str, num_slices: int = 1) -> str:
    """Return the YAML of a job: a ConfigMap with the recipe and the start script, and the JobSet.

    All pods restart if one exits with 75, or if its node is lost. An error of the recipe or of the training ends
    the job.

    Args:
        job: The training.
        options: Options of the JobSet; `check_training` checks them.
        recipe_text: Text of the recipe.
        num_slices: Number of slices of TPUs; each has an equal part of the nodes.
    """
    check_label(job.name)
    num_jobs = num_slices if _is_tpu(options) else 1
    files: dict[str, Yaml] = {_recipe_file(job): recipe_text, START_FILE: _start_script(job, options, num_jobs)}
    config_map: dict[str, Yaml] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job.name},
        "data": files,
    }
    documents = [config_map, _job_set(job, options, num_jobs)]
    head = comment(f"Trains {job.recipe} with one process per pod. Submit with `kubectl create -f FILE`.")
    return f"{head}\n" + "---\n".join(yaml_document(document) for document in documents)


def _job_set(job: LaunchJob, options: GkeOptions, num_jobs: int) -> dict[str, Yaml]:
    """Return the JobSet: one Job per slice of TPUs, or one Job with all nodes of GPUs."""
    end_rule: dict[str, Yaml] = {
        "name": "endAfterError",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    # The nodes of a slice are one node pool. Without the annotation, the pods of a Job may be in several slices.
    annotations: dict[str, Yaml] = {"annotations": {EXCLUSIVE_KEY: NODE_POOL}} if _is_tpu(options) else {}
    pods = _pods(job, options, num_jobs)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, **annotations},
        "spec": {
            "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [end_rule]},
            "replicatedJobs": [{"name": PODS, "replicas": num_jobs, "template": {"spec": pods}}],
        },
    }


def _pods(job: LaunchJob, options: GkeOptions, num_jobs: int) -> dict[str, Yaml]:
    """Return the Job: one pod per node, of which the first failure ends all."""
    nodes = options.nodes // num_jobs
    drained: dict[str, Yaml] = {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes: dict[str, Yaml] = {"containerName": CONTAINER, "operator": "In", "values": [FAILED, USAGE]}
    return {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [drained, {"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": _pod(job, options, num_jobs)},
    }


def _pod(job: LaunchJob, options: GkeOptions, num_jobs: int) -> dict[str, Yaml]:
    claim: dict[str, Yaml] = {"persistentVolumeClaim": {"claimName": options.claim or ""}}
    work = claim if options.claim else {"emptyDir": {}}
    pod: dict[str, Yaml] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        "containers": [_container(options, num_jobs)],
        "volumes": [{"name": "files", "configMap": {"name": job.name}}, {"name": "work", **work}],
    }
    if options.nodes > 1 and not _is_tpu(options):
        pod = {"affinity": _one_pod_per_node(job), **pod}
    return {"nodeSelector": _node_selector(options), **pod} if options.accelerator else pod


def _one_pod_per_node(job: LaunchJob) -> dict[str, Yaml]:
    """Return the anti-affinity of a job's pods. Without it, pods that request part of a node's GPUs share a node."""
    term: dict[str, Yaml] = {
        "labelSelector": {"matchLabels": {JOB_SET_KEY: job.name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _container(options: GkeOptions, num_jobs: int) -> dict[str, Yaml]:
    container: dict[str, Yaml] = {
        "name": CONTAINER,
        "image": options.image,
        "command": ["bash", f"{FILES_FOLDER}/{START_FILE}"],  # not inline: Kubernetes expands `$(NAME)` there
        "workingDir": WORK_FOLDER,
        "volumeMounts": [{"name": "files", "mountPath": FILES_FOLDER}, {"name": "work", "mountPath": WORK_FOLDER}],
    }
    if num_jobs > 1:
        container["env"] = [{"name": JOB_INDEX, "valueFrom": {"fieldRef": {"fieldPath": JOB_INDEX_FIELD}}}]
    resources = _resources(options)
    return {**container, "resources": {"requests": resources, "limits": resources}} if resources else container


def _start_script(job: LaunchJob, options: GkeOptions, num_jobs: int) -> str:
    """Return the script of a container; `exec` makes prep receive the signals of the pod."""
    index = "$JOB_COMPLETION_INDEX"
    if num_jobs > 1:
        index = f"$(({options.nodes // num_jobs} * {JOB_INDEX} + JOB_COMPLETION_INDEX))"
    words = ["prep", "train", f"{FILES_FOLDER}/{_recipe_file(job)}", *job.train_words]
    lines = [
        "set -e",
        f"export JAX_COORDINATOR_ADDRESS={job.name}-{PODS}-0-0.{job.name}:{DEFAULT_PORT}",
        f"export JAX_NUM_PROCESSES={options.nodes}",
        f"export JAX_PROCESS_ID={index}",
        *environment_lines(job),
        f"exec {command_line(words)}",
    ]
    return script(lines)


def _resources(options: GkeOptions) -> dict[str, Yaml]:
    device = "google.com/tpu" if _is_tpu(options) else "nvidia.com/gpu"
    counts = {device: options.devices_per_node, "cpu": options.cpus, "memory": options.mem}
    return {name: str(count) for name, count in counts.items() if count}


def _node_selector(options: GkeOptions) -> dict[str, Yaml]:
    prefix = "cloud.google.com/gke"
    if not _is_tpu(options):
        return {f"{prefix}-accelerator": options.accelerator or ""}
    topology: dict[str, Yaml] = {f"{prefix}-tpu-topology": options.topology} if options.topology else {}
    return {f"{prefix}-tpu-accelerator": options.accelerator or "", **topology}


def _is_tpu(options: GkeOptions) -> bool:
    return (options.accelerator or "").startswith("tpu")


def _recipe_file(job: LaunchJob) -> str:
    """Return the name of the recipe in the ConfigMap, whose keys are file names."""
    return re.sub(r"[^-._a-zA-Z0-9]", "-", PurePosixPath(job.recipe).name)
