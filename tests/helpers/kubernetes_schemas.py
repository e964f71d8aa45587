"""The part of the schemas of Job, JobSet and Kueue that `prep launch gke` uses; unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

Label = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([numkMGTPE]|[KMGTPE]i)?$")]
RuleName = Annotated[
    str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=128)
]
ExclusiveKey = Literal["alpha.jobset.sigs.k8s.io/exclusive-topology"]


class Strict(BaseModel):
    """A mapping of a manifest."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Metadata(Strict):
    """Name and labels of an object; Kueue queues a JobSet with its label."""

    name: Label
    annotations: dict[ExclusiveKey, Literal["cloud.google.com/gke-nodepool"]] = {}
    labels: dict[Literal["kueue.x-k8s.io/queue-name"], Label] = {}


class ConfigMap(Strict):
    """Files as text."""

    api_version: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: Metadata
    data: dict[Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]{1,253}$")], str]


class FieldRef(Strict):
    """A field of the pod."""

    field_path: Annotated[str, Field(pattern=r"^metadata\.labels\['[a-z0-9./-]+'\]$")]


class ValueFrom(Strict):
    """Origin of a variable."""

    field_ref: FieldRef


class Variable(Strict):
    """Environment variable."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str | None = None
    value_from: ValueFrom | None = None

    @model_validator(mode="after")
    def _check_origin(self) -> Variable:
        """Require a value or its origin, not both."""
        assert (self.value is None) != (self.value_from is None)
        return self


class Mount(Strict):
    """Volume in a container."""

    name: Label
    mount_path: Annotated[str, Field(pattern="^/")]


class Resources(Strict):
    """Requested devices, cores and memory. Kubernetes requires equal requests and limits of devices."""

    requests: dict[Literal["google.com/tpu", "nvidia.com/gpu", "cpu", "memory"], Quantity]
    limits: dict[Literal["google.com/tpu", "nvidia.com/gpu", "cpu", "memory"], Quantity]

    @model_validator(mode="after")
    def _check_devices(self) -> Resources:
        """Require equal requests and limits of devices, as Kubernetes does."""
        assert self.requests == self.limits
        return self


class Container(Strict):
    """The container of a pod."""

    name: Label
    image: Annotated[str, Field(min_length=1)]
    command: list[str]
    working_dir: str
    env: list[Variable] = []
    volume_mounts: list[Mount]
    resources: Resources


class ConfigMapVolume(Strict):
    """Source of a volume: a ConfigMap."""

    name: Label


class Claim(Strict):
    """Source of a volume: a persistent volume claim."""

    claim_name: Annotated[str, Field(min_length=1)]


class Volume(Strict):
    """A volume with one source."""

    name: Label
    config_map: ConfigMapVolume | None = None
    persistent_volume_claim: Claim | None = None
    empty_dir: dict[str, str] | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Volume:
        """Require exactly one source."""
        sources = [self.config_map, self.persistent_volume_claim, self.empty_dir]
        assert sum(source is not None for source in sources) == 1
        return self


class LabelSelector(Strict):
    """Pods with labels."""

    match_labels: dict[Literal["jobset.sigs.k8s.io/jobset-name"], Label]


class AffinityTerm(Strict):
    """A rule about nodes that have other pods."""

    label_selector: LabelSelector
    topology_key: Literal["kubernetes.io/hostname"]


class PodAntiAffinity(Strict):
    """Nodes that a pod must not share."""

    required_during_scheduling_ignored_during_execution: list[AffinityTerm]


class Affinity(Strict):
    """Placement of a pod."""

    pod_anti_affinity: PodAntiAffinity


class Toleration(Strict):
    """Taint of nodes that a pod accepts."""

    key: Literal["cloud.google.com/gke-spot"]
    operator: Literal["Equal"]
    value: Literal["true"]
    effect: Literal["NoSchedule"]


class Pod(Strict):
    """Spec of a pod."""

    affinity: Affinity | None = None
    node_selector: dict[
        Annotated[str, Field(pattern=r"^cloud\.google\.com/gke-[a-z-]+$")], str
    ] = {}
    tolerations: list[Toleration] = []
    restart_policy: Literal["Never"]
    termination_grace_period_seconds: Annotated[int, Field(ge=0)]
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume]

    @model_validator(mode="after")
    def _check_mounts(self) -> Pod:
        """Require a volume of the pod for each mount."""
        names = {volume.name for volume in self.volumes}
        assert all(
            mount.name in names
            for container in self.containers
            for mount in container.volume_mounts
        )
        return self


class PodTemplate(Strict):
    """Template of the pods of a Job."""

    spec: Pod


class ExitCodes(Strict):
    """Exit codes of a container; 0 is not allowed."""

    container_name: Label
    operator: Literal["In", "NotIn"]
    values: Annotated[
        list[Annotated[int, Field(ge=1, le=255)]], Field(min_length=1, max_length=255)
    ]


class Condition(Strict):
    """Condition of a pod."""

    type: Literal["DisruptionTarget"]
    status: Literal["True"]


class FailureRule(Strict):
    """Action for pods that failed: by exit code, or by condition."""

    action: Literal["FailJob", "Count", "Ignore", "FailIndex"]
    on_exit_codes: ExitCodes | None = None
    on_pod_conditions: list[Condition] | None = None

    @model_validator(mode="after")
    def _check_cause(self) -> FailureRule:
        """Require exit codes or conditions of a pod, not both."""
        assert (self.on_exit_codes is None) != (self.on_pod_conditions is None)
        return self


class PodFailurePolicy(Strict):
    """Rules for failed pods; it requires pods that are never restarted."""

    rules: Annotated[list[FailureRule], Field(max_length=20)]


class Job(Strict):
    """Spec of a Job."""

    parallelism: Annotated[int, Field(ge=1)]
    completions: Annotated[int, Field(ge=1)]
    completion_mode: Literal["Indexed"]
    backoff_limit: Annotated[int, Field(ge=0)]
    pod_failure_policy: PodFailurePolicy
    template: PodTemplate


class JobTemplate(Strict):
    """Template of the Jobs of a JobSet."""

    spec: Job


class ReplicatedJob(Strict):
    """Equal Jobs of a JobSet."""

    name: Label
    replicas: Annotated[int, Field(ge=1)]
    template: JobTemplate


class JobSetRule(Strict):
    """Action for a failed Job."""

    name: RuleName
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    on_job_failure_reasons: list[
        Literal["PodFailurePolicy", "BackoffLimitExceeded", "DeadlineExceeded"]
    ]


class FailurePolicy(Strict):
    """Restarts of a JobSet."""

    max_restarts: Annotated[int, Field(ge=0)]
    rules: list[JobSetRule]


class JobSetSpec(Strict):
    """Spec of a JobSet."""

    failure_policy: FailurePolicy
    replicated_jobs: Annotated[list[ReplicatedJob], Field(min_length=1)]


class JobSet(Strict):
    """A JobSet. The name of a pod, `NAME-JOB-0-0-abcde`, has at most 63 characters."""

    api_version: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec

    @model_validator(mode="after")
    def _check_pod_names(self) -> JobSet:
        """Require names of pods within 63 characters."""
        for job in self.spec.replicated_jobs:
            suffix = f"-{job.name}-{job.replicas - 1}-{job.template.spec.completions - 1}-abcde"
            assert len(self.metadata.name + suffix) <= 63
        return self
