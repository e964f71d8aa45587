"""Outputs in an object store: written from memory, by one or several processes, resumed from the store alone."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import chdir
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prepcli.commands.cli.main import main
from prepcli.commands.operations import conversion
from prepcli.core.errors import PrepError
from prepcli.execution.bucket_converter import BucketConverter
from prepcli.execution.output import UnitNote
from prepcli.planning.object_files import plan_object_files
from prepcli.planning.plan import Plan
from prepcli.stores import object_store
from prepcli.stores.addresses import parse_url
from prepcli.stores.bucket_lock import BucketLock, LockOwner
from prepcli.stores.byte_ranges import LOCK_FILE
from prepcli.stores.object_store import Bucket
from prepcli.targets.planner import Draft, Placed, make_plan
from tests.helpers.faults import change_and_restore_time, make_other_values, replace_by_copy
from tests.helpers.fork_server import ForkedProcess
from tests.helpers.killing import read_files
from tests.helpers.object_server import FakeObjectStore
from tests.helpers.run_cli import MonkeyPatch
from tests.helpers.slow_cases import slow_except
from tests.helpers.store_sites import (
    MESH,
    StoreSite,
    finish,
    stop_or_finish,
    wait_for_writes,
)
from tests.helpers.tiny_checkpoints import make_checkpoint
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("small_objects")]
LAST_WRITES = ["PUT bucket/out/commit_success.txt", "PUT bucket/out/prep-manifest.json"]
KILLS = 3
COMMANDS = {
    "save-init": ("save-init", "m", *MESH),
    "save-init of chunk files": ("save-init", "m", *MESH, "--storage", "files"),
    "save-init without a mesh": ("save-init", "m", "--dtype", "bfloat16"),
    "reshard": ("reshard", "init", "--mesh", "1,1,4"),
    "export": ("export", "init", "--shard-size", "4MB"),
    "pad-vocab": ("pad-vocab", "m", "--multiple", "8", "--init", "mean"),
    "export for Flax": ("export", "init", "--layout", "hf-flax"),
    "compressed": ("reshard", "init", "--mesh", "1,4,1", "--compress", "zstd"),
}


def words(name: str, home: Path) -> list[str]:
    """Return the arguments of a command, with the path of its source."""
    command, source, *options = COMMANDS[name]
    return [command, str(home / source), *options]


def run_with_failing(site: StoreSite, request: str, *arguments: str) -> dict[str, Any]:
    """Run a command in this process while the store refuses requests that begin so, and return its JSON."""
    site.store.failing_requests = request
    report = site.run_prep(*arguments)
    site.store.failing_requests = "\0"
    return report


def convert_locally(site: StoreSite, arguments: Sequence[str]) -> dict[str, bytes]:
    """Execute the plan of a bucket output in a local folder, and return its files."""
    # The plan is the same object, so that manifest and index are equal too.

    def plan_objects(draft: Draft, placed: Placed, **options: Any) -> Plan:
        return plan_object_files(make_plan(draft, placed, **options))

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(conversion, "make_plan", plan_objects)
        report = site.run_prep(*arguments, "--out", "local")
    assert report["ok"], report
    return read_files(Path("local"))


@pytest.mark.parametrize("name", slow_except(COMMANDS, ("save-init", "export")))
def test_bucket_output_has_the_bytes_of_a_local_one(site: StoreSite, home: Path, name: str):
    arguments = words(name, home)
    expected = convert_locally(site, arguments)
    report = site.run_process(*arguments, "--out", "gs://bucket/out", small_files=True)
    assert (report["ok"], report["output"]) == (True, "gs://bucket/out"), report
    assert site.store.objects_below("bucket/out/") == expected
    assert site.writes()[-2 if "export" not in name and "pad" not in name else -1 :]
    assert not [path for path in site.cwd.iterdir() if path.name != "local"]
    source = str(home / COMMANDS[name][1])
    if "Flax" not in name and "--dtype" not in arguments:
        assert site.run_prep("verify", "gs://bucket/out", source)["ok"]


def test_manifest_is_the_last_object(site: StoreSite, home: Path):
    assert site.run_prep(*words("save-init", home), "--out", "gs://bucket/out")["ok"]
    lines = [line for line in site.writes() if "/.prep/" not in line and line != "POST bucket"]
    assert lines[-2:] == LAST_WRITES
    assert not [key for key in site.store.objects if "/.prep/" in key]


@pytest.mark.parametrize(
    ("name", "count"),
    slow_except(
        product(("save-init", "export", "save-init of chunk files", "compressed"), (1, 2, 4)),
        [("save-init", 2)],
    ),
)
def test_killed_processes_resume_from_the_store(site: StoreSite, home: Path, name: str, count: int):
    """Each run has a folder of its own, as on another machine."""
    arguments = words(name, home)
    expected = convert_locally(site, arguments)
    rng = random.Random(f"{name} {count}")
    num_runs = 0
    is_complete = False
    while not is_complete:
        folder = site.cwd / f"machine-{num_runs}"
        folder.mkdir()
        stored = {key for key in site.store.objects if "/.prep" not in key}
        site.store.received.clear()
        running: list[ForkedProcess] = []
        with chdir(folder):
            for index in range(count):
                share = ("--processes", f"{count}/{index}", "--out", "gs://bucket/out")
                running.append(site.start_prep(*arguments, *share, small_files=True))
        if num_runs < KILLS:
            wait_for_writes(site.store, rng.randrange(1, 12 * count), running)
        reports = [stop_or_finish(process, kill=num_runs < KILLS) for process in running]
        is_complete = all(report is not None and report["ok"] for report in reports)
        assert is_complete or num_runs < KILLS, reports
        # A killed process may have sent an object without an answer of the store.
        time.sleep(0.05)
        wait_until(lambda: not site.store.num_running)
        sent_again = stored & {key for key, _ in site.store.received}
        assert not sent_again
        assert not list(folder.iterdir())
        num_runs += 1
    written = site.store.objects_below("bucket/out/")
    # A kill may also come after the publication.
    written.pop(LOCK_FILE, None)
    assert written == expected


def test_stop_without_the_store_has_its_exit_code(
    site: StoreSite, home: Path, monkeypatch: MonkeyPatch
):
    note_sent = BucketConverter._note_sent  # pyright: ignore[reportPrivateUsage]
    signals = iter([signal.SIGTERM])

    def lose_store(run: BucketConverter, number: int, note: UnitNote) -> None:
        note_sent(run, number, note)
        # Reads and listings fail.
        site.store.failing_requests = "GET bucket"
        for number in signals:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(BucketConverter, "_note_sent", lose_store)
    site.capsys.readouterr()
    assert main([*words("save-init", home), "--out", "gs://bucket/out", "--progress", "none"]) == 75
    assert "are kept in gs://bucket/out" in site.capsys.readouterr().err


def leave_lock(store: FakeObjectStore) -> None:
    """Store the lock of a process that was killed after it had published the output."""
    plan = json.loads(store.objects["bucket/out/prep-manifest.json"])["plan"]
    owner = LockOwner("another-host", 1, plan, "token")
    store.store(f"bucket/out/{LOCK_FILE}", owner.to_bytes())


def test_the_next_run_deletes_what_a_kill_after_publication_left(site: StoreSite, home: Path):
    arguments = (*words("save-init", home), "--out", "gs://bucket/out")
    site.store.failing_requests = "DELETE bucket/out/.prep/done"
    assert site.run_prep(*arguments)["ok"]
    site.store.failing_requests = "\0"
    leave_lock(site.store)
    site.store.objects.pop("bucket/out/.prep/run.json", None)
    assert [key for key in site.store.objects if "/out/.prep/done/" in key]
    assert site.run_prep(*arguments)["already"] is True
    assert not [key for key in site.store.objects if "/out/.prep" in key]


@pytest.mark.slow
def test_notes_written_after_the_publication_are_deleted(
    site: StoreSite, home: Path, monkeypatch: MonkeyPatch
):
    """Another process resumes and publishes the output while this one begins."""
    arguments = (*words("save-init", home), "--out", "gs://bucket/out")
    expected = convert_locally(site, arguments[:-2])
    assert not run_with_failing(site, "PUT bucket/out/hf/", *arguments)["ok"]
    join = BucketConverter.join

    def join_and_publish(run: BucketConverter, *arguments: Any) -> bool:
        is_needed = join(run, *arguments)
        for key in [key for key in site.store.objects if "/.prep/" in key]:
            del site.store.objects[key]
        for path, data in expected.items():
            site.store.store(f"bucket/out/{path}", data)
        return is_needed

    monkeypatch.setattr(BucketConverter, "join", join_and_publish)
    assert site.run_prep(*arguments, "--processes", "2/1")["ok"]
    assert site.store.objects_below("bucket/out/") == expected


@pytest.mark.parametrize(
    "change", slow_except([change_and_restore_time, replace_by_copy], [replace_by_copy])
)
def test_resume_compares_the_source_with_the_earlier_run(
    site: StoreSite, change: Callable[[Path], None]
):
    make_checkpoint(Path("m"))
    arguments = ("save-init", "./m", "--mesh", "1,2,2", "--out", "gs://bucket/out")
    assert not run_with_failing(site, "PUT bucket/out/hf/", *arguments, "--pad-vocab", "8")["ok"]
    change(min(Path("m").glob("*.safetensors")))
    report = site.run_prep(*arguments, "--pad-vocab", "8")
    if change is replace_by_copy:
        assert report["ok"], report
        return
    assert "changed while it was read" in report["error"]["what"]
    assert "bucket/out/prep-manifest.json" not in site.store.objects
    assert site.run_prep(*arguments, "--pad-vocab", "8", "--restart")["ok"]
    assert site.run_prep("verify", "gs://bucket/out", "./m")["ok"]


@pytest.mark.slow
def test_source_that_was_swapped_for_a_time_is_compared(site: StoreSite, monkeypatch: MonkeyPatch):
    """The notes of the second run are of other values, with the sizes, times and headers of the first source."""
    make_checkpoint(Path("m"), vocab_size=4001, hidden_size=256, num_heads=4)
    make_other_values(Path("m"), Path("other"))
    arguments = ("save-init", "./m", *MESH, "--out", "gs://bucket/out")
    note_sent = BucketConverter._note_sent  # pyright: ignore[reportPrivateUsage]

    def stop_after(count: int) -> None:
        notes = iter(range(count))

        def note_some(run: BucketConverter, number: int, note: UnitNote) -> None:
            if next(notes, None) is None:
                raise PrepError("stopped")
            note_sent(run, number, note)

        with monkeypatch.context() as patched:
            patched.setattr(BucketConverter, "_note_sent", note_some)
            assert site.run_prep(*arguments)["error"]["what"] == "stopped"
        # The kill came before other objects were sent.
        noted = b"".join(site.store.objects_below("bucket/out/.prep/done/").values())
        for path in site.store.objects_below("bucket/out/d/"):
            if path.encode() not in noted:
                del site.store.objects[f"bucket/out/d/{path}"]

    stop_after(2)
    Path("m").rename("first")
    Path("other").rename("m")
    stop_after(2)
    Path("m").rename("other")
    Path("first").rename("m")
    report = site.run_prep(*arguments)
    assert "changed while it was read" in report["error"]["what"]
    assert site.run_prep(*arguments, "--restart")["ok"]
    assert site.run_prep("verify", "gs://bucket/out", "./m")["ok"]


def test_tensors_without_elements_are_part_of_the_output(site: StoreSite):
    folder = Path("empty")
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "unknown"}')
    tensors = {"a": np.ones(8, np.float32), "b": np.zeros((0, 4), np.float32)}
    save_file(tensors, folder / "model.safetensors")
    assert site.run_prep("save-init", "./empty", "--out", "gs://bucket/out")["ok"]
    assert site.run_prep("verify", "gs://bucket/out", "./empty")["ok"]


def test_kept_objects_are_not_sent_again(site: StoreSite, home: Path):
    arguments = (*words("save-init", home), "--out", "gs://bucket/out")
    site.store.failing_requests = "PUT bucket/out/.prep/done/3"
    assert not site.run_prep(*arguments)["ok"]
    sent = {key for key, _ in site.store.received if "/d/" in key}
    stored = {key for key in site.store.objects if "/out/d/" in key}
    assert sent
    assert sent == stored
    site.store.failing_requests = "\0"
    site.store.received.clear()
    assert site.run_prep(*arguments)["ok"]
    assert not stored & {key for key, _ in site.store.received}
    assert site.run_prep("verify", "gs://bucket/out", str(home / "m"))["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("field", ["run", "session"])
def test_units_of_another_run_are_written_again(site: StoreSite, home: Path, field: str):
    """Notes of units have named their run since then. A process of another run may write one late."""
    arguments = (*words("save-init", home), "--out", "gs://bucket/out")
    assert not run_with_failing(site, "PUT bucket/out/hf/", *arguments)["ok"]
    notes = [key for key in site.store.objects if "/.prep/done/" in key]
    for key in notes[1:]:
        note = json.loads(site.store.objects[key])
        # The checksum is optional.
        del note["checksum"]
        note[field] = "another one"
        site.store.store(key, json.dumps(note).encode())
    report = site.run_prep(*arguments)
    assert report["ok"], report
    assert report["bytes"]["resumed"] > 0
    expected = convert_locally(site, arguments[:-2])
    assert site.store.objects_below("bucket/out/") == expected


def test_existing_bucket_output_is_kept(site: StoreSite, home: Path):
    arguments = ("save-init", str(home / "m"), "--out", "s3://bucket/out", "--mesh")
    assert site.run_prep(*arguments, "1,4,1")["already"] is False
    site.store.requests.clear()
    assert site.run_prep(*arguments, "1,4,1")["already"] is True
    error = site.run_prep(*arguments, "1,2,1")["error"]
    assert (error["what"], error["why"]) == (
        "s3://bucket/out already exists",
        "it was made by another request, or of another source",
    )
    assert site.writes() == []
    assert list(site.cwd.iterdir()) == []


def test_overwrite_deletes_the_manifest_before_other_objects(site: StoreSite, home: Path):
    arguments = ("save-init", str(home / "m"), "--out", "s3://bucket/out", "--no-scan")
    assert site.run_prep(*arguments[:-1])["ok"]
    site.store.objects["bucket/out/d/old"] = b"x"
    site.store.requests.clear()
    assert site.run_prep(*arguments, "--overwrite")["ok"]
    lines = [line for line in site.writes() if "/.prep/" not in line and line != "POST bucket"]
    assert lines[:2] == [line.replace("PUT", "DELETE") for line in reversed(LAST_WRITES)]
    assert lines[-2:] == LAST_WRITES
    assert "bucket/out/d/old" not in site.store.objects
    assert site.run_prep("verify", "s3://bucket/out", str(home / "m"))["ok"]


@pytest.mark.parametrize(
    ("address", "more"),
    slow_except(
        [
            ("gs://bucket/models/m", ()),
            ("gs://bucket/models", ("--overwrite",)),
            ("s3://bucket", ("--restart",)),
        ],
        [("gs://bucket/models/m", ())],
    ),
)
def test_foreign_bucket_folder_is_never_replaced(
    site: StoreSite, home: Path, address: str, more: tuple[str, ...]
):
    error = site.run_prep("save-init", str(home / "m"), "--out", address, *more)["error"]
    assert error["what"] == f"{address} exists and is something else"
    assert "no prep-manifest.json" in error["why"]
    assert site.writes() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "failing", slow_except(["PUT bucket/out/d/", "DELETE bucket/out/d/"], ["DELETE bucket/out/d/"])
)
def test_failed_overwrite_resumes(site: StoreSite, home: Path, failing: str):
    arguments = ("save-init", str(home / "m"), *MESH, "--out", "gs://bucket/out")
    assert site.run_prep(*arguments, "--no-scan")["ok"]
    site.store.failing_requests = failing
    assert not site.run_prep(*arguments, "--overwrite")["ok"]
    assert "bucket/out/prep-manifest.json" not in site.store.objects
    site.store.failing_requests = "\0"
    assert site.run_prep(*arguments, "--overwrite")["ok"]
    assert site.run_prep("verify", "gs://bucket/out", str(home / "m"))["ok"]
    names = site.store.objects_below("bucket/out/").keys()
    assert names == convert_locally(site, arguments[:-2]).keys()


@pytest.mark.slow
def test_an_unfinished_output_of_another_plan_needs_restart(site: StoreSite, home: Path):
    arguments = (
        *("save-init", str(home / "m"), "--pad-vocab", "8"),
        *("--out", "gs://bucket/out", "--mesh"),
    )
    assert not run_with_failing(site, "PUT bucket/out/hf/", *arguments, "1,2,2")["ok"]
    before = site.store.objects_below("bucket/out/")
    error = site.run_prep(*arguments, "1,4,1")["error"]
    assert error["what"] == "gs://bucket/out belongs to another run"
    assert site.store.objects_below("bucket/out/") == before
    assert site.run_prep(*arguments, "1,4,1", "--restart")["ok"]
    assert site.run_prep("verify", "gs://bucket/out", str(home / "m"))["ok"]


def test_concurrent_conversions_to_one_url_write_one_output(site: StoreSite, home: Path):
    """In every interleaving: the other one finds the lock, the objects of a partial output, or the whole output."""
    arguments = (
        *("save-init", str(home / "m"), "--pad-vocab", "8"),
        *("--out", "gs://bucket/out", "--mesh"),
    )
    running = []
    for number, mesh in enumerate(("1,2,2", "1,4,1")):
        folder = site.cwd / str(number)
        folder.mkdir()
        with chdir(folder):
            running.append(site.start_prep(*arguments, mesh))
    reports = [json.loads(process.communicate()[0]) for process in running]
    assert sorted(report["ok"] for report in reports) == [False, True], reports
    loser = next(report["error"]["what"] for report in reports if not report["ok"])
    assert loser.startswith("gs://bucket/out ")
    winner = next(report for report in reports if report["ok"])
    manifest = json.loads(site.store.objects["bucket/out/prep-manifest.json"])
    assert manifest["plan"] == winner["plan_digest"]
    assert not [key for key in site.store.objects if LOCK_FILE in key]
    assert site.run_prep("verify", "gs://bucket/out", str(home / "m"))["ok"]


def test_a_locked_url_is_refused_before_the_work(site: StoreSite, home: Path):
    arguments = ("save-init", str(home / "m"), *MESH, "--out", "gs://bucket/out")
    with BucketLock(Bucket(parse_url("gs://bucket/out")), "another plan"):
        error = site.run_prep(*arguments)["error"]
    assert error["what"] == "gs://bucket/out is locked"
    assert f"process {os.getpid()} on " in error["why"]
    assert list(site.cwd.iterdir()) == []
    assert site.writes() == []
    assert site.run_prep(*arguments)["ok"]


def test_an_output_does_not_overlap_its_source(site: StoreSite):
    for out in ("gs://bucket/init", "gs://bucket/init/wide", "gs://bucket"):
        words = ("reshard", "gs://bucket/init", "--mesh", "1,4,1", "--overwrite", "--out", out)
        error = site.run_prep(*words)["error"]
        assert (error["code"], "overlap" in error["what"]) == (2, True)
    assert site.writes() == []


def test_an_output_with_too_many_objects_is_refused(
    site: StoreSite, home: Path, monkeypatch: MonkeyPatch
):
    monkeypatch.setattr(object_store, "MAX_OBJECTS", 20)
    arguments = words("save-init of chunk files", home)
    error = site.run_prep(*arguments, "--out", "gs://bucket/out")["error"]
    assert (error["code"], "would have" in error["what"]) == (2, True)
    assert site.writes() == []


def test_processes_of_one_output_cannot_restart_it(site: StoreSite, home: Path):
    arguments = (*words("save-init", home), "--out", "gs://bucket/out", "--restart")
    error = site.run_prep(*arguments, "--processes", "2/0")["error"]
    assert (error["code"], "several processes" in error["what"]) == (2, True)
    assert site.writes() == []


def test_a_failed_store_ends_all_processes(site: StoreSite, home: Path):
    arguments = (*words("export", home), "--out", "gs://bucket/out")
    site.store.failing_requests = "PUT bucket/out/model-00001"
    running = [site.start_prep(*arguments, "--processes", f"2/{index}") for index in range(2)]
    errors = [finish(process)["error"]["what"] for process in running]
    assert errors == ["cannot write gs://bucket/out"] * 2
    site.store.failing_requests = "\0"
    assert site.run_prep(*arguments)["ok"]


# Faults of stores


@pytest.mark.slow
@pytest.mark.parametrize("content", slow_except([b"x", None], [None]))
def test_an_object_of_a_second_writer_stays(site: StoreSite, home: Path, content: bytes | None):
    arguments = (*words("save-init", home), "--out", "gs://bucket/out")
    expected = convert_locally(site, arguments[:-2])
    path, data = max(expected.items(), key=lambda item: len(item[1]))
    # Of the same size, or of another one
    foreign = content or bytes(len(data))
    assert not run_with_failing(site, "PUT bucket/out/d/", *arguments)["ok"]
    site.store.store(f"bucket/out/{path}", foreign)
    error = site.run_prep(*arguments)["error"]
    assert error["what"] == f"{path} of gs://bucket/out was written by another program"
    assert site.store.objects[f"bucket/out/{path}"] == foreign
    assert "bucket/out/prep-manifest.json" not in site.store.objects
    assert site.run_prep(*arguments, "--restart")["ok"]
    assert site.store.objects_below("bucket/out/") == expected


def test_objects_that_are_listed_late_are_found(site: StoreSite, home: Path):
    site.store.unlisted = "bucket/out/"
    report = site.run_prep(*words("save-init", home), "--out", "gs://bucket/out")
    assert report["ok"], report
    site.store.unlisted = "\0"
    assert site.run_prep("verify", "gs://bucket/out", str(home / "m"))["ok"]


@pytest.mark.slow
def test_a_lost_object_is_written_again_by_the_next_run(site: StoreSite, home: Path):
    arguments = (*words("save-init", home), "--out", "gs://bucket/out")
    assert not run_with_failing(site, "PUT bucket/out/hf/", *arguments)["ok"]
    lost = next(key for key in site.store.objects if key.startswith("bucket/out/d/"))
    del site.store.objects[lost]
    error = site.run_prep(*arguments)["error"]
    assert error["what"].endswith("of gs://bucket/out is missing or was changed")
    assert site.run_prep(*arguments)["ok"]
    assert site.run_prep("verify", "gs://bucket/out", str(home / "m"))["ok"]
