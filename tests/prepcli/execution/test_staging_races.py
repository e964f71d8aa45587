"""Processes that join, publish or remove a staging folder at the same time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from prepcli.errors import PrepError
from prepcli.execution import locks
from prepcli.execution.staging import Staging
from prepcli.planning.shares import Share
from tests.prepcli.execution.test_staging import RUN, begun, opened


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_folder_that_is_published_while_joined_is_made_anew(out: Path, monkeypatch: pytest.MonkeyPatch):
    stage, real, times = begun(out), os.listdir, iter(range(1))

    def listdir(path: Path) -> list[str]:
        names = real(path)
        if path == stage.folder and next(times, None) is not None:
            stage.publish()
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    late = Staging(out)
    late.open(RUN, restart=False, share=Share(2, 1))
    assert (out / "d" / "data").exists()
    assert late.folder.exists()


def test_folder_that_vanishes_at_the_door_is_made_anew(out: Path, monkeypatch: pytest.MonkeyPatch):
    real, times = locks._open, iter(range(1))

    def vanishing(path: Path) -> int:
        if next(times, None) is not None:
            shutil.rmtree(path.parent.parent)
        return real(path)

    monkeypatch.setattr(locks, "_open", vanishing)
    assert opened(out).folder.exists()


def test_folder_that_is_not_needed_is_discarded(out: Path):
    stage = opened(out)
    stage.discard()
    assert list(out.parent.iterdir()) == []
    stage.close()
    opened(out)


def test_folder_of_another_process_is_not_discarded(out: Path):
    stage = opened(out)
    stage.folder.rename(out.with_name("moved"))
    other = opened(out)
    stage.discard()
    assert other.folder.exists()


def test_folder_that_was_replaced_is_not_published(out: Path):
    stage = begun(out)
    stage.folder.rename(out.with_name("moved"))
    opened(out)
    with pytest.raises(PrepError, match="was changed by another program"), stage.holding_publish_lock():
        pass
