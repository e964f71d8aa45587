"""A computation with a model in all processes of a job, which together have the devices of its mesh."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from prepcli.commands.console.notebook import run_observer_of
from prepcli.commands.console.stdio import silence_jax
from prepcli.core.observer import Observer, Progress
from prepcli.core.process_address import ProcessSettings, process_address
from prepcli.core.unexpected import label_errors
from trainer.recipe.run_tables import Cluster
from trainer.run.processes import run_together

if TYPE_CHECKING:
    from prepcli.core.process_group import ProcessGroup

AGAIN_HINT = "start all processes again"

R = TypeVar("R")


def compute_together(
    mesh: str | None,
    progress: Progress | Observer | None,
    *,
    phase: str,
    compute: Callable[[ProcessGroup | None, Observer], R],
) -> R:
    """Connect the processes of a job, and compute in all of them.

    Without a mesh, or in a job of one process, this process computes alone.

    Args:
        mesh: Mesh of the computation. None means one device.
        progress: Receives notes, warnings and progress, or only progress.
        phase: Name of the command, which also distinguishes jobs with the same address.
        compute: Computes the result, given the processes of the job (None for one) and the observer of this process.

    Raises:
        PrepError: The computation failed in this process or in another one.
    """
    observer = run_observer_of(progress)
    address = process_address(ProcessSettings(), os.environ) if mesh is not None else None
    if address is None or address.count == 1:
        return compute(None, observer)
    silence_jax(observer)
    from trainer.distributed.start import start_processes

    cluster = Cluster()
    with label_errors(address.index):
        # Two commands at one address would wait for each other's processes: their jobs have different names.
        group = start_processes(
            replace(address, job=address.job or f"prep {phase}"),
            start_timeout_s=cluster.start_timeout,
            heartbeat_timeout_s=cluster.heartbeat_timeout,
        )
        process_observer = observer.for_process(address.index)
        together = run_together(
            group, cluster, process_observer, has_saved_step=lambda: False, hint=AGAIN_HINT
        )
        with together as enter_phase:
            enter_phase(phase)
            return compute(group, process_observer)


def process_index(group: ProcessGroup | None) -> int | None:
    """Return the index of this process in a job, or None outside of a job of several processes."""
    return None if group is None else group.index
