"""Checks of memory and disk before a training run reads data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands import train_checks
from prepcli.commands.train_checks import (
    check_disk,
    checkpoint_nbytes,
    device_memory_nbytes,
    disk_warnings,
    memory_fields,
    memory_table,
    memory_warning,
)
from prepcli.errors import PrepError
from tests.trainer.models.test_memory_estimate import LLAMA_13B, make_inputs
from trainer.models.memory_estimate import estimate_memory
from trainer.models.mesh import parse_mesh
from trainer.models.param_tree import ParamLeaf
from trainer.recipe import Recipe, load_recipe

GIB = 1 << 30
RUN_13B = make_inputs("llama", LLAMA_13B, "1,8,4", micro_batch_size=16, seq_length=32768, itemsize=2)


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
def test_device_memory_depends_on_the_platform(devices: list[Any], host: dict[str, int | None], nbytes: int | None):
    assert device_memory_nbytes(devices, host) == nbytes


def test_memory_table_shows_the_attention_scores():
    estimated = estimate_memory(RUN_13B)
    lines = memory_table(RUN_13B, estimated, 80 * GIB).splitlines()
    assert any(" ".join(line.split()) == "of it scores [2, 10, 32768, 32768] 80.00 GiB" for line in lines)
    assert any(line.startswith("saved by 40 layers (remat none)") for line in lines)
    assert lines[-1].split() == ["available", "80.00", "GiB"]


def test_memory_table_shows_the_scores_of_a_tile():
    tiled = replace(RUN_13B, attention_tile=(512, 1024))
    text = " ".join(memory_table(tiled, estimate_memory(tiled), 80 * GIB).split())
    assert "of it scores [2, 10, 512, 1024] 40.0 MiB" in text


def test_memory_table_shows_the_tokens_of_one_device():
    """Each device of sp 8 has two blocks of 2,048 of 32,768 tokens."""
    split = replace(RUN_13B, mesh=parse_mesh("fsdp:8,mp:4,sp:8"), attention_tile=(-1, 512), head_chunk_size=-1)
    text = " ".join(memory_table(split, estimate_memory(split), 80 * GIB).split())
    assert "of it scores [2, 10, 2048, 512] 80.0 MiB" in text
    assert "head and loss, 4096 tokens" in text


def test_memory_warning_suggests_settings():
    doubt = memory_warning(RUN_13B, estimate_memory(RUN_13B), 80 * GIB)
    assert doubt.startswith("a step needs about ")
    assert "80.00 GiB are available" in doubt
    for key in ("model.remat_policy", "model.attention_kernel", "batch.accumulate", "data.seq_length", "mesh"):
        assert f"`{key}" in doubt


def test_memory_warning_omits_settings_already_used():
    spent = replace(RUN_13B, micro_batch_size=8, remat_policy="nothing_saveable", attention_tile=(512, 512))
    doubt = memory_warning(spent, estimate_memory(spent), GIB * 20)
    assert "accumulate" not in doubt
    assert "attention_kernel" not in doubt
    assert "remat_policy" not in doubt


def test_memory_warning_is_empty_for_a_run_that_fits():
    small = replace(RUN_13B, seq_length=64, micro_batch_size=8)
    estimated = estimate_memory(small)
    assert memory_warning(small, estimated, estimated.peak) == ""
    assert memory_warning(small, estimated, None) == "", "the memory is unknown"
    assert memory_fields(estimated, estimated.peak)["fits"] is True
    assert memory_fields(estimated, estimated.peak - 1)["fits"] is False
    assert memory_fields(estimated, None)["fits"] is None


def test_memory_warning_raises_for_a_state_far_too_large():
    estimated = estimate_memory(RUN_13B)
    assert memory_warning(RUN_13B, estimated, estimated.state - 1), "an estimate may err: a warning"
    with pytest.raises(PrepError, match="parameters and moments need") as caught:
        memory_warning(RUN_13B, estimated, estimated.state // 2)
    assert "`mesh`" in caught.value.hint


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
    assert checkpoint_nbytes(recipe(tmp_path, "checkpoint.optimizer_state=false"), leaves(10)) == 40


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
    assert [f"will hold {held:,} checkpoints" in doubt for doubt in doubts] == [True] * bool(held)
