"""`prep train` under a launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.run_cli import run_failing

VARIABLES = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


def test_train_runs_as_the_only_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for variable, value in zip(VARIABLES, ("1", "0")):
        monkeypatch.setenv(variable, value)
    assert "missing.toml" in run_failing(capsys, 2, "train", "missing.toml")
