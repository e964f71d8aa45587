"""Names of incomplete folders, and which of them are abandoned."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.data import partial_folders
from trainer.data.partial_folders import (
    is_abandoned,
    partial_name,
    unowned_partial_name,
    writer_has_ended,
)

IDENTITY = "0" * 32
PRINT_NAME = (
    f"from trainer.data.partial_folders import partial_name; print(partial_name('{IDENTITY}'))"
)


def name_of_ended_process() -> str:
    """Return a name that another process, which has ended, took."""
    return subprocess.run(
        [sys.executable, "-c", PRINT_NAME], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_partial_names_of_a_process_differ():
    names = {partial_name(IDENTITY) for _ in range(5)}
    assert len(names) == 5
    assert all(name.startswith(IDENTITY) and name.endswith(".partial") for name in names)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{IDENTITY}.partial", True),
        (IDENTITY, False),
        ("model-init.partial", False),
        ("lock", False),
    ],
)
def test_partial_folder_without_a_process_is_abandoned(tmp_path: Path, name: str, expected: bool):
    (tmp_path / name).mkdir()
    assert is_abandoned(tmp_path / name) == expected


def test_folder_is_abandoned_when_its_process_has_ended(tmp_path: Path):
    assert not is_abandoned(tmp_path / partial_name(IDENTITY))
    for name in (name_of_ended_process(), unowned_partial_name(IDENTITY)):
        assert is_abandoned(tmp_path / name)
        assert writer_has_ended(tmp_path / name)


def test_folder_of_an_earlier_process_with_this_id_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(partial_folders, "_start_time", lambda pid: 1)
    name = partial_name(IDENTITY)
    monkeypatch.setattr(partial_folders, "_start_time", lambda pid: 2)
    assert is_abandoned(tmp_path / name)


@pytest.mark.parametrize(("age_s", "expected"), [(0, False), (3600, False), (25 * 3600, True)])
def test_folder_of_another_host_is_abandoned_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: int, expected: bool
):
    with monkeypatch.context() as other_host:
        other_host.setattr(partial_folders, "machine_id", lambda: "abc")
        folder = tmp_path / partial_name(IDENTITY)
    folder.mkdir()
    (folder / "tokens.bin").touch()
    written_s = time.time() - age_s
    for path in (folder / "tokens.bin", folder):
        os.utime(path, (written_s, written_s))
    assert is_abandoned(folder) == expected
    assert not writer_has_ended(folder)


def test_folder_that_another_process_removes_is_not_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as other_host:
        other_host.setattr(partial_folders, "machine_id", lambda: "abc")
        folder = tmp_path / partial_name(IDENTITY)
    assert not is_abandoned(folder)
