"""Checks of memory and disk before a training run reads data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text
from prepcli.models.param_tree import ParamLeaf
from trainer.recipe import Recipe, load_recipe
from trainer.run import checks as train_checks
from trainer.run.checks import check_disk, checkpoint_nbytes, device_memory_nbytes, disk_warnings

GIB = 1 << 30


@dataclass
class Device:
    platform: str = "cpu"
    stats: dict[str, int] | None = field(default=None)

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


@pytest.mark.parametrize(
    ("devices", "host", "nbytes"),
    [
        ([Device("gpu", {"bytes_limit": 60 * GIB})], {"available": GIB}, 60 * GIB),
        ([Device()] * 8, {"available": 16 * GIB, "limit": None}, 2 * GIB),
        ([Device()] * 2, {"available": 16 * GIB, "limit": 8 * GIB}, 4 * GIB),
        ([Device("tpu", {})], {"available": 16 * GIB}, None),
        ([Device()], {"available": None, "limit": None}, None),
    ],
)
def test_device_memory_depends_on_the_platform(
    devices: list[Any], host: dict[str, int | None], nbytes: int | None
):
    assert device_memory_nbytes(devices, host) == nbytes


def test_processes_of_a_host_share_its_memory():
    host = {"available": 16 * GIB, "limit": None}
    assert device_memory_nbytes([Device()] * 4, host, num_processes=2) == 2 * GIB
    assert device_memory_nbytes([Device("gpu", {"bytes_limit": GIB})], host, num_processes=2) == GIB


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(train_checks.shutil, "disk_usage", lambda _: usage)
    return 1000


def test_check_disk_requires_room_for_one_checkpoint(tmp_path: Path, free: int):
    check_disk(tmp_path / "runs" / "a", free)
    with pytest.raises(PrepError, match="not enough room for a checkpoint"):
        check_disk(tmp_path / "runs" / "a", free + 1)


def test_check_disk_requires_a_writable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    with pytest.raises(PrepError, match=f"cannot write to {tmp_path}"):
        check_disk(tmp_path / "runs" / "a", 0)
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]


def recipe(tmp_path: Path, *sets: str) -> Recipe:
    (tmp_path / "x.toml").write_text(
        '[model]\npath = "m"\n[data]\ntype = "text"\npath = "t"\nseq_length = 8\n[batch]\nsize = 4\n'
        "[optimizer]\nlr = 1e-3\n[train]\nsteps = 20\n"
    )
    return load_recipe(tmp_path / "x.toml", sets).recipe


def leaves(count: int) -> dict[str, ParamLeaf]:
    return {"w": ParamLeaf("w", "w", (count,), (("embed",),))}


def test_checkpoint_nbytes_counts_parameters_and_moments(tmp_path: Path):
    assert checkpoint_nbytes(recipe(tmp_path), leaves(10)) == 120
    params_only = "checkpoint.optimizer_state=false"
    assert checkpoint_nbytes(recipe(tmp_path, params_only), leaves(10)) == 40
    cast = recipe(tmp_path, params_only, "checkpoint.dtype=bfloat16")
    assert checkpoint_nbytes(cast, leaves(10)) == 20


@pytest.mark.parametrize(
    ("every", "keep", "steps_left", "held"),
    [(0, "2", 20, 1), (5, "2", 20, 3), (5, "9", 20, 4), (1, "all", 20, 20), (5, "2", 0, 0)],
)
def test_disk_warnings_name_checkpoints_beyond_the_disk(
    tmp_path: Path, free: int, every: int, keep: str, steps_left: int, held: int
):
    made = recipe(tmp_path, f"checkpoint.every={every}", f"checkpoint.keep={keep}")
    count = free // 12 // max(held, 1)
    assert list(disk_warnings(tmp_path / "run", made, leaves(count), steps_left)) == []
    doubts = list(disk_warnings(tmp_path / "run", made, leaves(count + 12), steps_left))
    held_text = f"will hold {count_text(held, 'checkpoint')}"
    assert [held_text in doubt for doubt in doubts] == [True] * bool(held)
