"""The JobSet, read back by PyYAML. Its start script is run by bash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.core.errors import UsageError
from prepcli.core.option_spec import with_defaults
from prepcli.launch.gke import FILES_FOLDER, GkeOptions, gke_manifest
from prepcli.launch.job import LaunchedCommand, LaunchJob
from prepcli.planning.work_units import Share, launcher_share
from tests.helpers.launched_jobs import train_command
from tests.helpers.scripts import install_recorders, run_script, texts, words

JOB = LaunchJob(command=train_command("recipes/llama-13b.toml"), name="llama-13b", max_restarts=7)


# The claim, the queue and spot nodes are optional.
JOB_SET = """\
apiVersion: "jobset.x-k8s.io/v1alpha2"
kind: "JobSet"
metadata:
  name: "llama-13b"
  labels:
    kueue.x-k8s.io/queue-name: "team-a"
spec:
  failurePolicy:
    maxRestarts: 7
    rules:
    - name: "endAfterError"
      action: "FailJobSet"
      onJobFailureReasons:
      - "PodFailurePolicy"
  replicatedJobs:
  - name: "train"
    replicas: 1
    template:
      spec:
        parallelism: 2
        completions: 2
        completionMode: "Indexed"
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: "Count"
            onPodConditions:
            - type: "DisruptionTarget"
              status: "True"
          - action: "FailJob"
            onExitCodes:
              containerName: "prep"
              operator: "NotIn"
              values: [75, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143, 144, 145,
                146, 147, 148, 149, 150, 151, 152, 153, 154, 155, 156, 157, 158, 159]
        template:
          spec:
            nodeSelector:
              cloud.google.com/gke-accelerator: "nvidia-l4"
              cloud.google.com/gke-spot: "true"
            tolerations:
            - key: "cloud.google.com/gke-spot"
              operator: "Equal"
              value: "true"
              effect: "NoSchedule"
            affinity:
              podAntiAffinity:
                requiredDuringSchedulingIgnoredDuringExecution:
                - labelSelector:
                    matchLabels:
                      jobset.sigs.k8s.io/jobset-name: "llama-13b"
                  topologyKey: "kubernetes.io/hostname"
            restartPolicy: "Never"
            terminationGracePeriodSeconds: 120
            containers:
            - name: "prep"
              image: "image"
              command:
              - "bash"
              - "/etc/prep/start.sh"
              workingDir: "/work"
              volumeMounts:
              - name: "files"
                mountPath: "/etc/prep"
              - name: "work"
                mountPath: "/work"
              resources:
                requests:
                  nvidia.com/gpu: "8"
                  cpu: "96"
                  memory: "1.5Ti"
                limits:
                  nvidia.com/gpu: "8"
                  cpu: "96"
                  memory: "1.5Ti"
            volumes:
            - name: "files"
              configMap:
                name: "llama-13b"
            - name: "work"
              persistentVolumeClaim:
                claimName: "runs"
"""


@pytest.fixture(scope="module")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorders")
    install_recorders(folder)
    return folder


def documents(
    job: LaunchJob, options: GkeOptions, recipe_text: str = "seed = 1\n"
) -> tuple[Any, Any]:
    """Return the ConfigMap and the JobSet."""
    config_map, job_set = yaml.safe_load_all(
        gke_manifest(replace(job, recipe_text=recipe_text), options)
    )
    return config_map, job_set


def pods_of(job_set: Any) -> Any:
    return job_set["spec"]["replicatedJobs"][0]["template"]["spec"]


def test_gke_manifest_has_every_option():
    values = {"image": "image", "nodes": 2, "devices_per_node": 8, "cpus": 96, "mem": "1.5Ti"}
    values |= {"accelerator": "nvidia-l4", "claim": "runs", "queue": "team-a", "spot": True}
    config_map, job_set = documents(JOB, with_defaults(GkeOptions, values))
    assert job_set == yaml.safe_load(JOB_SET)
    assert (config_map["kind"], config_map["metadata"]) == ("ConfigMap", {"name": "llama-13b"})
    assert [*config_map["data"]] == ["llama-13b.toml", "start.sh"]


@pytest.mark.parametrize(
    ("accelerator", "topology", "device", "selector"),
    [
        ("nvidia-h100-80gb", None, "nvidia.com/gpu", {"accelerator": "nvidia-h100-80gb"}),
        (
            "tpu-v5p-slice",
            "4x4x4",
            "google.com/tpu",
            {"tpu-accelerator": "tpu-v5p-slice", "tpu-topology": "4x4x4"},
        ),
    ],
)
def test_gke_manifest_selects_nodes(
    accelerator: str, topology: str | None, device: str, selector: dict[str, str]
):
    options = with_defaults(
        GkeOptions,
        {
            "image": "image",
            "devices_per_node": 4,
            "accelerator": accelerator,
            "topology": topology,
            "cpus": 8,
            "mem": "1Gi",
        },
    )
    pod = pods_of(documents(JOB, options)[1])["template"]["spec"]
    assert pod["nodeSelector"] == {
        f"cloud.google.com/gke-{key}": value for key, value in selector.items()
    }
    limits = {device: "4", "cpu": "8", "memory": "1Gi"}
    assert pod["containers"][0]["resources"] == {"requests": limits, "limits": limits}


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    recipe_text=texts, train_words=st.lists(words, max_size=3), values=st.lists(words, max_size=3)
)
def test_gke_start_script_passes_on_every_value(
    recorders: Path, recipe_text: str, train_words: list[str], values: list[str]
):
    env = {f"V{number}": value for number, value in enumerate(values)}
    job = LaunchJob(
        command=train_command("r/my run.toml", train_words), name="run", env=tuple(env.items())
    )
    config_map, _ = documents(
        job, with_defaults(GkeOptions, {"image": "image", "nodes": 3}), recipe_text
    )
    assert config_map["data"]["my-run.toml"] == recipe_text
    done = run_script(config_map["data"]["start.sh"], recorders, JOB_COMPLETION_INDEX="2")
    assert done.words_of("prep") == [["train", f"{FILES_FOLDER}/my-run.toml", *train_words]]
    place = {
        "JAX_COORDINATOR_ADDRESS": "run-train-0-0.run:11111",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
    }
    assert done.variables_of("prep").items() >= (place | env).items()


@pytest.mark.parametrize(
    ("slice_index", "pod_index", "process"), [(0, 0, 0), (0, 3, 3), (1, 0, 4), (2, 3, 11)]
)
def test_gke_slices_are_jobs_with_numbered_processes(
    recorders: Path, slice_index: int, pod_index: int, process: int
):
    options = with_defaults(
        GkeOptions,
        {
            "image": "image",
            "nodes": 12,
            "devices_per_node": 4,
            "accelerator": "tpu-v5p-slice",
            "topology": "2x2x4",
            "claim": "runs",
        },
    )
    config_map, job_set = yaml.safe_load_all(
        gke_manifest(replace(JOB, recipe_text="seed = 1\n", num_slices=3), options)
    )
    (jobs,) = job_set["spec"]["replicatedJobs"]
    pods = jobs["template"]["spec"]
    assert (jobs["replicas"], pods["parallelism"], pods["completions"]) == (3, 4, 4)
    assert job_set["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    index, count, address = pods["template"]["spec"]["containers"][0]["env"]
    assert index["name"] == "MEGASCALE_SLICE_ID"
    assert count == {"name": "MEGASCALE_NUM_SLICES", "value": "3"}
    assert address == {
        "name": "MEGASCALE_COORDINATOR_ADDRESS",
        "value": "llama-13b-train-0-0.llama-13b",
    }
    done = run_script(
        config_map["data"]["start.sh"],
        recorders,
        MEGASCALE_SLICE_ID=str(slice_index),
        JOB_COMPLETION_INDEX=str(pod_index),
    )
    place = {
        "JAX_COORDINATOR_ADDRESS": "llama-13b-train-0-0.llama-13b:11111",
        "JAX_NUM_PROCESSES": "12",
        "JAX_PROCESS_ID": str(process),
    }
    assert done.variables_of("prep").items() >= place.items()


@pytest.mark.parametrize("option", ["claim", "queue"])
@pytest.mark.parametrize("name", ["Runs", "my_runs", "runs-", "", "a b", "a..b", "a.-b", "r" * 254])
def test_names_that_kubernetes_refuses_are_errors(option: str, name: str):
    values = {"image": "image", option: name}
    with pytest.raises(UsageError, match="is invalid"):
        documents(JOB, with_defaults(GkeOptions, values))


def test_name_of_a_queue_is_as_short_as_a_label():
    """A claim is not a label. Its name may have 253 characters."""
    values = {"image": "image", "claim": "team-a." + "r" * 246}
    documents(JOB, with_defaults(GkeOptions, values | {"queue": "r" * 63}))
    with pytest.raises(UsageError, match="up to 63 letters"):
        documents(JOB, with_defaults(GkeOptions, values | {"queue": "r" * 64}))


def test_gke_pods_convert_their_shares(recorders: Path):
    command = LaunchedCommand(name="save-init", arguments=("my model",), has_shares=True)
    options = with_defaults(GkeOptions, {"image": "image", "nodes": 3, "claim": "models"})
    job = LaunchJob(command=command, name="convert")
    config_map, job_set = yaml.safe_load_all(gke_manifest(job, options))
    assert [*config_map["data"]] == ["start.sh"]
    done = run_script(config_map["data"]["start.sh"], recorders, JOB_COMPLETION_INDEX="1")
    assert done.words_of("prep") == [["save-init", "my model"]]
    share, launcher = launcher_share(done.variables_of("prep"))
    assert (share, launcher) == (Share(3, 1), "JAX_NUM_PROCESSES")
    assert "resources" not in pods_of(job_set)["template"]["spec"]["containers"][0]


EVERY_OPTION = {
    "image": "image",
    "nodes": 4,
    "devices_per_node": 4,
    "accelerator": "tpu-v6e-slice",
    "topology": "2x4",
    "cpus": 8,
    "mem": "1.5Ti",
    "claim": "runs",
    "queue": "team-a",
    "spot": True,
}


@pytest.mark.parametrize(
    "values",
    [
        EVERY_OPTION,
        {"image": "image", "nodes": 2},
        {"image": "image", "devices_per_node": 8, "accelerator": "nvidia-l4", "mem": "1.5Ti"},
    ],
)
def test_models_of_jobset_accept_the_manifest(values: dict[str, object]):
    """The models drop unknown keys, so the written manifest would differ."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    options = with_defaults(GkeOptions, values)
    _, job_set = yaml.safe_load_all(gke_manifest(replace(JOB, num_slices=2), options))
    parsed = models.JobsetV1alpha2JobSet.from_dict(job_set)
    assert parsed is not None
    assert parsed.to_dict() == job_set


def test_names_that_are_not_utf_8_are_refused():
    job = LaunchJob(command=LaunchedCommand(name="inspect", arguments=("a\udcff",)), name="job")
    with pytest.raises(UsageError, match="is not UTF-8"):
        documents(job, with_defaults(GkeOptions, {"image": "image"}))
