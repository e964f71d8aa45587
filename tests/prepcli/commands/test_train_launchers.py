"""`prep train` in several processes fails before it reads any file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.run_cli import run_failing

VARIABLES = {"SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), "JAX": ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}


@pytest.mark.parametrize(("launcher", "hint"), [("SLURM", "`srun --ntasks 1 "), ("JAX", "unset JAX_NUM_PROCESSES")])
def test_train_stops_first_among_several_tasks(
    launcher: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    for variable, value in zip(VARIABLES[launcher], ("4", "1")):
        monkeypatch.setenv(variable, value)
    err = run_failing(capsys, 2, "train", "missing.toml")
    assert "`prep train` runs in one process" in err
    assert "process 1 of 4" in err
    assert hint in err
    assert "missing.toml" not in err
    assert list(tmp_path.iterdir()) == []


def test_train_runs_as_the_only_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for variable, value in zip(VARIABLES["SLURM"], ("1", "0")):
        monkeypatch.setenv(variable, value)
    assert "missing.toml" in run_failing(capsys, 2, "train", "missing.toml")
