"""The folder of a run: an output gets its name when it is complete, every obstacle is named, and processes may meet."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from prepcli.core.errors import USAGE, PrepError
from prepcli.execution import folder_output
from prepcli.execution.folder_output import (
    JOIN_LOCK_FILE,
    LOCK_FILE,
    SESSION_FILE,
    FolderOutput,
    remove_work_folder,
)
from prepcli.execution.output import RUN_FILE, SOURCE_FILE, WORK_FOLDER

RUN: dict[str, object] = {"request": "prep x", "source": "a", "plan": "b", "prep": "1"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def join_run(out: Path, run: dict[str, object] = RUN, restart: bool = False) -> FolderOutput:
    store = FolderOutput(out)
    store.join(run, {"files": []}, restart=restart)
    return store


def start_run(out: Path, text: str = "new") -> FolderOutput:
    """Return a store of a run with files and a note."""
    store = join_run(out)
    (store.folder / "d").mkdir(exist_ok=True)
    (store.folder / "d" / "data").write_text(text)
    store.write("done/0", b"note")
    return store


def contents(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_join_resumes_a_run(out: Path):
    start_run(out).leave()
    store = join_run(out)
    assert (store.folder / "d" / "data").read_text() == "new"
    assert store.read("done/0") == b"note"
    assert store.units_with("done") == {0}


def test_session_lasts_while_a_process_is_in_the_run(out: Path):
    first = join_run(out)
    second = join_run(out)
    assert second.session == first.session
    first.leave()
    third = join_run(out)
    assert third.session == first.session
    second.leave()
    third.leave()
    assert join_run(out).session != first.session


def test_claims_belong_to_one_process_until_it_ends(out: Path):
    first, second = join_run(out), join_run(out)
    claim = first.claim("0")
    assert claim is not None
    assert second.claim("0") is None
    assert second.claim("1") is not None
    with claim:
        pass
    assert second.claim("0") is not None


def test_state_is_absent_after_the_publication(out: Path):
    store, other = start_run(out), join_run(out)
    store.publish()
    assert other.is_published()
    assert other.read("done/0") is None
    assert other.units_with("done") == set()
    assert other.claim("1") is None


def test_output_that_moved_after_the_publication_is_an_error(out: Path):
    store, waiting = start_run(out), join_run(out)
    store.publish()
    out.rename(out.with_name("moved"))
    with pytest.raises(PrepError, match=r"out\.partial was changed by another program"):
        waiting.is_published()


def test_restart_deletes_the_earlier_run(out: Path):
    start_run(out).leave()
    store = join_run(out, restart=True)
    assert contents(store.folder).keys() == {
        f"{WORK_FOLDER}/{name}"
        for name in (LOCK_FILE, JOIN_LOCK_FILE, RUN_FILE, SOURCE_FILE, SESSION_FILE)
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"request": "prep y"}, "it was started by `prep x`, this is `prep y`"),
        ({"source": "c", "plan": "d"}, "the source has changed since"),
        ({"prep": "2"}, "another version of prep"),
    ],
)
def test_join_rejects_another_run_without_restart(
    out: Path, change: dict[str, object], reason: str
):
    start_run(out).leave()
    with (
        pytest.raises(PrepError, match="belongs to another run") as caught,
    ):
        join_run(out, RUN | change)
    assert reason in caught.value.why
    assert "--restart" in caught.value.hint
    assert (out.parent / "out.partial" / "d" / "data").exists()
    store = join_run(out, RUN | change, restart=True)
    assert not (store.folder / "d").exists()


@pytest.mark.parametrize("note", ["", "done/0", "part/0", "journal.0"])
def test_join_replaces_only_a_run_without_notes(out: Path, note: str):
    """Earlier versions noted durable bytes in `journal.0`."""
    store = join_run(out)
    (store.folder / "data").write_text("lost")
    if note:
        store.write(note, b"text")
    store.leave()
    if note:
        with pytest.raises(PrepError, match="belongs to another run"):
            join_run(out, RUN | {"plan": "c"})
    else:
        join_run(out, RUN | {"plan": "c"})
    assert (store.folder / "data").exists() == bool(note)


@pytest.mark.parametrize("restart", [False, True])
def test_join_rejects_another_run_that_is_running(out: Path, restart: bool):
    running = join_run(out)
    with pytest.raises(PrepError, match=r"out\.partial is locked") as caught:
        join_run(out, RUN | {"plan": "c"}, restart=restart)
    assert f"process {os.getpid()} on " in caught.value.why
    running.leave()
    join_run(out, RUN | {"plan": "c"})


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\0\0"])
def test_restart_deletes_a_damaged_run_file(out: Path, data: bytes):
    store = start_run(out)
    store.leave()
    (store.work / "run.json").write_bytes(data)
    with pytest.raises(PrepError, match="is damaged") as caught:
        join_run(out)
    assert "--restart" in caught.value.hint
    join_run(out, restart=True)
    assert not (store.folder / "d").exists()


def test_restart_deletes_notes_of_an_unknown_run(out: Path):
    store = start_run(out)
    store.leave()
    (store.work / "run.json").unlink()
    assert join_run(out, restart=True).units_with("done") == set()


# Obstacles


def test_join_keeps_a_folder_of_the_user(out: Path):
    user_folder = out.with_name("out.partial")
    user_folder.mkdir()
    (user_folder / "thesis.txt").write_text("mine")
    for restart in (False, True):
        with pytest.raises(PrepError, match=r"out\.partial exists"):
            join_run(out, restart=restart)
    assert contents(user_folder) == {"thesis.txt": "mine"}


def test_join_run_reuses_an_existing_empty_folder(out: Path):
    out.with_name("out.partial").mkdir()  # left by a killed run
    assert join_run(out).work.is_dir()


def test_join_rejects_a_file_at_the_staging_path(out: Path):
    out.with_name("out.partial").write_text("mine")
    with pytest.raises(PrepError, match="exists"):
        join_run(out)


def test_join_names_an_unwritable_path(out: Path):
    out.parent.joinpath("file").write_text("")
    with pytest.raises(PrepError, match=r"cannot read or write .*out\.partial") as caught:
        join_run(out.parent / "file" / "out")
    assert caught.value.why == "Not a directory"


@pytest.mark.parametrize("name", [".", "..", "/", "folder/.."])
def test_store_rejects_an_output_without_a_name(name: str):
    with pytest.raises(PrepError, match="is invalid") as caught:
        FolderOutput(Path(name))
    assert caught.value.code == USAGE


def test_join_reports_a_file_system_without_locks(out: Path, monkeypatch):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(PrepError, match="cannot read or write") as caught:
        join_run(out)
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
    start_run(out).publish(overwrite=True)
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
    start_run(out).publish(overwrite=True)
    assert sorted(p.name for p in out.parent.iterdir()) == [
        "out",
        "out.old",
        "out.replaced",
        "replaced",
    ]


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_publish_keeps_an_output_created_meanwhile(out: Path, kind: str):
    store = start_run(out)
    if kind == "folder":
        (out / "theirs").mkdir(parents=True)
    else:
        out.symlink_to("nowhere")
    with pytest.raises(PrepError, match="out already exists") as caught:
        store.publish()
    assert "--overwrite" in caught.value.hint
    store.leave()
    assert out.is_symlink() == (kind != "folder")
    again = join_run(out)
    again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}


class Killed(BaseException):
    """Simulated signal."""


def publish_until(store: FolderOutput, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Publish, and stop before the old output is moved, the folder is renamed, or the work folder is removed."""
    real_rename = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == {"moved": store.out, "named": store.folder}.get(moment):
            raise Killed
        return real_rename(path, target)

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        if moment == "cleaned":
            patched.setattr("shutil.rmtree", rmtree)
        with pytest.raises(Killed):
            store.publish(overwrite=True)
    store.leave()


@pytest.mark.parametrize("moment", ["moved", "named", "cleaned"])
def test_publish_recovers_from_a_kill_while_replacing(out: Path, monkeypatch, moment: str):
    (out / "old").mkdir(parents=True)
    publish_until(start_run(out), monkeypatch, moment)
    assert out.exists() == (moment != "named")
    if moment == "cleaned":
        remove_work_folder(out)
    else:
        again = join_run(out)
        again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]


def test_publish_recovers_with_another_output_in_place(out: Path, monkeypatch):
    (out / "old").mkdir(parents=True)
    publish_until(start_run(out), monkeypatch, "named")
    (out / "another").mkdir(parents=True)
    again = join_run(out)
    again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}


def test_publish_replaces_an_output_after_a_kill_in_cleanup(out: Path, monkeypatch):
    publish_until(start_run(out), monkeypatch, "cleaned")
    store = join_run(out, RUN | {"request": "prep y"})
    (store.folder / "later").write_text("later")
    store.publish(overwrite=True)
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

    store = start_run(out)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    store.publish(overwrite=True)
    named = synced.index("out.partial -> out")
    inside = ["out.partial/d/data", "out.partial/d", "out.partial"]
    assert [synced.index(name) for name in inside] == sorted(synced.index(name) for name in inside)
    assert max(synced.index(name) for name in inside) < named
    assert synced[named + 1 :] == ["."]


def test_new_parents_of_an_output_are_synced(tmp_path: Path, monkeypatch):
    synced: set[str] = set()
    real_sync = os.fsync

    def fsync(fd: int) -> None:
        synced.add(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        real_sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    start_run(tmp_path / "new/sub/out").publish()
    assert {".", "new", "new/sub"} <= synced


def test_identity_of_a_conversion_survives_a_power_cut(out: Path, monkeypatch):
    """The content reaches the disk before the name. Without it, only `--restart` would help."""
    calls: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def fsync(fd: int) -> None:
        calls.append(str(os.fstat(fd).st_ino))
        real_sync(fd)

    def rename(path: Path, target: Path) -> Path:
        calls.append(f"{path.stat().st_ino} -> {target.name}")
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    join_run(out)
    for name in ("run.json", "source.json"):
        inode = (out.with_name("out.partial") / ".prep" / name).stat().st_ino
        assert 0 <= calls.index(str(inode)) < calls.index(f"{inode} -> {name}")


def test_publish_can_be_repeated_after_an_error(out: Path, monkeypatch):
    store = start_run(out)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(PrepError, match=r"cannot read or write .*out"):
            store.publish(overwrite=True)
    store.leave()
    assert not out.exists()
    again = join_run(out)
    again.publish(overwrite=True)
    assert contents(out) == {"d/data": "new"}


def test_publish_restores_the_old_output_after_an_error(out: Path, monkeypatch):
    (out / "old").mkdir(parents=True)
    store, real_rename = start_run(out), Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == store.folder:
            raise OSError(errno.EIO, "Input/output error")
        return real_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(PrepError, match="cannot read or write"):
        store.publish(overwrite=True)
    assert [p.name for p in out.iterdir()] == ["old"]


def test_remove_work_folder_accepts_a_missing_output(out: Path):
    remove_work_folder(out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("call", "target", "name"),
    [
        (lambda store: store.delete(["done/0"]), Path, "unlink"),
        (lambda store: store.units_with("done"), os, "listdir"),
        (lambda store: store.is_published(), Path, "stat"),
    ],
)
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_store_names_the_path_of_a_system_error(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[FolderOutput], object],
    target: object,
    name: str,
    number: int,
):
    store = start_run(out)

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(target, name, fail)
        with pytest.raises(PrepError, match=r"cannot read or write .*out"):
            call(store)


@pytest.mark.parametrize("name", [LOCK_FILE, JOIN_LOCK_FILE])
@pytest.mark.parametrize("restart", [False, True])
def test_lock_file_is_never_a_link(out: Path, name: str, restart: bool):
    start_run(out).leave()
    lock = out.parent / "out.partial" / WORK_FOLDER / name
    lock.unlink()
    lock.symlink_to(out.parent / "victim")
    with pytest.raises(PrepError, match=f"{name} cannot be used - it is a symbolic link"):
        join_run(out, restart=restart)
    assert not (out.parent / "victim").exists()


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
