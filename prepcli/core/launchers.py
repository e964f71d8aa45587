"""Index of this process and number of processes, from the environment variables of launchers. Pure, no jax.

Launchers set the variables below only for commands that they run several times. SLURM_NTASKS is
ignored: SLURM also sets it for the batch script, which runs once. An Open MPI process is detected
before a SLURM task, because `mpirun` may start its ranks from tasks of SLURM. jax detects launchers
in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prepcli.core.errors import usage_error

MAX_PROCESSES = 1 << 16
JAX_VARIABLES = "JAX_NUM_PROCESSES"
OPEN_MPI = "Open MPI"
SLURM = "SLURM"
TPU_POD = "TPU pod"
KUBERNETES = "Kubernetes"
# Launchers in the order of detection.
LAUNCHERS = (JAX_VARIABLES, OPEN_MPI, SLURM, TPU_POD, KUBERNETES)
# The order is jax's.
TPU_HOST_VARIABLES = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
# Set in every pod of an indexed job. Its pods may be independent.
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
# Process id of the process of prep that started this one. See `signals.die_with_parent`.
PARENT_VARIABLE = "PREP_PARENT"


@dataclass(frozen=True, slots=True)
class ProcessVariables:
    """Environment variables in which a launcher describes a process. An empty name: it sets none."""

    count: str
    index: str
    local_count: str = ""
    local_index: str = ""
    host_count: str = ""
    host_index: str = ""


# A TPU pod describes its hosts instead, and no variable of a pod of Kubernetes has the number of processes.
PROCESS_VARIABLES: Mapping[str, ProcessVariables] = {
    JAX_VARIABLES: ProcessVariables("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    OPEN_MPI: ProcessVariables(
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        local_count="OMPI_COMM_WORLD_LOCAL_SIZE",
        local_index="OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    SLURM: ProcessVariables(
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        local_index="SLURM_LOCALID",
        host_count="SLURM_STEP_NUM_NODES",
        host_index="SLURM_NODEID",
    ),
}


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """Process number `index`, from 0, of `count` processes that a launcher started."""

    launcher: str
    count: int
    index: int
    variables: tuple[str, ...] = ()  # environment variables that the count and the index are from
    local_count: int | None = None  # processes on this host. None if it is unknown.
    local_index: int = 0  # index of this process on its host
    host_count: int | None = None  # None if it is unknown
    host_index: int | None = None  # None if it is unknown


def detect_launcher(
    environ: Mapping[str, str], launchers: Collection[str] = LAUNCHERS
) -> LaunchedProcess | None:
    """Return the process described by the variables of one of `launchers`, or None if there is only one process.

    Raises:
        UsageError: A launcher's variables are incomplete or contradict each other.
    """
    for launcher in LAUNCHERS:
        process = None
        if launcher not in launchers:
            continue
        if launcher in PROCESS_VARIABLES:
            process = _described_process(environ, launcher, PROCESS_VARIABLES[launcher])
        elif launcher == TPU_POD:
            process = _tpu_process(environ)
        elif all(environ.get(name) for name in ("JOBSET_NAME", COMPLETION_INDEX)) and not any(
            environ.get(name) for name in ("JAX_NUM_PROCESSES", *TPU_HOST_VARIABLES)
        ):
            # JobSet sets no variable with the number of processes of its pods.
            raise _incomplete_error("JOBSET_NAME", "JAX_NUM_PROCESSES")
        if process is not None:
            return process
    return None


def pod_process(environ: Mapping[str, str], count: int) -> LaunchedProcess | None:
    """Return the process of a pod in an indexed Kubernetes job of `count` pods, or None elsewhere."""
    index = read_number(environ, COMPLETION_INDEX)
    if index is None:
        return None
    index = _checked_index(index, count, COMPLETION_INDEX)
    return LaunchedProcess(KUBERNETES, count, index, variables=(COMPLETION_INDEX,))


def job_name(launcher: str, environ: Mapping[str, str]) -> str:
    """Return the name of a launcher's job, which is the same in all of its processes, or "" if no variable has it."""
    if launcher == SLURM and environ.get("SLURM_JOB_ID"):
        return f"SLURM job {environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    if launcher == OPEN_MPI:
        job = (
            environ.get("PMIX_NAMESPACE")
            or environ.get("OMPI_MCA_orte_hnp_uri", "").partition(".")[0]
        )
        if job:
            return f"Open MPI job {job}"
        return ""
    if launcher in (TPU_POD, KUBERNETES) and environ.get("JOBSET_NAME"):
        return f"JobSet {environ['JOBSET_NAME']}"
    return ""


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that are set and describe the processes of a job."""
    counts = [names.count for names in PROCESS_VARIABLES.values()]
    names = (*counts, *TPU_HOST_VARIABLES, COMPLETION_INDEX)
    return {name: environ[name] for name in names if environ.get(name)}


def read_number(environ: Mapping[str, str], variable: str) -> int | None:
    """Return the number in an environment variable, or None if it is unset or empty.

    Raises:
        UsageError: The text is not a decimal number.
    """
    text = environ.get(variable, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise usage_error(
            f"{variable}={text} is invalid",
            "the expected value is a decimal number",
            f"unset {variable}",
        )
    return int(text)


def _described_process(
    environ: Mapping[str, str], launcher: str, names: ProcessVariables
) -> LaunchedProcess | None:
    """Return the process in the variables of a launcher. None if it did not start this one, or only this one."""
    # SLURM_PROCID alone is set for a batch script.
    if launcher == SLURM and not environ.get(names.count):
        return None
    if launcher == JAX_VARIABLES and environ.get(COMPLETION_INDEX) and not environ.get(names.index):
        # The index may be the one of a pod in an indexed job.
        count = read_number(environ, names.count)
        if count is not None and count > 1:
            return pod_process(environ, count)
    numbers = _count_and_index(environ, names.count, names.index)
    if numbers is None:
        return None
    local_count = read_number(environ, names.local_count)
    host_index = read_number(environ, names.host_index)
    local_index = read_number(environ, names.local_index) or 0
    host_count = read_number(environ, names.host_count)
    if launcher == OPEN_MPI and local_count == numbers[0]:
        host_count = 1
    if launcher == SLURM:
        tasks_per_node = _repeated_numbers(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        host_count = host_count or len(tasks_per_node) or None
        tasks_here = tasks_per_node[host_index or 0 :]
        if tasks_here:
            local_count = tasks_here[0]
    return LaunchedProcess(
        launcher,
        *numbers,
        variables=(names.count, names.index),
        local_count=local_count,
        local_index=local_index,
        host_count=host_count,
        host_index=host_index,
    )


def _tpu_process(environ: Mapping[str, str]) -> LaunchedProcess | None:
    """Return the process of a TPU pod that describes itself in variables, as on Google Kubernetes Engine."""
    hosts_variable = next((name for name in TPU_HOST_VARIABLES if environ.get(name)), "")
    if not hosts_variable:
        return None
    hosts_per_slice = len(environ[hosts_variable].split(","))
    slice_count = read_number(environ, "MEGASCALE_NUM_SLICES") or 1
    count = hosts_per_slice * slice_count
    if count == 1:
        return None
    variables = [hosts_variable]
    index_variables = ["TPU_WORKER_ID"]
    if slice_count > 1:
        variables.append("MEGASCALE_NUM_SLICES")
        index_variables.append("MEGASCALE_SLICE_ID")
    index = 0
    # E.g. host 2 of slice 1 of 4 hosts: 2 * 1 + 1 * 4 = 6.
    for name, num_hosts in zip(index_variables, (1, hosts_per_slice)):
        number = read_number(environ, name)
        if number is None:
            raise _incomplete_error(hosts_variable, name)
        index += number * num_hosts
    index = _checked_index(index, count, " and ".join(index_variables))
    return LaunchedProcess(
        TPU_POD,
        count,
        index,
        variables=(*variables, *index_variables),
        local_count=1,
        host_count=count,
        host_index=index,
    )


def _count_and_index(
    environ: Mapping[str, str], count_variable: str, index_variable: str
) -> tuple[int, int] | None:
    """Return the number of processes and the index of this one, or None if there are fewer than two."""
    count = read_number(environ, count_variable)
    index = read_number(environ, index_variable)
    if count is None and index is None:
        return None
    if count is None:
        raise _incomplete_error(index_variable, count_variable)
    if count < 2:
        return None
    if index is None:
        raise _incomplete_error(count_variable, index_variable)
    if count > MAX_PROCESSES:
        why = f"the limit is {MAX_PROCESSES:,} processes"
        raise usage_error(
            f"{count_variable}={count} is too large", why, f"set a smaller {count_variable}"
        )
    return count, _checked_index(index, count, index_variable)


def _checked_index(index: int, count: int, index_variables: str) -> int:
    """Return the index. Raise UsageError if it is not below the number of processes."""
    if index >= count:
        why = (
            f"{index_variables} sets it, and the indices of {count} processes are 0 to {count - 1}"
        )
        raise usage_error(
            f"process index {index} is out of range", why, f"correct {index_variables}"
        )
    return index


def _incomplete_error(present: str, missing: str) -> Exception:
    why = f"{present} is set, and {missing} is not"
    return usage_error(
        "the variables of the processes are incomplete", why, f"set {missing}, or unset {present}"
    )


def _repeated_numbers(text: str) -> list[int]:
    """Return the numbers of SLURM's compact form: `2(x3),1` is 2, 2, 2, 1. Other text gives no numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match:
            numbers += [int(match[1])] * int(match[2] or 1)
    return numbers
