"""Address of process 0, from the environment variables of launchers. Pure, no jax. Jax uses the same ports."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from prepcli.core.decimal_text import parse_decimal
from prepcli.core.errors import usage_error
from prepcli.core.launchers import (
    COMPLETION_INDEX,
    KUBERNETES,
    OPEN_MPI,
    SLURM,
    TPU_HOST_VARIABLES,
    TPU_POD,
)

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

    JAX_COORDINATOR_ADDRESS and JAX_COORDINATOR_PORT override the variables of the launcher.

    Args:
        launcher: Name of the launcher.
        environ: Environment variables.
        default_port: Port of a JAX_COORDINATOR_ADDRESS without one.

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
