"""Checks of memory and disk before a training run reads data."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
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
    ("every", "words", "steps", "held"),
    [
        (0, ["keep=2"], (1, 20), "1 checkpoint"),
        (5, ["keep=2"], (1, 20), "3 checkpoints"),
        (5, ["keep=9"], (1, 20), "4 checkpoints"),
        (1, ["keep=all"], (1, 20), "20 checkpoints"),
        # The second half of a run: steps 15 and 20
        (5, ["keep=all"], (12, 20), "2 checkpoints"),
        # Steps 3, 5, 8, 10, 13, 15, 18 and 20
        (Fraction(5, 2), ["keep=all"], (1, 20), "8 checkpoints"),
        (Fraction(5, 2), ["keep=2"], (1, 20), "3 checkpoints"),
        # Milestones and exports are saved too.
        (0, ["keep=1", "milestones=8"], (1, 20), "4 checkpoints"),
        (4, ["keep=all", "export_every=8"], (1, 20), "5 checkpoints and 2 exports"),
        (0, ["keep=2", "export_every=6"], (1, 20), "3 checkpoints and 3 exports"),
        (0, ["keep=2", "push=me/model"], (1, 20), "1 checkpoint and 1 export"),
        (0, ["keep=2", "push=me/model", "export_every=10"], (1, 20), "2 checkpoints and 2 exports"),
    ],
    ids=str,
)
def test_disk_warnings_name_checkpoints_beyond_the_disk(
    tmp_path: Path,
    free: int,
    every: int | Fraction,
    words: list[str],
    steps: tuple[int, int],
    held: str,
):
    made = recipe(tmp_path, *(f"checkpoint.{word}" for word in words))
    # A checkpoint has 12 bytes per parameter, an export 4.
    numbers = [int(number) for number in re.findall(r"\d+", held)]
    count = free // sum(n * size for n, size in zip(numbers, (12, 4), strict=False))
    options: dict[str, Any] = {"steps": range(steps[0], steps[1] + 1), "save_every": every}
    assert list(disk_warnings(tmp_path / "run", made, leaves(count), **options)) == []
    (doubt,) = disk_warnings(tmp_path / "run", made, leaves(count + 1), **options)
    assert f"will hold {held}" in re.sub(r" of \d+ bytes", "", doubt)


def test_disk_warnings_are_for_steps_that_are_left(tmp_path: Path, free: int):
    made = recipe(tmp_path)
    steps = range(21, 21)
    assert not list(disk_warnings(tmp_path / "run", made, leaves(free), steps=steps, save_every=5))
