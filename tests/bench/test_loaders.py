"""The corruptions of `bench.loaders`: each changes a checkpoint, and prep with a lock refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.loaders import CORRUPTIONS, MISSED, REFUSED, run_loader


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_locked_loads_refuse_every_corruption():
    assert run_loader("prep --lock", seed=1) == [REFUSED] * len(CORRUPTIONS)


def test_every_corruption_changes_what_a_plain_loader_returns():
    """It refuses a file of another size, and returns other values or another config for all else."""
    outcomes = dict(zip(CORRUPTIONS, run_loader("safetensors", seed=1)))
    assert [name for name, result in outcomes.items() if result == REFUSED] == ["cut", "trailing"]
    assert {*outcomes.values()} == {REFUSED, MISSED}
