"""The state of a conversion in an object store, and the processes that share it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.execution import bucket_run
from prepcli.execution.bucket_run import BucketRun, UnitNote
from prepcli.planning.shares import SINGLE_PROCESS, Share
from prepcli.stores.addresses import parse_url
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.object_store import Bucket
from tests.helpers.object_server import FakeObjectStore, use_objects

IDENTITY = {"plan": "a", "request": "prep save-init m", "source": "s", "prep": "1"}
NOTE = UnitNote(
    (RemoteFile("d/1", 3, "etag:x"),),
    {7: "00ff"},
    np.array([1, 5], np.uint64),
    np.array([11, 55], np.uint64),
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeObjectStore]:
    with use_objects(monkeypatch) as served:
        yield served


def make_run(plan: str = "a", share: Share = SINGLE_PROCESS) -> BucketRun:
    bucket = Bucket(parse_url("gs://bucket/out"))
    return BucketRun(bucket, {**IDENTITY, "plan": plan}, share)


def list_output() -> tuple[RemoteFile, ...]:
    return Bucket(parse_url("gs://bucket/out")).list_files()


def test_notes_are_read_as_they_were_written(store: FakeObjectStore):
    run = make_run()
    run.begin((), [], restart=False)
    assert run.find_done(2) == set()
    run.write_note(1, NOTE)
    run.write_note(1, NOTE)
    assert run.find_done(2) == {1}
    run.write_note(0, NOTE)
    for note in run.read_notes(2):
        assert (note.objects, note.digests) == (NOTE.objects, NOTE.digests)
        assert (note.blocks.tolist(), note.sums.tolist()) == ([1, 5], [11, 55])
    run.delete_state()
    assert store.objects == {}


def test_damaged_notes_are_errors(store: FakeObjectStore):
    run = make_run()
    run.begin((), [], restart=False)
    run.write_note(0, NOTE)
    key = "bucket/out/.prep/done/0"
    store.store(key, store.objects[key].replace(b"00ff", b"00fe"))
    with pytest.raises(PrepError, match="is damaged"):
        run.read_notes(1)


@pytest.mark.parametrize("failing", ["", "DELETE bucket/out/d/", "PUT bucket/out/.prep/ready"])
def test_objects_of_an_older_output_are_deleted_first(store: FakeObjectStore, failing: str):
    """An interruption leaves objects that the next start deletes: they might have the names of new ones."""
    for name in ("prep-manifest.json", "commit_success.txt", "d/1", "d/2"):
        store.store(f"bucket/out/{name}", b"old")
    run = make_run()
    if failing:
        store.failing_requests = failing
        with pytest.raises(PrepError):
            run.begin(list_output(), [], restart=False)
        assert "bucket/out/prep-manifest.json" not in store.objects
        assert not make_run(share=Share(2, 1)).is_open()
        store.failing_requests = "\0"
    run.begin(list_output(), [], restart=False)
    assert store.objects.keys() == {"bucket/out/.prep/run.json", "bucket/out/.prep/ready.json"}
    assert make_run(share=Share(2, 1)).is_open()
    store.store("bucket/out/d/1", b"new")
    run.begin(list_output(), [], restart=False)
    assert store.objects["bucket/out/d/1"] == b"new"


def test_a_run_with_another_plan_is_refused_without_restart(store: FakeObjectStore):
    make_run().begin((), [], restart=False)
    store.store("bucket/out/d/1", b"kept")
    with pytest.raises(PrepError, match="gs://bucket/out belongs to another run"):
        make_run("b").begin(list_output(), [], restart=False)
    assert store.objects["bucket/out/d/1"] == b"kept"
    with pytest.raises(PrepError, match="gs://bucket/out belongs to another run"):
        make_run("b", Share(2, 1)).is_open()
    make_run("b").begin(list_output(), [], restart=True)
    assert "bucket/out/d/1" not in store.objects
    assert make_run("b", Share(2, 1)).is_open()


@pytest.mark.parametrize("written", ["", "d/1", ".prep/done/0"])
def test_a_run_without_data_is_replaced(store: FakeObjectStore, written: str):
    earlier = make_run(share=Share(2, 0))
    earlier.begin((), [], restart=False)
    with pytest.raises(PrepError, match="damaged"), earlier.recording_errors():
        raise PrepError("the source is damaged", "", "")
    if written:
        store.store(f"bucket/out/{written}", b"kept")
        with pytest.raises(PrepError, match="belongs to another run"):
            make_run("b").begin(list_output(), [], restart=False)
        return
    # Process 1 waits until process 0 replaces the run.
    assert not make_run("b", Share(2, 1)).is_open()
    make_run("b", Share(2, 0)).begin(list_output(), [], restart=False)
    assert make_run("b", Share(2, 1)).is_open()
    with pytest.raises(PrepError, match="was taken over"):
        earlier.check_same_run()


def test_notes_of_a_replaced_run_are_errors(store: FakeObjectStore):
    make_run().write_note(0, NOTE)
    with pytest.raises(
        PrepError, match=r"done/0 of .* is damaged - it is of another run"
    ) as caught:
        make_run("b").read_notes(1)
    assert caught.value.hint == "run the same command again, or `--restart`"
    assert make_run("b").delete_invalid_notes({0}) == {0}
    assert make_run("b").find_done(1) == set()


def test_a_run_that_replaces_an_output_is_not_another_run(
    store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch
):
    """Process 0 replaces the record and deletes the manifest after process 1 has read the record."""
    make_run("old").begin((), [], restart=False)
    run = make_run(share=Share(2, 1))
    find_file = Bucket.find_file

    def begin_and_find(bucket: Bucket, path: str) -> RemoteFile | None:
        patches.setattr(Bucket, "find_file", find_file)
        make_run(share=Share(2, 0)).begin(list_output(), [], restart=True)
        return find_file(bucket, path)

    store.store("bucket/out/prep-manifest.json", b"old")
    with monkeypatch.context() as patches:
        patches.setattr(Bucket, "find_file", begin_and_find)
        assert not run.is_open()
    assert run.is_open()


def test_a_failure_ends_the_other_processes_once(
    store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch
):
    runs = [make_run(share=Share(2, index)) for index in range(2)]
    runs[0].begin((), [], restart=False)
    assert runs[1].is_open()
    with pytest.raises(PrepError, match="disk"), runs[1].recording_errors():
        raise PrepError("the disk is full", "no space", "free some")
    with pytest.raises(PrepError, match="process 1: the disk is full"):
        runs[0].check_failures(runs[0].list_state())
    # In the next attempt the failure is old, also for a process that begins before process 1.
    again = make_run(share=Share(2, 0))
    again.begin(list_output(), [], restart=False)
    again.check_failures(again.list_state())
    # The process may also not come back.
    monkeypatch.setattr(bucket_run, "REJOIN_S", 0.0)
    with pytest.raises(PrepError, match="process 1: the disk is full"):
        again.check_failures(again.list_state())
    assert make_run(share=Share(2, 1)).is_open()
    assert not [key for key in store.objects if "failed" in key]


def test_a_single_process_records_no_failure(store: FakeObjectStore):
    run = make_run()
    run.begin((), [], restart=False)
    with pytest.raises(PrepError), run.recording_errors():
        raise PrepError("the disk is full", "", "")
    assert not [key for key in store.objects if "failed" in key]
