"""Hosts of a job, and the processes that write a folder for those that share it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prepcli.core.process_group import SingleProcess
from tests.helpers.thread_groups import ThreadGroup, run_group
from trainer.distributed import agreement


def test_processes_per_host_counts_one_machine_only(monkeypatch: pytest.MonkeyPatch):
    assert run_group(3, agreement.processes_per_host) == [3] * 3
    assert agreement.processes_per_host(SingleProcess()) == 1
    names = iter("aab")
    monkeypatch.setattr(agreement, "machine_id", lambda: next(names))
    assert run_group(3, agreement.processes_per_host) == [2] * 3


def test_machine_id_depends_on_kernel_and_host_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ids = [agreement.machine_id()]
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: "container")
    ids.append(agreement.machine_id())
    monkeypatch.setattr(agreement, "BOOT_ID", tmp_path / "missing")
    ids.append(agreement.machine_id())
    assert len({*ids}) == 3
    assert agreement.machine_id() == ids[-1]


@pytest.mark.parametrize(
    ("num_shared", "writers"), [(4, [True, False, False, False]), (2, [True, False, True, False])]
)
def test_each_folder_has_exactly_one_writing_process(
    tmp_path: Path, num_shared: int, writers: list[bool]
):
    """Processes after the first `num_shared` ones have a folder of their own."""

    def writes(process: ThreadGroup) -> bool:
        folder = tmp_path / ("shared" if process.index < num_shared else "other")
        folder.mkdir(exist_ok=True)
        return process.index in agreement.folder_processes(folder, process).writers

    assert run_group(4, writes) == writers
    assert list(tmp_path.rglob(f"{agreement.PROBE_PREFIX}*")) == []


def test_sees_folder_removes_only_old_probes(tmp_path: Path):
    old, new = (tmp_path / f"{agreement.PROBE_PREFIX}{age}" for age in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    assert agreement.sees_folder(tmp_path, SingleProcess())
    assert list(tmp_path.iterdir()) == [new], "another job may use it"


def test_writers_are_one_process_of_each_other_host():
    answers = [("a", True), ("a", True), ("b", False), ("b", False), ("c", False), ("d", True)]
    assert agreement._folder_writers(answers) == [0, 2, 4]
    assert agreement._host_leaders(answers) == [0, 2, 4, 5]
