"""The state of a conversion in an object store, and the processes that share it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.engine.digest import record_digest
from prepcli.execution import bucket_output
from prepcli.execution.bucket_output import (
    BucketOutput,
    check_stored_output,
    has_intact_files,
    stored_manifest,
)
from prepcli.formats.manifest import encode_manifest
from prepcli.stores.addresses import parse_url
from prepcli.stores.object_store import Bucket
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.waiting import MAX_S, wait_until

IDENTITY: dict[str, object] = {"request": "prep save-init m", "source": "s", "prep": "1"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeObjectStore]:
    with use_objects(monkeypatch) as served:
        yield served


def join_run(plan: str = "a", *, restart: bool = False) -> BucketOutput:
    run = BucketOutput(Bucket(parse_url("gs://bucket/out")), plan, lambda text: None)
    try:
        run.join({**IDENTITY, "plan": plan}, {"files": []}, restart=restart)
    except BaseException:
        run.leave()
        raise
    return run


def start_join(run: BucketOutput, *, may_begin: bool = True) -> threading.Thread:
    """Join a run in a thread."""
    identity = {**IDENTITY, "plan": "a"}
    join = partial(run.join, identity, {"files": []}, restart=False, may_begin=may_begin)
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    return thread


def test_state_is_deleted_as_a_whole(store: FakeObjectStore):
    run = join_run()
    run.write("done/1", b"note")
    assert run.read("done/1") == b"note"
    assert run.read("done/0") is None
    assert (run.units_with("done"), run.find_notes({0, 1})) == ({1}, {1})
    run.delete_state()
    run.leave()
    assert store.objects == {}


@pytest.mark.parametrize("failing", ["", "DELETE bucket/out/d/", "PUT bucket/out/.prep/source"])
def test_objects_of_an_older_output_are_deleted_first(store: FakeObjectStore, failing: str):
    """An interruption leaves objects that the next start deletes: they might have the names of new ones."""
    for name in ("prep-manifest.json", "commit_success.txt", "d/1", "d/2"):
        store.store(f"bucket/out/{name}", b"old")
    if failing:
        store.failing_requests = failing
        with pytest.raises(PrepError):
            join_run()
        assert "bucket/out/prep-manifest.json" not in store.objects
        store.failing_requests = "\0"
    run = join_run()
    assert not [key for key in store.objects if "/.prep" not in key]
    store.store("bucket/out/d/1", b"new")
    assert join_run().session == run.session
    assert store.objects["bucket/out/d/1"] == b"new"


def test_a_run_with_another_plan_is_refused_without_restart(store: FakeObjectStore):
    run = join_run()
    store.store("bucket/out/d/1", b"kept")
    with pytest.raises(PrepError, match="gs://bucket/out is locked"):
        join_run("b", restart=True)
    run.leave()
    with pytest.raises(PrepError, match="gs://bucket/out belongs to another run"):
        join_run("b")
    assert store.objects["bucket/out/d/1"] == b"kept"
    join_run("b", restart=True)
    assert "bucket/out/d/1" not in store.objects
    with pytest.raises(PrepError, match="was taken over"):
        run.check_same_run()


@pytest.mark.parametrize("written", ["", "d/1", ".prep/done/0"])
def test_a_run_without_data_is_replaced(store: FakeObjectStore, written: str):
    join_run().leave()
    if not written:
        join_run("b")
        return
    store.store(f"bucket/out/{written}", b"kept")
    with pytest.raises(PrepError, match="belongs to another run"):
        join_run("b")


def test_a_lock_lasts_as_long_as_one_of_its_processes(store: FakeObjectStore):
    first, second = join_run(), join_run()
    assert json.loads(store.objects["bucket/out/.prep-lock"])["process"] == os.getpid()
    second.leave()
    second.confirm()
    assert "bucket/out/.prep-lock" in store.objects
    first.leave()
    assert "bucket/out/.prep-lock" not in store.objects


def test_the_next_process_begins_after_a_failure_of_the_first(store: FakeObjectStore):
    other_host_claims(store, "begin")
    run = BucketOutput(Bucket(parse_url("gs://bucket/out")), "a", lambda text: None)
    thread = start_join(run)
    wait_until(lambda: "HEAD bucket/out/.prep/alive/aa_1_elsewhere" in store.requests)
    # The process fails, and takes its claim back.
    del store.objects["bucket/out/.prep/claims/begin"]
    del store.objects["bucket/out/.prep/alive/aa_1_elsewhere"]
    started_s = time.monotonic()
    thread.join(MAX_S)
    assert run.session
    assert time.monotonic() - started_s < bucket_output.ALIVE_STALE_S / 2
    run.leave()


def test_a_process_says_that_it_waits_for_the_first(
    store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch
):
    """Without conditional writes only process 0 begins a run."""
    monkeypatch.setattr(bucket_output, "SILENT_S", 0.0)
    store.has_conditions = False
    notes: list[str] = []
    second = BucketOutput(Bucket(parse_url("gs://bucket/out")), "a", notes.append)
    thread = start_join(second, may_begin=False)
    wait_until(lambda: any("waiting for process 0" in note for note in notes))
    first = join_run()
    thread.join(MAX_S)
    assert second.session == first.session


def test_nothing_is_renewed_after_a_process_has_left(
    store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bucket_output, "ALIVE_RENEW_S", 0.01)
    write, begun, ended = Bucket.write_pieces, threading.Event(), threading.Event()
    main_thread = threading.current_thread()

    def write_slowly(bucket: Bucket, path: str, pieces: list[bytes], *, size: int) -> None:
        is_renewal = threading.current_thread() is not main_thread
        if is_renewal:
            ended.clear()
            begun.set()
            time.sleep(0.5)
        write(bucket, path, pieces, size=size)
        if is_renewal:
            ended.set()

    monkeypatch.setattr(Bucket, "write_pieces", write_slowly)
    run = join_run()
    begun.clear()
    assert begun.wait(MAX_S)
    run.leave()
    assert ended.wait(MAX_S)
    time.sleep(0.1)
    assert not [key for key in store.objects if "/alive/" in key]


def test_a_lock_stays_when_its_owner_leaves_before_the_others(store: FakeObjectStore):
    first, second = join_run(), join_run()
    first.leave()
    with pytest.raises(PrepError, match="gs://bucket/out is locked"):
        join_run("b", restart=True)
    second.check_same_run()
    second.leave()
    assert not [key for key in store.objects if "lock" in key]
    join_run("b", restart=True)


# Claims


def test_a_claim_ends_with_its_process(store: FakeObjectStore):
    first, second = join_run(), join_run()
    assert first.claim("0") is not None
    assert second.claim("0") is None
    assert second.claim("1") is not None
    # The answer to a request may be lost.
    assert first.claim("0") is not None
    first.leave()
    second.list_state()
    assert second.claim("0") is not None


def other_host_claims(store: FakeObjectStore, name: str = "0") -> None:
    store.store(f"bucket/out/.prep/claims/{name}", b'{"process": "aa_1_elsewhere"}')
    store.store("bucket/out/.prep/alive/aa_1_elsewhere", b"1")


def test_a_claim_ends_when_it_is_not_renewed(
    store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch
):
    run = join_run()
    other_host_claims(store)
    assert run.claim("0") is None
    monkeypatch.setattr(bucket_output, "ALIVE_STALE_S", 0.2)
    store.store("bucket/out/.prep/alive/aa_1_elsewhere", b"2")
    run.list_state()
    assert run.claim("0") is None
    time.sleep(0.3)
    assert run.claim("0") is not None


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"process": "aa_0_gone"}'])
def test_a_damaged_claim_is_taken_over(store: FakeObjectStore, content: bytes):
    run = join_run()
    store.store("bucket/out/.prep/claims/0", content)
    assert run.claim("0") is not None


def test_a_claim_of_a_killed_process_is_taken_over(store: FakeObjectStore):
    run = join_run()
    process = run._process.replace(f"_{os.getpid()}_", "_4999999_")  # pyright: ignore[reportPrivateUsage]
    store.store("bucket/out/.prep/claims/0", json.dumps({"process": process}).encode())
    store.store(f"bucket/out/.prep/alive/{process}", b"1")
    assert run.claim("0") is not None


@pytest.mark.parametrize("changed", ["readlink", "boot_id"])
def test_a_claim_of_another_container_with_the_same_name_is_kept(
    store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch, changed: str
):
    """It does not see the processes of this one."""
    run = join_run()
    with monkeypatch.context() as container:
        container.setattr(os, "getpid", lambda: 4999999)
        if changed == "readlink":
            container.setattr(os, "readlink", lambda path: "pid:[4026530000]")
        else:
            container.setattr(Path, "read_text", lambda path: "other boot")
        other = join_run()
    assert other.claim("0") is not None
    assert run.claim("0") is None


def manifest_of(plan: str, files: Mapping[str, bytes] | None = None) -> bytes:
    """Return the manifest of an output with these small files."""
    records = {
        name: {"bytes": len(content), "xxh3": record_digest(content)}
        for name, content in (files or {}).items()
    }
    content = {
        "kind": "hf",
        "request": "",
        "plan": plan,
        "config": {},
        "tensors": {},
        "prefixed": False,
        "tied": False,
    }
    return encode_manifest({**content, "files": records})


@pytest.mark.parametrize("stored", [b"{}", b"{ }", b"[]", None])
def test_damaged_output_is_not_already_done(stored: bytes | None, monkeypatch: pytest.MonkeyPatch):
    objects = {"bucket/out/prep-manifest.json": manifest_of("mine", {"config.json": b"{}"})}
    if stored is not None:
        objects["bucket/out/config.json"] = stored
    with use_objects(monkeypatch, objects):
        bucket = Bucket(parse_url("gs://bucket/out"))
        files = bucket.list_files()
        manifest = stored_manifest(bucket, files)
        assert manifest is not None
        with pytest.raises(PrepError, match="it was made by another request"):
            check_stored_output(bucket, files, manifest, "other", restart=False)
        if stored == b"{}":
            check_stored_output(bucket, files, manifest, "mine", restart=False)
            with pytest.raises(PrepError, match="this command created it earlier"):
                check_stored_output(bucket, files, manifest, "mine", restart=True)
            return
        with pytest.raises(PrepError, match="this command created it, but its files are damaged"):
            check_stored_output(bucket, files, manifest, "mine", restart=False)


@pytest.mark.parametrize(("stored", "is_intact"), [(b"[]", True), (b"{ }", False)])
def test_large_file_is_compared_by_its_size(
    stored: bytes, is_intact: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bucket_output, "SMALL_NBYTES", 0)
    objects = {
        "bucket/out/prep-manifest.json": manifest_of("mine", {"tokenizer.json": b"{}"}),
        "bucket/out/tokenizer.json": stored,
    }
    with use_objects(monkeypatch, objects):
        bucket = Bucket(parse_url("gs://bucket/out"))
        files = bucket.list_files()
        manifest = stored_manifest(bucket, files)
        assert manifest is not None
        assert has_intact_files(bucket, files, manifest) == is_intact
