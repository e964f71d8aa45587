"""The start of JAX in several processes. It runs no computation, because the first one fixes the devices."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping

import jax

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.core.launchers import TPU_HOST_VARIABLES
from prepcli.core.process_address import ProcessAddress, is_loopback, split_host_port
from prepcli.core.process_group import ProcessGroup, SingleProcess
from trainer.distributed.coordination import CoordinatedProcesses
from trainer.distributed.devices import local_devices
from trainer.distributed.jax_internals import backends_are_initialized, runs_on_tpu_vm
from trainer.distributed.rendezvous import meet_processes
from trainer.distributed.runtime_errors import RuntimeErrors

# JAX aborts a process without a readable message when heartbeats stop. Its time-out is therefore a
# multiple of the watchdog's, and acts only if the watchdog itself has failed.
JAX_TIMEOUT_FACTOR = 10
# For `jax.distributed.initialize`. The processes have met before, so only its own handshake is left.
CONNECT_TIMEOUT_S = 60
ADDRESS_HINT = text(
    "{} with an address that all hosts can reach",
    Key("cluster.host0_address", "ADDRESS", is_override=True),
)


def start_processes(
    address: ProcessAddress | None, *, start_timeout_s: float, heartbeat_timeout_s: float
) -> ProcessGroup:
    """Connect this process with the other processes of its job. No device may have been used before.

    Processes connected by an earlier call or by the calling program stay connected.

    Args:
        address: This process. None if neither settings nor variables describe it.
        start_timeout_s: Seconds to wait for the other processes.
        heartbeat_timeout_s: Seconds without a heartbeat after which the watchdog counts a process as lost.

    Returns:
        The group of processes.

    Raises:
        PrepError: A process did not start in time, this one has used a device before, or the processes cannot be
            connected.
    """
    if jax.distributed.is_initialized():
        return _connected_group(address)
    if address is None and not _describes_tpu_pod(os.environ):
        return SingleProcess()
    if address is not None and address.count == 1:
        return SingleProcess()
    if backends_are_initialized():
        why = "this Python process has used jax's devices before, and jax can connect them only at its start"
        hint = "start a new Python process for each run, or call `jax.distributed.initialize` before the first one"
        raise PrepError("the processes cannot be connected", why, hint)
    errors = RuntimeErrors()
    # JAX's preemption service would take SIGTERM, on which the caller saves a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with errors.intercept_client_errors():
            places = _initialize_jax(
                address, start_timeout_s=start_timeout_s, heartbeat_timeout_s=heartbeat_timeout_s
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise _start_error(address, error) from error
    group = CoordinatedProcesses(errors, places)
    return group if group.count > 1 else SingleProcess()


def _initialize_jax(
    address: ProcessAddress | None, *, start_timeout_s: float, heartbeat_timeout_s: float
) -> dict[int, str]:
    """Initialize `jax.distributed`, and return the places of processes from `meet_processes`.

    On a TPU pod without an address, JAX finds the processes itself, and no places are known.
    """
    heartbeat_timeout_seconds = math.ceil(heartbeat_timeout_s * JAX_TIMEOUT_FACTOR)
    shutdown_timeout_seconds = math.ceil(heartbeat_timeout_s)
    if address is None:
        jax.distributed.initialize(
            initialization_timeout=math.ceil(start_timeout_s),
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            shutdown_timeout_seconds=shutdown_timeout_seconds,
        )
        return {}
    check_coordinator_host(address)
    places = meet_processes(address, start_timeout_s)
    jax.distributed.initialize(
        address.coordinator,
        num_processes=address.count,
        process_id=address.index,
        local_device_ids=address.local_device_ids,
        # The address is complete, so JAX must not detect a cluster itself.
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT_TIMEOUT_S,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
    )
    return places


def request_local_devices(count: int) -> None:
    """Let JAX divide this process's CPU into `count` devices, if it uses CPUs. Devices in use stay as they are."""
    if not backends_are_initialized():
        jax.config.update("jax_num_cpu_devices", count)


def check_local_devices(count: int) -> None:
    """Initialize JAX's devices, and check that this process has `count` of them.

    Raises:
        UsageError: The process has a different number of devices. Either JAX was initialized before, or a variable
            such as CUDA_VISIBLE_DEVICES has to select the devices.
    """
    devices = local_devices()
    num_devices = len(devices)
    if num_devices == count:
        return
    platform = devices[0].platform
    variables = {
        "cpu": f"`JAX_NUM_CPU_DEVICES={count}` before Python starts",
        "gpu": "`CUDA_VISIBLE_DEVICES`",
    }
    hint = variables.get(platform, "the variables of the launcher")
    what = f"`cluster.n_local_devices` is {count}, and this process has {num_devices} x {platform}"
    raise usage_error(what, "the devices of a running process cannot be chosen again", hint)


def check_coordinator_host(address: ProcessAddress) -> None:
    """Raise PrepError if process 0 is on another host, and its address is a loopback address here.

    Args:
        address: This process. Nothing is checked if its launcher does not state the number of hosts.
    """
    if (address.host_count or 1) == 1:
        return
    host, _ = split_host_port(address.coordinator)
    reason = f"the processes run on {address.host_count} hosts"
    if is_loopback(host):
        raise PrepError(
            f"the address {host} of process 0 reaches only its own host", reason, ADDRESS_HINT
        )
    # Debian's /etc/hosts gives a host's own name the address 127.0.1.1, which is right on host 0.
    if not address.host_index:
        return
    try:
        resolved = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    except OSError:
        # The name may not resolve yet. Connecting tries again, and reports it.
        return
    if resolved and all(is_loopback(ip) for ip in resolved):
        what = f"the host {host} of process 0 has the loopback address {resolved[0]} on host {socket.gethostname()}"
        raise PrepError(what, reason, text("correct /etc/hosts, or {}", ADDRESS_HINT))


def _connected_group(address: ProcessAddress | None) -> ProcessGroup:
    """Return the group of already connected processes. Raise PrepError if it is another job."""
    group = CoordinatedProcesses()
    if address is not None and (address.index, address.count) != (group.index, group.count):
        why = f"jax is connected as process {group.index} of {group.count}, and {address.reason} says otherwise"
        raise PrepError("the processes are connected already", why, "start a new process")
    return group if group.count > 1 else SingleProcess()


def _describes_tpu_pod(environ: Mapping[str, str]) -> bool:
    """Return whether the metadata server of a TPU virtual machine says which process this is. Only jax reads it."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms:
        return False
    is_described = environ.get("TPU_SKIP_MDS_QUERY") or any(
        environ.get(name) for name in TPU_HOST_VARIABLES
    )
    return runs_on_tpu_vm() and not is_described


def _start_error(address: ProcessAddress | None, error: Exception) -> PrepError:
    place = "this TPU host" if address is None else f"process {address.index} of {address.count}"
    one_process = Key("cluster.n_processes", 1, is_override=True)
    hint = text("{} trains in this process alone", one_process)
    return PrepError(f"jax cannot connect {place}", str(error).partition("\n")[0], hint)
