"""Index of this process and address of process 0, from settings or launchers' environment variables. Pure, no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prepcli.core.coordinator_address import coordinator_address, join_host_port
from prepcli.core.decimal_text import parse_decimal
from prepcli.core.errors import Key, text, usage_error
from prepcli.core.launchers import (
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
    process = _numbered_process(settings, _launched_process(settings, environ))
    if process is None:
        return None
    sources = [
        *_key_texts(settings),
        *(f"{name}={environ.get(name, '')}" for name in process.variables),
    ]
    if settings.host0_address:
        _check_host(settings.host0_address)
        coordinator = join_host_port(settings.host0_address, settings.host0_port)
    else:
        coordinator, variable = coordinator_address(
            process.launcher, environ, default_port=settings.host0_port
        )
        sources += (
            [f"{variable}={environ.get(variable, '')}"] if variable not in process.variables else []
        )
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


def _launched_process(
    settings: ProcessSettings, environ: Mapping[str, str]
) -> LaunchedProcess | None:
    """Return the process of a launcher, if the settings do not replace it."""
    count = settings.num_processes
    if count is not None and settings.process_id is not None:
        return None
    return detect_launcher(environ) or (pod_process(environ, count) if count else None)


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


def _check_host(host: str) -> None:
    """Raise UsageError if a host's address contains a port."""
    name, _, port = host.partition(":")
    if port.isdecimal() and name:
        hint = f"`cluster.host0_address={name}` and `cluster.host0_port={port}`"
        raise usage_error(
            f"`cluster.host0_address={host}` is invalid", "the port has a key of its own", hint
        )


def _key_texts(settings: ProcessSettings) -> list[str]:
    """Return the keys that are set, with their values."""
    values = {
        "host0_address": settings.host0_address,
        "n_processes": settings.num_processes,
        "process_id": settings.process_id,
    }
    return [f"cluster.{key}={value}" for key, value in values.items() if value is not None]


def _local_device_ids(
    process: LaunchedProcess, num_devices: int | None, environ: Mapping[str, str]
) -> tuple[int, ...] | None:
    """Return the indices of this process's devices among the visible ones, or None for all of them.

    With `cluster.n_local_devices`, the process has that number. Without it, the processes of a host
    divide its devices evenly, unless the launcher already shows each process its own. If no number
    of devices is known, each process has one, as in jax.
    """
    num_visible = _num_visible_devices(environ)
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


def _num_visible_devices(environ: Mapping[str, str]) -> int | None:
    """Return the number of accelerators that a variable makes visible, or None without one."""
    lists = [environ[name] for name in VISIBLE_DEVICES if environ.get(name)]
    if lists:
        return len(lists[0].split(","))
    return None


def _num_host_devices(environ: Mapping[str, str]) -> int:
    """Return the number of accelerators that SLURM allocated on this host, or 0 if it is unknown."""
    return parse_decimal(environ.get("SLURM_GPUS_ON_NODE", "")) or 0
