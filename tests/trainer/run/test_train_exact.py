"""`train.reduction = "exact"` with `prep train` in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import OK
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import read_tensors
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import make_training_folder
from trainer.training.metrics import METRICS_FILE, read_metrics

TIMINGS = ("seconds", "tokens_per_s")
EXACT = ("train.reduction=exact", "train.steps=3", "checkpoint.every=0", "data.holdout=0.1")


def train(
    name: str, mesh: str, *, count: int, devices: int
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Train in some processes, and return log lines without timings, and the bytes of the exported tensors."""
    overrides = set_keys(*EXACT, f"mesh={mesh}")
    words = ("train", "recipe.toml", "--out", name, *overrides)
    results = finish(start_processes(*words, count=count, devices=devices))
    assert [code for code, _, _ in results] == [OK] * count, results
    run_ok("export", name, "--out", f"{name}-tensors")
    lines = read_metrics(Path(name) / METRICS_FILE)
    tensors = {
        path: tensor.tobytes() for path, tensor in read_tensors(Path(f"{name}-tensors")).items()
    }
    return [{key: line[key] for key in line if key not in TIMINGS} for line in lines], tensors


# By default test_two_processes_train_like_one compares an exact run of two processes with one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "mesh", "one_process_mesh"),
    [(2, 1, "2,1,1", "1,1,1"), (2, 4, "2,4,1", "1,8,1"), (4, 2, "1,8,1", "8,1,1")],
)
def test_exact_runs_in_processes_end_in_equal_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    count: int,
    devices: int,
    mesh: str,
    one_process_mesh: str,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    num_devices = 1 if one_process_mesh == "1,1,1" else count * devices
    expected = train("one", one_process_mesh, count=1, devices=num_devices)
    assert train("several", mesh, count=count, devices=devices) == expected
