"""Staging: an output gets its name when it is complete, and every obstacle is named."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prepcli.engine.journal import Journal
from prepcli.execution.failure_notes import FailureNotes
from prepcli.execution.staging import (
    DIVISION_FILE,
    JOIN_LOCK_FILE,
    LOCK_FILE,
    WORK_FOLDER,
    Staging,
    division_label,
    remove_work_folder,
)
from prepcli.execution.staging import RUN_FILE as RUN_FILE

from prepcli.core.errors import USAGE, PrepError
from prepcli.planning.shares import Share

RUN: dict[str, object] = {"request": "prep x", "source": "a", "plan": "b", "prep": "1"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def open_stage(out: Path, run: dict[str, object] = RUN, restart: bool = False) -> Staging:
    stage = Staging(out)
    stage.open(run, restart)
    return stage


def start_stage(out: Path, text: str = "new") -> Staging:
    """Return a stage with files in it."""
    stage = open_stage(out)
    (stage.folder / "d").mkdir(exist_ok=True)
    (stage.folder / "d" / "data").write_text(text)
    stage.journal_path(0).write_text("journal")
    return stage


def contents(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_publish_moves_all_staged_files(out: Path):
    start_stage(out).publish()
    assert contents(out) == {"d/data": "new"}
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]


def test_output_name_is_free_before_publishing(out: Path):
    stage = start_stage(out)
    stage.close()
    assert not out.exists()
    assert stage.folder.name == "out.partial"


def test_open_resumes_a_run(out: Path):
    start_stage(out).close()
    stage = open_stage(out)
    assert (stage.folder / "d" / "data").read_text() == "new"
    assert stage.journal_path(0).read_text() == "journal"


def test_leave_releases_the_locks_on_a_full_disk(out: Path, monkeypatch: pytest.MonkeyPatch):
    def record_heard(notes: FailureNotes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    stage = start_stage(out)
    monkeypatch.setattr(FailureNotes, "record_heard", record_heard)
    with pytest.raises(OSError, match="No space"):
        stage.leave()
    open_stage(out).close()


def test_restart_deletes_the_earlier_run(out: Path):
    start_stage(out).close()
    stage = open_stage(out, restart=True)
    assert contents(stage.folder).keys() == {
        f"{WORK_FOLDER}/{name}" for name in (LOCK_FILE, JOIN_LOCK_FILE, RUN_FILE, DIVISION_FILE)
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"request": "prep y"}, "it was started by `prep x`, this is `prep y`"),
        ({"source": "c", "plan": "d"}, "the source has changed since"),
        ({"prep": "2"}, "another version of prep"),
    ],
)
def test_open_rejects_another_run_without_restart(
    out: Path, change: dict[str, object], reason: str
):
    start_stage(out).close()
    with (
        Staging(out) as stage,
        pytest.raises(PrepError, match="belongs to another run") as caught,
    ):
        stage.open(RUN | change, restart=False)
    assert reason in caught.value.why
    assert "--restart" in caught.value.hint
    assert (out.parent / "out.partial" / "d" / "data").exists()
    stage = open_stage(out, RUN | change, restart=True)
    assert not (stage.folder / "d").exists()


@pytest.mark.parametrize("done_nbytes", [0, 4])
def test_open_replaces_only_a_run_without_durable_bytes(out: Path, done_nbytes: int):
    stage = open_stage(out)
    (stage.folder / "data").write_text("lost")
    journal = Journal(
        stage.journal_path(0), "b", division=stage.division_label, session=stage.session
    )
    journal.record(done_nbytes, {})
    journal.close()
    stage.close()
    second = Staging(out)
    if done_nbytes:
        with pytest.raises(PrepError, match="belongs to another run"):
            second.open(RUN | {"plan": "c"}, restart=False)
    else:
        second.open(RUN | {"plan": "c"}, restart=False)
    assert (stage.folder / "data").exists() == bool(done_nbytes)


def test_open_rejects_another_run_that_is_running(out: Path):
    running = Staging(out)
    running.open(RUN, restart=False, share=Share(2, 0))
    second = Staging(out)
    with pytest.raises(PrepError, match="belongs to another run"):
        second.open(RUN | {"plan": "c"}, restart=False, share=Share(2, 1))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\0\0"])
def test_restart_deletes_a_damaged_run_file(out: Path, data: bytes):
    stage = start_stage(out)
    stage.close()
    (stage.work / "run.json").write_bytes(data)
    with Staging(out) as second, pytest.raises(PrepError, match="is damaged") as caught:
        second.open(RUN, restart=False)
    assert "--restart" in caught.value.hint
    open_stage(out, restart=True)
    assert not (stage.folder / "d").exists()


def test_restart_deletes_a_journal_of_an_unknown_run(out: Path):
    stage = start_stage(out)
    stage.close()
    (stage.work / "run.json").unlink()
    open_stage(out, restart=True)
    assert not stage.journal_path(0).exists()


# Obstacles


def test_open_keeps_a_folder_of_the_user(out: Path):
    user_folder = out.with_name("out.partial")
    user_folder.mkdir()
    (user_folder / "thesis.txt").write_text("mine")
    for restart in (False, True):
        with Staging(out) as stage, pytest.raises(PrepError, match=r"out\.partial exists"):
            stage.open(RUN, restart)
    assert contents(user_folder) == {"thesis.txt": "mine"}


def test_open_stage_reuses_an_existing_empty_folder(out: Path):
    out.with_name("out.partial").mkdir()  # left by a killed run
    assert open_stage(out).work.is_dir()


def test_open_rejects_a_file_at_the_staging_path(out: Path):
    out.with_name("out.partial").write_text("mine")
    with pytest.raises(PrepError, match="exists"):
        open_stage(out)


def test_open_names_an_unwritable_path(out: Path):
    out.parent.joinpath("file").write_text("")
    with pytest.raises(PrepError, match=r"cannot read or write .*out\.partial") as caught:
        open_stage(out.parent / "file" / "out")
    assert caught.value.why == "Not a directory"


@pytest.mark.parametrize("name", [".", "..", "/", "folder/.."])
def test_staging_rejects_an_output_without_a_name(name: str):
    with pytest.raises(PrepError, match="is invalid") as caught:
        Staging(Path(name))
    assert caught.value.code == USAGE


HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "r+")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_open_rejects_a_locked_folder(out: Path):
    start_stage(out).close()
    lock = out.with_name("out.partial") / WORK_FOLDER / LOCK_FILE
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for restart in (False, True):
            with pytest.raises(PrepError, match=r"out\.partial is locked") as caught:
                open_stage(out, restart=restart)
            # The lock file names the last holder that wrote its id.
            assert f"process {os.getpid()} on " in caught.value.why
        assert (out.with_name("out.partial") / "d" / "data").exists()
        holder.kill()
    open_stage(out)  # a lock dies with its process


def test_open_rejects_a_folder_locked_by_this_process(out: Path):
    stage = open_stage(out)
    with pytest.raises(PrepError, match="is locked"):
        open_stage(out)
    stage.close()
    open_stage(out)


def test_open_reports_a_file_system_without_locks(out: Path, monkeypatch):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(PrepError, match="cannot read or write") as caught:
        open_stage(out)
    assert caught.value.why == "No locks available"


# Replacing an existing output


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling link"])
def test_publish_replaces_an_existing_output(out: Path, kind: str):
    link_target = out.with_name("other")
    if kind == "folder":
        (out / "old").mkdir(parents=True)
    elif kind == "file":
        out.write_text("old")
    else:
        out.symlink_to(link_target)
        if kind == "link":
            link_target.mkdir()
            (link_target / "kept").write_text("kept")
    start_stage(out).publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}
    assert sorted(p.name for p in out.parent.iterdir()) == (
        ["other", "out"] if kind == "link" else ["out"]
    )
    if kind == "link":
        assert contents(link_target) == {"kept": "kept"}


def test_publish_keeps_folders_with_similar_names(out: Path):
    for name in ("out.replaced", "out.old", "replaced"):
        out.with_name(name).mkdir()
    (out / "old").mkdir(parents=True)
    start_stage(out).publish(overwrite=True)
    assert sorted(p.name for p in out.parent.iterdir()) == [
        "out",
        "out.old",
        "out.replaced",
        "replaced",
    ]


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_publish_keeps_an_output_created_meanwhile(out: Path, kind: str):
    stage = start_stage(out)
    if kind == "folder":
        (out / "theirs").mkdir(parents=True)
    else:
        out.symlink_to("nowhere")
    with pytest.raises(PrepError, match="out already exists") as caught:
        stage.publish()
    assert "--overwrite" in caught.value.hint
    stage.close()
    assert out.is_symlink() == (kind != "folder")
    again = open_stage(out)
    again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}


class Killed(BaseException):
    """Simulated signal."""


def publish_until(stage: Staging, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Publish, and stop before the old output is moved, the folder is renamed, or the work folder is removed."""
    real_rename = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == {"moved": stage.out, "named": stage.folder}.get(moment):
            raise Killed
        return real_rename(path, target)

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        if moment == "cleaned":
            patched.setattr("shutil.rmtree", rmtree)
        with pytest.raises(Killed):
            stage.publish(overwrite=True)
    stage.close()


@pytest.mark.parametrize("moment", ["moved", "named", "cleaned"])
def test_publish_recovers_from_a_kill_while_replacing(out: Path, monkeypatch, moment: str):
    (out / "old").mkdir(parents=True)
    publish_until(start_stage(out), monkeypatch, moment)
    assert out.exists() == (moment != "named")
    if moment == "cleaned":
        remove_work_folder(out)
    else:
        again = open_stage(out)
        again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]


def test_publish_recovers_with_another_output_in_place(out: Path, monkeypatch):
    (out / "old").mkdir(parents=True)
    publish_until(start_stage(out), monkeypatch, "named")
    (out / "another").mkdir(parents=True)
    again = open_stage(out)
    again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}


def test_publish_replaces_an_output_after_a_kill_in_cleanup(out: Path, monkeypatch):
    publish_until(start_stage(out), monkeypatch, "cleaned")
    stage = open_stage(out, RUN | {"request": "prep y"})
    (stage.folder / "later").write_text("later")
    stage.publish(overwrite=True)
    assert contents(out) == {"later": "later"}


def test_publish_syncs_all_files_before_the_rename(out: Path, monkeypatch):
    synced: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def fsync(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), out.parent))
        real_sync(fd)

    def rename(path: Path, target: Path) -> Path:
        synced.append(f"{path.name} -> {target.name}")
        return real_rename(path, target)

    stage = start_stage(out)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    stage.publish(overwrite=True)
    named = synced.index("out.partial -> out")
    inside = ["out.partial/d/data", "out.partial/d", "out.partial"]
    assert [synced.index(name) for name in inside] == sorted(synced.index(name) for name in inside)
    assert max(synced.index(name) for name in inside) < named
    assert synced[named + 1 :] == ["."]


def test_publish_can_be_repeated_after_an_error(out: Path, monkeypatch):
    stage = start_stage(out)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(PrepError, match=r"cannot read or write .*out"):
            stage.publish(overwrite=True)
    stage.close()
    assert not out.exists()
    again = open_stage(out)
    again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}


def test_publish_restores_the_old_output_after_an_error(out: Path, monkeypatch):
    (out / "old").mkdir(parents=True)
    stage, real_rename = start_stage(out), Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == stage.folder:
            raise OSError(errno.EIO, "Input/output error")
        return real_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(PrepError, match="cannot read or write"):
        stage.publish(overwrite=True)
    assert [p.name for p in out.iterdir()] == ["old"]


def test_remove_work_folder_accepts_a_missing_output(out: Path):
    remove_work_folder(out)
    assert not out.exists()


def test_division_labels_are_unique():
    names = {
        division_label(count, durable)
        for count in (1, 2, 12)
        for durable in ({}, {1: "a"}, {2: "a"}, {1: "a", 2: "b"})
    }
    assert len(names) == 12
