"""The process of a job that this one is, from settings or the environment variables of launchers. Pure, no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Explicit settings of a job of several processes; None for values that a launcher sets.

    Attributes:
        host0_address: Address of the host of process 0.
        host0_port: Port of process 0.
        num_processes: Number of processes.
        process_id: Index of this process, from 0.
        num_local_devices: Number of devices of this process.
    """

    host0_address: str | None = None
    host0_port: int = 11111
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
        num_local_devices: Number of devices of this process; None for all of its host.
    """

    index: int
    count: int
    coordinator: str
    num_local_devices: int | None = None


def process_address(settings: ProcessSettings, environ: Mapping[str, str]) -> ProcessAddress | None:
    """Return this process and the address of process 0; None for a job of one process.

    Args:
        settings: Explicit settings, which win.
        environ: Environment variables.
    """
    if settings.num_processes and settings.process_id is not None and settings.host0_address:
        coordinator = f"{settings.host0_address}:{settings.host0_port}"
        return ProcessAddress(settings.process_id, settings.num_processes, coordinator, settings.num_local_devices)
    count, index = environ.get("JAX_NUM_PROCESSES"), environ.get("JAX_PROCESS_ID")
    if not count or not index:
        return None
    return ProcessAddress(int(index), int(count), environ["JAX_COORDINATOR_ADDRESS"], settings.num_local_devices)
