"""Processes that join, publish or remove a staging folder at the same time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from prepcli.execution.staging import Staging

from prepcli.core.errors import PrepError
from prepcli.execution import locks
from prepcli.planning.shares import Share
from tests.prepcli.execution.test_staging import RUN, open_stage, start_stage


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_open_recreates_a_folder_published_while_joining(
    out: Path, monkeypatch: pytest.MonkeyPatch
):
    stage, real_listdir, times = start_stage(out), os.listdir, iter(range(1))

    def listdir(path: Path) -> list[str]:
        names = real_listdir(path)
        if path == stage.folder and next(times, None) is not None:
            stage.publish()
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    late = Staging(out)
    late.open(RUN, restart=False, share=Share(2, 1))
    assert (out / "d" / "data").exists()
    assert late.folder.exists()


def test_open_recreates_a_folder_removed_while_joining(out: Path, monkeypatch: pytest.MonkeyPatch):
    real_open, times = locks.open_no_follow, iter(range(1))

    def vanishing(path: Path, flags: int) -> int:
        if next(times, None) is not None:
            shutil.rmtree(path.parent.parent)
        return real_open(path, flags)

    monkeypatch.setattr(locks, "open_no_follow", vanishing)
    assert open_stage(out).folder.exists()


def test_discard_removes_an_unneeded_folder(out: Path):
    stage = open_stage(out)
    stage.discard()
    assert list(out.parent.iterdir()) == []
    stage.close()
    open_stage(out)


def test_discard_keeps_the_folder_of_another_process(out: Path):
    stage = open_stage(out)
    stage.folder.rename(out.with_name("moved"))
    peer = open_stage(out)
    stage.discard()
    assert peer.folder.exists()


def test_publish_rejects_a_replaced_folder(out: Path):
    stage = start_stage(out)
    stage.folder.rename(out.with_name("moved"))
    open_stage(out)
    with (
        pytest.raises(PrepError, match="was changed by another program"),
        stage.holding_publish_lock(),
    ):
        pass
