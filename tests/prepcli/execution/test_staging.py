"""Staging: an output has its name when it is whole, and every way to be in another's way is named."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prepcli.errors import USAGE, PrepError
from prepcli.execution.staging import (
    DIVISION_FILE,
    JOIN_LOCK_FILE,
    LOCK_FILE,
    WORK_FOLDER,
    Staging,
    open_staging,
    remove_work_folder,
)
from prepcli.execution.staging import RUN_FILE as RUN_FILE

RUN: dict[str, object] = {"request": "prep x", "source": "a", "plan": "b", "prep": "1"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def opened(out: Path, run: dict[str, object] = RUN, restart: bool = False) -> Staging:
    stage = Staging(out)
    stage.open(run, restart)
    return stage


def begun(out: Path, text: str = "new") -> Staging:
    """A stage with something in it."""
    stage = opened(out)
    (stage.folder / "d").mkdir(exist_ok=True)
    (stage.folder / "d" / "data").write_text(text)
    stage.journal_path.write_text("journal")
    return stage


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_is_published_is_all_that_was_staged(out: Path):
    begun(out).publish()
    assert contents(out) == {"d/data": "new"}
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]


def test_the_name_is_not_there_before(out: Path):
    stage = begun(out)
    stage.close()
    assert not out.exists()
    assert stage.folder.name == "out.partial"


def test_a_run_is_taken_up_again(out: Path):
    begun(out).close()
    stage = opened(out)
    assert (stage.folder / "d" / "data").read_text() == "new"
    assert stage.journal_path.read_text() == "journal"


def test_restart_drops_what_was_there(out: Path):
    begun(out).close()
    stage = opened(out, restart=True)
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
def test_another_run_is_in_the_way_until_restart(out: Path, change: dict[str, object], reason: str):
    begun(out).close()
    with open_staging(out) as stage, pytest.raises(PrepError, match="belongs to another run") as caught:
        stage.open(RUN | change, restart=False)
    assert reason in caught.value.why
    assert "--restart" in caught.value.hint
    assert (out.parent / "out.partial" / "d" / "data").exists()
    stage = opened(out, RUN | change, restart=True)
    assert not (stage.folder / "d").exists()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\0\0"])
def test_a_broken_note_of_the_run_is_dropped_by_restart_as_its_hint_says(out: Path, data: bytes):
    stage = begun(out)
    stage.close()
    (stage.work / "run.json").write_bytes(data)
    with open_staging(out) as other, pytest.raises(PrepError, match="is damaged") as caught:
        other.open(RUN, restart=False)
    assert "--restart" in caught.value.hint
    opened(out, restart=True)
    assert not (stage.folder / "d").exists()


def test_restart_drops_a_journal_whose_run_is_not_known(out: Path):
    stage = begun(out)
    stage.close()
    (stage.work / "run.json").unlink()
    opened(out, restart=True)
    assert not stage.journal_path.exists()


# In the way


def test_a_folder_that_prep_did_not_make_is_left_alone(out: Path):
    theirs = out.with_name("out.partial")
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("mine")
    for restart in (False, True):
        with open_staging(out) as stage, pytest.raises(PrepError, match=r"out\.partial exists"):
            stage.open(RUN, restart)
    assert contents(theirs) == {"thesis.txt": "mine"}


def test_a_folder_that_was_just_made_is_taken(out: Path):
    out.with_name("out.partial").mkdir()  # by a run that was killed there
    assert opened(out).work.is_dir()


def test_a_file_of_that_name_is_in_the_way(out: Path):
    out.with_name("out.partial").write_text("mine")
    with pytest.raises(PrepError, match="exists"):
        opened(out)


def test_a_place_that_cannot_be_written_to_is_named(out: Path):
    out.parent.joinpath("file").write_text("")
    with pytest.raises(PrepError, match=r"cannot read or write .*out\.partial") as caught:
        opened(out.parent / "file" / "out")
    assert caught.value.why == "Not a directory"


@pytest.mark.parametrize("name", [".", "..", "/", "folder/.."])
def test_an_output_without_a_name_of_its_own_is_refused(name: str):
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


def test_a_lock_that_another_process_holds(out: Path):
    begun(out).close()
    lock = out.with_name("out.partial") / WORK_FOLDER / LOCK_FILE
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for restart in (False, True):
            with pytest.raises(PrepError, match=r"out\.partial is locked") as caught:
                opened(out, restart=restart)
            assert f"process {os.getpid()} on " in caught.value.why  # who wrote it there last
        assert (out.with_name("out.partial") / "d" / "data").exists()
        holder.kill()
    opened(out)  # a lock dies with its process


def test_a_lock_of_this_process_is_a_lock_too(out: Path):
    stage = opened(out)
    with pytest.raises(PrepError, match="is locked"):
        opened(out)
    stage.close()
    opened(out)


def test_a_file_system_without_locks_is_not_taken_for_a_lock(out: Path, monkeypatch):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(PrepError, match="cannot read or write") as caught:
        opened(out)
    assert caught.value.why == "No locks available"


# Published over what was there


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling link"])
def test_publishing_replaces_what_had_the_name(out: Path, kind: str):
    other = out.with_name("other")
    if kind == "folder":
        (out / "old").mkdir(parents=True)
    elif kind == "file":
        out.write_text("old")
    else:
        out.symlink_to(other)
        if kind == "link":
            other.mkdir()
            (other / "kept").write_text("kept")
    begun(out).publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}
    assert sorted(p.name for p in out.parent.iterdir()) == (["other", "out"] if kind == "link" else ["out"])
    if kind == "link":
        assert contents(other) == {"kept": "kept"}


def test_folders_of_the_user_with_names_like_ours_stay(out: Path):
    for name in ("out.replaced", "out.old", "replaced"):
        out.with_name(name).mkdir()
    (out / "old").mkdir(parents=True)
    begun(out).publish(overwrite=True)
    assert sorted(p.name for p in out.parent.iterdir()) == ["out", "out.old", "out.replaced", "replaced"]


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_what_came_to_have_the_name_meanwhile_is_kept(out: Path, kind: str):
    stage = begun(out)
    if kind == "folder":
        (out / "theirs").mkdir(parents=True)
    else:
        out.symlink_to("nowhere")
    with pytest.raises(PrepError, match="out exists") as caught:
        stage.publish()
    assert "--overwrite" in caught.value.hint
    stage.close()
    assert out.is_symlink() == (kind != "folder")
    again = opened(out)
    again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}


class Killed(BaseException):
    """What stands for a signal."""


def publish_until(stage: Staging, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Publish and be killed before what has the name is moved, before the name is given, or before the cleaning."""
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == {"moved": stage.out, "named": stage.folder}.get(moment):
            raise Killed
        return real(path, target)

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
def test_killed_while_it_replaces_what_had_the_name(out: Path, monkeypatch, moment: str):
    (out / "old").mkdir(parents=True)
    publish_until(begun(out), monkeypatch, moment)
    assert out.exists() == (moment != "named")
    if moment == "cleaned":
        remove_work_folder(out)
    else:
        again = opened(out)
        again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]


def test_killed_between_the_renames_and_then_something_else_has_the_name(out: Path, monkeypatch):
    (out / "old").mkdir(parents=True)
    publish_until(begun(out), monkeypatch, "named")
    (out / "another").mkdir(parents=True)
    again = opened(out)
    again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}


def test_a_later_run_replaces_an_output_that_was_never_cleaned(out: Path, monkeypatch):
    publish_until(begun(out), monkeypatch, "cleaned")
    stage = opened(out, RUN | {"request": "prep y"})
    (stage.folder / "later").write_text("later")
    stage.publish(overwrite=True)
    assert contents(out) == {"later": "later"}


def test_everything_is_durable_before_it_has_its_name(out: Path, monkeypatch):
    synced: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def fsync(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), out.parent))
        real_sync(fd)

    def rename(path: Path, target: Path) -> Path:
        synced.append(f"{path.name} -> {target.name}")
        return real_rename(path, target)

    stage = begun(out)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    stage.publish(overwrite=True)
    named = synced.index("out.partial -> out")
    inside = ["out.partial/d/data", "out.partial/d", "out.partial"]
    assert [synced.index(name) for name in inside] == sorted(synced.index(name) for name in inside)
    assert max(synced.index(name) for name in inside) < named
    assert synced[named + 1 :] == ["."]


def test_an_error_while_publishing_is_named_and_can_be_gone_on_from(out: Path, monkeypatch):
    stage = begun(out)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(PrepError, match=r"cannot read or write .*out"):
            stage.publish(overwrite=True)
    stage.close()
    assert not out.exists()
    again = opened(out)
    again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}


def test_what_had_the_name_gets_it_back_if_its_successor_cannot_have_it(out: Path, monkeypatch):
    (out / "old").mkdir(parents=True)
    stage, real = begun(out), Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == stage.folder:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(PrepError, match="cannot read or write"):
        stage.publish(overwrite=True)
    assert [p.name for p in out.iterdir()] == ["old"]


def test_cleaning_what_is_not_there_is_no_error(out: Path):
    remove_work_folder(out)
    assert not out.exists()
