"""The start of JAX in several processes."""

from __future__ import annotations

import math

import jax

from trainer.distributed.coordination import CoordinatedProcesses
from trainer.distributed.process_group import ProcessGroup, SingleProcess
from trainer.distributed.runtime_errors import RuntimeErrors
from trainer.models.process_address import ProcessAddress

JAX_TIMEOUT_FACTOR = 10  # JAX aborts without a message of ours: only if the watchdog has failed


def start_processes(
    address: ProcessAddress | None, *, start_timeout_s: float, heartbeat_timeout_s: float
) -> ProcessGroup:
    """Connect this process with the others of its job. No device may have been used before.

    Args:
        address: This process; None for a job of one process.
        start_timeout_s: Seconds to wait for the other processes.
        heartbeat_timeout_s: Seconds without a heartbeat after which the watchdog counts a process as lost.

    Returns:
        The group of processes.
    """
    if address is None or address.count == 1:
        return SingleProcess()
    devices = address.num_local_devices
    errors = RuntimeErrors()
    jax.config.update("jax_enable_preemption_service", False)  # it handles SIGTERM, and so does the caller
    with errors.intercepted():
        jax.distributed.initialize(
            address.coordinator,
            num_processes=address.count,
            process_id=address.index,
            local_device_ids=None if devices is None else list(range(devices)),
            cluster_detection_method="deactivate",
            initialization_timeout=int(start_timeout_s),
            heartbeat_timeout_seconds=math.ceil(heartbeat_timeout_s * JAX_TIMEOUT_FACTOR),
            shutdown_timeout_seconds=math.ceil(heartbeat_timeout_s),
        )
    return CoordinatedProcesses(errors)
