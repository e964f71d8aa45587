"""Index of this process and address of process 0, from settings or launchers' environment variables. Pure, no jax."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from prepcli.core.errors import Key, text, usage_error
from prepcli.core.formatting import parse_decimal
from prepcli.core.launchers import (
    COMPLETION_INDEX,
    KUBERNETES,
    OPEN_MPI,
    SLURM,
    TPU_HOST_VARIABLES,
    TPU_POD,
    LaunchedProcess,
    detect_launcher,
    job_name,
    launcher_variables,
    pod_process,
)

# Default port of process 0.
DEFAULT_PORT = 11111
# Launcher of processes that the keys of `cluster` number.
SETTINGS = "settings"
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Explicit settings of a job of several processes, or None for values that a launcher sets.

    Attributes:
        host0_address: Address of the host of process 0.
        host0_port: Port of process 0.
        num_processes: Number of processes.
        process_id: Index of this process, from 0.
        num_local_devices: Number of devices of this process.
    """

    host0_address: str | None = None
    host0_port: int = DEFAULT_PORT
    num_processes: int | None = None
    process_id: int | None = None
    num_local_devices: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessAddress:
    """A process of a job, and the address of process 0.

    Attributes:
        index: Index of this process, from 0.
        count: Number of processes.
        coordinator: `HOST:PORT` of process 0.
        local_device_ids: Indices of the devices of its host that this process uses, or None for all.
        launcher: Name of the launcher.
        reason: Keys and variables that the values are from.
        host_count: Number of hosts, or None if it is unknown.
        host_index: Index of this host, or None if it is unknown.
        job: Name of the job, which processes of other jobs do not have. Empty if it is unknown.
        settings_digest: Digest of the settings that the processes of the job share. Empty if it is
            unknown.
    """

    index: int
    count: int
    coordinator: str
    local_device_ids: tuple[int, ...] | None = None
    launcher: str = SETTINGS
    reason: str = ""
    host_count: int | None = None
    host_index: int | None = None
    job: str = ""
    settings_digest: str = ""


def process_address(settings: ProcessSettings, environ: Mapping[str, str]) -> ProcessAddress | None:
    """Return this process and the address of process 0, or None for a job of one process.

    Args:
        settings: Explicit settings, which replace the variables. `num_processes=1` ignores every
            launcher.
        environ: Environment variables.

    Raises:
        UsageError: The settings or the variables of a launcher are incomplete, or contradict each
            other.
    """
    if settings.num_processes == 1 and not settings.process_id:
        return ProcessAddress(0, 1, "", reason="cluster.n_processes=1")
    count = settings.num_processes
    launched = None
    if count is None or settings.process_id is None:
        launched = detect_launcher(environ) or (pod_process(environ, count) if count else None)
    process = _numbered_process(settings, launched)
    if process is None:
        return None
    host = settings.host0_address
    keys = {"host0_address": host, "n_processes": count, "process_id": settings.process_id}
    sources = [f"cluster.{key}={value}" for key, value in keys.items() if value is not None]
    variables = [*process.variables]
    if host:
        name, _, port = host.partition(":")
        if port.isdecimal() and name:
            what = f"`cluster.host0_address={host}` is invalid"
            hint = f"`cluster.host0_address={name}` and `cluster.host0_port={port}`"
            raise usage_error(what, "the port has a key of its own", hint)
        coordinator = join_host_port(host, settings.host0_port)
    else:
        coordinator, variable = coordinator_address(
            process.launcher, environ, default_port=settings.host0_port
        )
        if variable not in variables:
            variables.append(variable)
    sources += [f"{variable}={environ.get(variable, '')}" for variable in variables]
    return ProcessAddress(
        process.index,
        process.count,
        coordinator,
        local_device_ids=_local_device_ids(process, settings.num_local_devices, environ),
        launcher=process.launcher,
        reason=", ".join(sources),
        host_count=process.host_count,
        host_index=process.host_index,
        job=job_name(process.launcher, environ),
    )


def single_process_reason(environ: Mapping[str, str]) -> str:
    """Say why the environment variables describe a job of one process."""
    variables = ", ".join(f"{name}={value}" for name, value in launcher_variables(environ).items())
    if variables:
        return f"no launcher of several processes ({variables})"
    return "no variable of a launcher is set"


def _numbered_process(
    settings: ProcessSettings, launched: LaunchedProcess | None
) -> LaunchedProcess | None:
    """Return the process by the settings, else by the launcher, or None for one process."""
    count = settings.num_processes
    index = settings.process_id
    if count is None and index is None:
        if launched is None and settings.host0_address:
            raise _missing_key_error("cluster.host0_address", "cluster.n_processes")
        return launched
    if launched is None and (count is None or index is None):
        if count is None:
            raise _missing_key_error("cluster.process_id", "cluster.n_processes")
        raise _missing_key_error("cluster.n_processes", "cluster.process_id")
    if launched is not None and count not in (None, launched.count):
        why = f"`cluster.n_processes` is {count}, and {launched.variables[0]} is {launched.count}"
        raise usage_error(
            "the numbers of processes differ", why, "remove `cluster.n_processes`, or set both keys"
        )
    return _checked_process(count, index, launched)


def _checked_process(
    count: int | None, index: int | None, launched: LaunchedProcess | None
) -> LaunchedProcess:
    """Return the process. Raise UsageError if its index is not below the number of processes."""
    process = launched or LaunchedProcess(SETTINGS, 0, 0)
    count = process.count if count is None else count
    index = process.index if index is None else index
    if index >= count:
        why = f"the indices of {count} processes are 0 to {count - 1}"
        raise usage_error(
            f"process index {index} is out of range", why, f"`cluster.process_id={count - 1}`"
        )
    if launched is not None and index == launched.index:
        return launched
    # The settings select another process than the launcher, or there is no launcher: its host is unknown.
    return LaunchedProcess(process.launcher, count, index)


def _missing_key_error(present: str, missing: str) -> Exception:
    """Return the error for a recipe that sets the key `present` and lacks the key `missing`."""
    why = f"`{present}` is set, `{missing}` is not, and no launcher sets it"
    return usage_error(
        "the settings of the processes are incomplete",
        why,
        text("{}", Key(missing, "N", is_override=True)),
    )


def _local_device_ids(
    process: LaunchedProcess, num_devices: int | None, environ: Mapping[str, str]
) -> tuple[int, ...] | None:
    """Return the indices of this process's devices among the visible ones, or None for all of them.

    With `cluster.n_local_devices`, the process has that number. Without it, the processes of a host
    divide its devices evenly, unless the launcher already shows each process its own. If no number
    of devices is known, each process has one, as in jax.
    """
    visible = next((environ[name] for name in VISIBLE_DEVICES if environ.get(name)), None)
    num_visible = None if visible is None else len(visible.split(","))
    # E.g. 8 visible devices and 2 processes on the host: process 1 has the devices 4 to 7. If a
    # process sees 1 of 8 devices of its host, the launcher has divided them already.
    num_processes = process.local_count or 1
    is_divided = num_visible is not None and num_visible < max(
        _num_host_devices(environ), num_processes
    )
    if num_devices is None:
        if num_processes == 1 or is_divided:
            return None
        num_devices = (
            num_visible or _num_host_devices(environ) or num_processes
        ) // num_processes or 1
    is_alone = num_processes == 1 or is_divided or num_visible == num_devices
    first = 0 if is_alone else process.local_index * num_devices
    return tuple(range(first, first + num_devices))


def _num_host_devices(environ: Mapping[str, str]) -> int:
    """Return the number of accelerators that SLURM allocated on this host, or 0 if it is unknown."""
    return parse_decimal(environ.get("SLURM_GPUS_ON_NODE", "")) or 0


TPU_PORT = 8482
KUBERNETES_PORT = 1234
# Ports derived from a job's number.
# jax picks from the last 4096 ports: 65535 - 4096 + 1 = 61440.
FIRST_DYNAMIC_PORT = 61440
NUM_DYNAMIC_PORTS = 4096


def coordinator_address(
    launcher: str, environ: Mapping[str, str], *, default_port: int
) -> tuple[str, str]:
    """Return `HOST:PORT` of process 0, and the variable that names the host.

    JAX_COORDINATOR_ADDRESS and JAX_COORDINATOR_PORT override the variables of the launcher. The default port is the one
    of a JAX_COORDINATOR_ADDRESS without a port.

    Raises:
        UsageError: No variable names the host.
    """
    text = environ.get("JAX_COORDINATOR_ADDRESS", "")
    host = text
    port = default_port
    variable = "JAX_COORDINATOR_ADDRESS"
    if match := re.fullmatch(r"(\[.*\]|[^:]*):([0-9]{1,5})", text):
        return join_host_port(match[1], int(match[2])), variable
    if not host:
        host, port, variable = _launcher_host(launcher, environ)
    if not host:
        why = f"{variable} is not set" if variable else "no variable names the host of process 0"
        raise usage_error(
            "the address of process 0 is unknown",
            why,
            "set JAX_COORDINATOR_ADDRESS or `cluster.host0_address`",
        )
    named_port = parse_decimal(environ.get("JAX_COORDINATOR_PORT", ""))
    return join_host_port(host, port if named_port is None else named_port), variable


def join_host_port(host: str, port: int) -> str:
    """Return `HOST:PORT`, with the brackets of an IPv6 address."""
    if ":" in host and not host.startswith("["):
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether a host's name or IP address always means the host itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def first_slurm_host(node_list: str) -> str:
    """Return the first host of SLURM's compact form, e.g. `rack[1-2]n[003-005,9],x` -> `rack1n003`."""
    # The first comma outside of brackets ends the first group of hosts. In each of its brackets the
    # first number counts.
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", node_list)
    if first:
        return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
    return ""


def _launcher_host(launcher: str, environ: Mapping[str, str]) -> tuple[str, int, str]:
    """Return the host and the port of process 0, and the variable of the host.

    The host is "" if no variable has it.
    """
    if launcher == SLURM:
        port = _dynamic_port(environ.get("SLURM_JOB_ID", ""))
        return first_slurm_host(environ.get("SLURM_STEP_NODELIST", "")), port, "SLURM_STEP_NODELIST"
    if launcher == OPEN_MPI:
        return _open_mpi_host(environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if launcher == TPU_POD:
        names = ("MEGASCALE_COORDINATOR_ADDRESS", *TPU_HOST_VARIABLES)
        variable = next((name for name in names if environ.get(name)), TPU_HOST_VARIABLES[-1])
        return environ.get(variable, "").split(",")[0].split(":")[0], TPU_PORT, variable
    if launcher == KUBERNETES:
        return _job_set_host(environ), KUBERNETES_PORT, "JOBSET_NAME"
    return "", 0, "JAX_COORDINATOR_ADDRESS"


def _dynamic_port(job: str) -> int:
    return FIRST_DYNAMIC_PORT + (parse_decimal(job) or 0) % NUM_DYNAMIC_PORTS


def _open_mpi_host(uri: str) -> tuple[str, int, str]:
    """Return the address of `mpirun`, which runs rank 0 on its own host, from its URI.

    Examples are `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911` and
    `1314521088.0;tcp6://[fe80::b9b,2620::2]:43370`.
    """
    match = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
    job = parse_decimal(uri.partition(".")[0]) or 0
    # The low 12 bits of the job's number are 0.
    port = _dynamic_port(str(job >> 12))
    return (match[1] or match[2]) if match else "", port, "OMPI_MCA_orte_hnp_uri"


def _job_set_host(environ: Mapping[str, str]) -> str:
    """Return the host name of the first pod of this pod's job.

    The host name of a pod is the name of its job and the index of the pod. The service has the name
    of the JobSet, e.g. `train-workers-0.train` for pod 0 of job `train-workers` in JobSet `train`.
    """
    job_set, pod, index = (
        environ.get(name, "") for name in ("JOBSET_NAME", "HOSTNAME", COMPLETION_INDEX)
    )
    job = pod.removesuffix(f"-{index}")
    if job_set and job != pod:
        return f"{job}-0.{job_set}"
    return ""
