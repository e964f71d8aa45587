"""Tests of the throttled disk: requirements and cleanup; creating the disk itself needs root."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bench import slow_disk as slow_disk_module
from bench.slow_disk import LIMITS, TOOLS, measure_rates, slow_disk

MIB = 1 << 20


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that replaces the cgroup controller."""
    folder = tmp_path / "blkio"
    folder.mkdir()
    for limit in LIMITS:
        (folder / limit).touch()
    monkeypatch.setattr(slow_disk_module, "CONTROLLER", folder)
    monkeypatch.setattr(slow_disk_module, "_cgroup_lines", lambda: ["7:blkio:/"])
    monkeypatch.setattr(shutil, "which", lambda _: "/tool")
    return folder


def fail(work: Path, nbytes: int = MIB) -> str:
    """Return the message of the SystemExit that creating a disk raises."""
    with pytest.raises(SystemExit) as caught, slow_disk(work, 250, nbytes):
        pass
    return str(caught.value)


def test_slow_disk_names_a_missing_tool(
    controller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "losetup" else tool)
    assert fail(tmp_path) == "--slow-disk needs losetup"


def test_slow_disk_names_a_missing_controller(controller: Path, tmp_path: Path):
    (controller / LIMITS[0]).unlink()
    assert "root and the blkio controller" in fail(tmp_path)


def test_slow_disk_rejects_a_size_above_free_space(controller: Path, tmp_path: Path):
    assert "the slow disk takes 1024.00 TiB" in fail(tmp_path, 1 << 50)


def test_failed_step_removes_the_image(
    controller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(
        slow_disk_module, "_run", lambda *words: (_ for _ in ()).throw(SystemExit(f"no {words[0]}"))
    )
    assert fail(tmp_path / "work") == "no losetup"
    assert not list((tmp_path / "work").iterdir())


def test_measure_rates_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slow_disk_module, "PROBE_NBYTES", 2 * 10**6)
    measured = measure_rates(tmp_path)
    assert min(measured.copied, measured.written, measured.read) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0
    or not all(map(shutil.which, TOOLS))
    or not (slow_disk_module.CONTROLLER / LIMITS[0]).exists(),
    reason="needs root, loop devices and the blkio controller of cgroup v1",
)
def test_slow_disk_limits_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slow_disk_module, "PROBE_NBYTES", 100 * 10**6)
    with slow_disk(tmp_path, 50, 400 * MIB) as folder:
        measured = measure_rates(folder)
    assert max(measured.copied, measured.written, measured.read) < 75
    assert not list(tmp_path.iterdir())
