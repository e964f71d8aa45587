"""Processes that join, publish or remove a staging folder at the same time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.execution import folder_output
from tests.helpers.faults import Killed
from tests.prepcli.execution.test_folder_output import join_run, start_run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_join_recreates_a_folder_published_while_joining(
    out: Path, monkeypatch: pytest.MonkeyPatch
):
    store, real_listdir, times = start_run(out), os.listdir, iter(range(1))

    def listdir(path: Path) -> list[str]:
        names = real_listdir(path)
        if path == store.folder and next(times, None) is not None:
            store.publish()
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    late = join_run(out)
    assert (out / "d" / "data").exists()
    assert late.folder.exists()


def test_join_recreates_a_folder_removed_while_joining(out: Path, monkeypatch: pytest.MonkeyPatch):
    real_open, times = folder_output.open_no_follow, iter(range(1))

    def vanishing(path: Path, flags: int) -> int:
        if next(times, None) is not None:
            shutil.rmtree(path.parent.parent)
        return real_open(path, flags)

    monkeypatch.setattr(folder_output, "open_no_follow", vanishing)
    assert join_run(out).folder.exists()


def test_discard_removes_an_unneeded_folder(out: Path):
    store = join_run(out)
    store.discard()
    assert list(out.parent.iterdir()) == []
    store.leave()
    join_run(out)


def test_killed_discard_leaves_a_folder_to_join(out: Path, monkeypatch: pytest.MonkeyPatch):
    real_unlink = Path.unlink
    for call in range(20):
        store, calls = start_run(out), iter(range(call))

        def remove(path: Path, calls: Iterator[int] = calls, **more: bool) -> None:
            if next(calls, None) is None:
                raise Killed
            real_unlink(path, **more)

        with monkeypatch.context() as patched, suppress(Killed):
            patched.setattr(Path, "unlink", remove)
            store.discard()
        assert {path.name for path in out.parent.iterdir()} <= {"out.partial"}
        join_run(out).leave()


def test_discard_keeps_the_folder_of_a_peer(out: Path):
    store, peer = start_run(out), join_run(out)
    store.discard()
    assert peer.read("done/0") == b"note"
    assert not peer.is_published()


def test_discard_keeps_the_folder_of_another_process(out: Path):
    store = join_run(out)
    store.folder.rename(out.with_name("moved"))
    peer = join_run(out)
    store.discard()
    assert peer.folder.exists()


def test_a_replaced_folder_is_not_used(out: Path):
    store = start_run(out)
    store.folder.rename(out.with_name("moved"))
    join_run(out)
    with pytest.raises(PrepError, match="was changed by another program"):
        store.is_published()
