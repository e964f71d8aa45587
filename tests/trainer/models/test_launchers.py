"""Detection of launchers from environment variables."""

from __future__ import annotations

import pytest

from trainer.models.launchers import LaunchedProcess, detect_launcher


@pytest.mark.parametrize(
    ("environ", "process"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, LaunchedProcess("SLURM", 4, 3)),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, LaunchedProcess("JAX_NUM_PROCESSES", 2, 0)),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # the batch script, which runs once
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "4"}, None),
        ({"SLURM_STEP_NUM_TASKS": "x", "SLURM_PROCID": "0"}, None),
        ({}, None),
    ],
)
def test_detect_launcher_reads_environment(environ: dict[str, str], process: LaunchedProcess | None):
    assert detect_launcher(environ) == process


def test_detect_launcher_prefers_slurm():
    environ = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert detect_launcher(environ) == LaunchedProcess("SLURM", 4, 1)
