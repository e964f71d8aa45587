"""A command that computes with a model in all processes of a job, which together have the devices of its mesh."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from prepcli.console.jax_logs import silence_jax
from prepcli.console.job_errors import label_errors
from prepcli.console.ui import Report, Ui
from prepcli.training_runs.processes import run_together
from trainer.models.process_address import ProcessSettings, process_address
from trainer.recipe.run_tables import Cluster

if TYPE_CHECKING:
    from trainer.distributed.process_group import ProcessGroup

AGAIN_HINT = "start all processes again"


def compute_together(
    mesh: str | None, ui: Ui, *, phase: str, compute: Callable[[ProcessGroup | None, Ui], Report]
) -> Report:
    """Connect the processes of a job, and compute in all of them. Process 0 prints the result.

    Without a mesh, or in a job of one process, this process computes alone.

    Args:
        mesh: Mesh of the command. None means one device.
        ui: Receives notes, warnings and progress.
        phase: Name of the command, which also tells jobs with the same address apart.
        compute: Computes the report, given the processes of the job (None for one) and the Ui of this process.

    Raises:
        PrepError: The computation failed in this process or in another one.
    """
    address = process_address(ProcessSettings(), os.environ) if mesh is not None else None
    if address is None or address.count == 1:
        return compute(None, ui)
    silence_jax(ui)
    from trainer.distributed.start import start_processes

    cluster = Cluster()
    with label_errors(address.index):
        group = start_processes(
            replace(address, job=address.job or f"prep {phase}"),
            start_timeout_s=cluster.start_timeout,
            heartbeat_timeout_s=cluster.heartbeat_timeout,
        )
        process_ui = ui.for_process(address.index)
        together = run_together(
            group, cluster, process_ui, has_saved_step=lambda: False, hint=AGAIN_HINT
        )
        with together as enter_phase:
            enter_phase(phase)
            report = compute(group, process_ui)
    return replace(report, process=address.index)
