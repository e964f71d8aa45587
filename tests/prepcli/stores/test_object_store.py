"""Object stores against a fake store: URLs, listings, byte ranges and writes."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.stores import byte_ranges, object_store
from prepcli.stores.addresses import ObjectStoreUrl, is_url, parse_url
from prepcli.stores.byte_ranges import RemoteFile, RetryPolicy, read_range
from prepcli.stores.object_store import PART_NBYTES, Bucket, redacted_error_text
from prepcli.stores.object_writes import ObjectUploads, put_object
from tests.helpers import object_server
from tests.helpers.loopback import STALL_KINDS
from tests.helpers.object_server import FakeObjectStore, serve_objects
from tests.helpers.range_server import FaultInjector
from tests.helpers.slow_cases import slow_except
from tests.helpers.waiting import MAX_S

pytestmark = pytest.mark.waits

CONTENT = np.random.default_rng(2).integers(0, 256, 300_000, np.uint8).tobytes()


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.0)


def connect_bucket(
    store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch, url: str, retries: int = 0
) -> Bucket:
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    return Bucket(parse_url(url), retries)


def use_small_parts(monkeypatch: pytest.MonkeyPatch, nbytes: int, max_parts: int = 10) -> None:
    """Upload in parts of `nbytes`, or of more if there would be more than `max_parts`."""
    monkeypatch.setattr(object_store, "PART_NBYTES", nbytes)
    monkeypatch.setattr(object_store, "WRITE_NBYTES", nbytes // 4)
    monkeypatch.setattr(object_store, "MAX_PARTS", max_parts)


def read(bucket: Bucket, file: RemoteFile, offset: int, size: int) -> bytes:
    into = np.zeros(size, np.uint8)
    read_range(bucket, file, offset=offset, into=into)
    return into.tobytes()


def test_parse_url_splits_bucket_and_path():
    assert parse_url("gs://bucket/a/b/") == ObjectStoreUrl("gs", "bucket", "a/b")
    assert parse_url("s3://bucket") == ObjectStoreUrl("s3", "bucket", "")
    assert str(parse_url("s3://bucket/a")) == "s3://bucket/a"
    assert parse_url("gs://b.u-k/a").key("d/x") == "a/d/x"
    assert parse_url("gs://bucket").key("d/x") == "d/x"
    assert is_url("abfs://x")
    assert not is_url("o/m")


def test_parse_url_names_an_invalid_bucket():
    with pytest.raises(
        PrepError, match="'b' is not a valid bucket name, which has 3 to 63 lower-case letters"
    ):
        parse_url("gs://b/x")


@pytest.mark.parametrize(
    "text", ["gs://", "gs:///x", "abfs://b/x", "http://b/x", "gs://b", "gs://BUCKET/x", "gs://bucket/a//b", "s3://bucket/../x",
             "gs://bucket/\n", "gs://bucket/a/./b"],
)  # fmt: skip
def test_parse_url_rejects_invalid_urls(text: str):
    with pytest.raises(PrepError) as caught:
        parse_url(text)
    assert caught.value.code == 2


@given(st.one_of(st.text(max_size=60), st.text(max_size=40).map("gs://bucket/".__add__)))
def test_parse_url_round_trips_or_raises(text: str):
    try:
        url = parse_url(text)
    except PrepError:
        return
    assert parse_url(str(url)) == url


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_list_files_reads_all_pages_below_the_prefix(monkeypatch, scheme: str):
    objects = {f"bucket/m/d/{number:02}": b"x" * number for number in range(1, 20)}
    with serve_objects(objects | {"bucket/m2/x": b"", "bucket/m.txt": b""}) as store:
        files = connect_bucket(store, monkeypatch, f"{scheme}://bucket/m").list_files()
    assert [(file.path, file.size) for file in files] == [(f"d/{n:02}", n) for n in range(1, 20)]


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_read_recovers_from_faults(monkeypatch, scheme: str):
    faults = FaultInjector(0.4, ("drop", "empty", "refuse", "busy", "limit", "short"), seed=1)
    with serve_objects({"bucket/m/w": CONTENT}, faults) as store:
        bucket = connect_bucket(store, monkeypatch, f"{scheme}://bucket/m")
        (file,) = bucket.list_files()
        for offset in range(0, 300_000, 15_000):
            assert read(bucket, file, offset, 15_000) == CONTENT[offset : offset + 15_000]
    assert {"drop", "busy"} <= {*faults.injected}


@pytest.mark.parametrize("content", [bytes(300_000), CONTENT[:-1], CONTENT + b"!", None])
def test_changed_object_is_an_error(monkeypatch, content: bytes | None):
    with serve_objects({"bucket/m/w": CONTENT}) as store:
        bucket = connect_bucket(store, monkeypatch, "s3://bucket/m")
        (file,) = bucket.list_files()
        if content is None:
            del store.objects["bucket/m/w"]
        else:
            store.objects["bucket/m/w"] = content
        with pytest.raises(PrepError) as caught:
            read(bucket, file, 0, 100)
    assert caught.value.what == "w changed while it was read"
    assert caught.value.hint == "run the same command again", (
        "`--restart` deletes the steps of a training run"
    )


@pytest.mark.parametrize("status", [401, 403])
def test_forbidden_object_is_an_error_with_a_hint(monkeypatch, status: int):
    with serve_objects({"bucket/m/w": CONTENT}) as store:
        bucket = connect_bucket(store, monkeypatch, "gs://bucket/m")
        (file,) = bucket.list_files()
        store.failing_requests, store.status = "bucket/m/w", status
        with pytest.raises(PrepError) as caught:
            read(bucket, file, 0, 100)
        assert caught.value.what == "cannot read gs://bucket/m"
        assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.hint
        assert "secret" not in str(caught.value)
        store.failing_requests = "GET bucket"
        with pytest.raises(PrepError, match="cannot list gs://bucket/m"):
            bucket.list_files()


@pytest.mark.parametrize("size", [0, 10, 300_000])
def test_bucket_writes_lists_and_deletes_objects(monkeypatch, tmp_path: Path, size: int):
    (tmp_path / "f").write_bytes(CONTENT[:size])
    use_small_parts(monkeypatch, 100_000)
    written_nbytes: list[int] = []
    with serve_objects() as store:
        for scheme in ("gs", "s3"):
            bucket = connect_bucket(store, monkeypatch, f"{scheme}://bucket/{scheme}")
            written = bucket.write("d/f", tmp_path / "f", on_written=written_nbytes.append)
            assert written in bucket.list_files()
            assert store.objects[f"bucket/{scheme}/d/f"] == CONTENT[:size]
            bucket.delete("d/f")
            assert bucket.list_files() == ()
    assert sum(written_nbytes) == 2 * size


def test_write_limits_the_number_of_parts(monkeypatch, tmp_path: Path):
    use_small_parts(monkeypatch, 10_000, max_parts=3)
    (tmp_path / "f").write_bytes(CONTENT)
    with serve_objects() as store:
        connect_bucket(store, monkeypatch, "s3://bucket/m").write("f", tmp_path / "f")
        assert sum(line.startswith("PUT") for line in store.requests) == 3


def test_write_pieces_joins_and_splits_pieces(monkeypatch):
    use_small_parts(monkeypatch, 50_000)
    cuts = [0, 0, 1, 7, 20_000, 290_000, 300_000]
    pieces = [CONTENT[start:stop] for start, stop in itertools.pairwise(cuts)]
    with serve_objects() as store:
        connect_bucket(store, monkeypatch, "gs://bucket/m").write_pieces(
            "f", pieces, size=len(CONTENT)
        )
        assert store.objects == {"bucket/m/f": CONTENT}


def test_write_pieces_raises_the_error_of_the_pieces(monkeypatch):
    def pieces() -> Iterator[bytes]:
        yield CONTENT
        raise ValueError("the device is lost")

    with serve_objects() as store:
        bucket = connect_bucket(store, monkeypatch, "gs://bucket/m")
        with pytest.raises(ValueError, match="the device is lost"):
            bucket.write_pieces("f", pieces(), size=400_000)
        assert store.objects == {}


def test_failed_write_creates_no_object(monkeypatch, tmp_path: Path):
    use_small_parts(monkeypatch, 50_000)
    (tmp_path / "f").write_bytes(CONTENT)
    with serve_objects() as store:
        bucket = connect_bucket(store, monkeypatch, "s3://bucket/m")
        store.failing_requests = "PUT bucket"
        with pytest.raises(PrepError, match="cannot write s3://bucket/m"):
            bucket.write("f", tmp_path / "f")
        assert store.objects == {}


@pytest.mark.parametrize("stall", slow_except(STALL_KINDS, ["silent", "midway"]))
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_list_files_limits_the_time(monkeypatch, scheme: str, stall: str):
    notes: list[str] = []
    with serve_objects({"bucket/m/w": CONTENT}) as store:
        bucket = connect_bucket(store, monkeypatch, f"{scheme}://bucket/m")
        bucket.retry_policy = RetryPolicy(0.1, notes.append)
        store.failing_requests, store.stall = "GET bucket", stall
        with pytest.raises(PrepError, match=f"cannot list {scheme}://bucket/m"):
            bucket.list_files()
    assert "trying again" in notes[0]


@pytest.mark.parametrize("stall", slow_except(STALL_KINDS, ["silent", "midway"]))
def test_read_limits_the_time(monkeypatch, stall: str):
    notes: list[str] = []
    with serve_objects({"bucket/m/w": CONTENT}) as store:
        bucket = connect_bucket(store, monkeypatch, "s3://bucket/m")
        bucket.retry_policy = RetryPolicy(0.1, notes.append)
        (file,) = bucket.list_files()
        store.failing_requests, store.stall = "GET bucket/m/w", stall
        with pytest.raises(PrepError, match="cannot read w of s3://bucket/m"):
            read(bucket, file, 0, 100_000)
    assert "trying again" in notes[0]


@pytest.mark.parametrize("stall", ["silent", "close"])
def test_write_limits_the_time(monkeypatch, tmp_path: Path, stall: str):
    use_small_parts(monkeypatch, 50_000)
    (tmp_path / "f").write_bytes(CONTENT)
    notes: list[str] = []
    with serve_objects() as store:
        bucket = connect_bucket(store, monkeypatch, "s3://bucket/m", retries=2)
        bucket.retry_policy = RetryPolicy(0.1, notes.append)
        store.failing_requests, store.stall = "PUT bucket", stall
        with pytest.raises(PrepError, match="cannot write s3://bucket/m"):
            bucket.write("f", tmp_path / "f")
        assert store.objects == {}
    assert notes[:1] == ["no answer from s3://bucket/m for 0.1 s; waiting"]


def test_write_pieces_sends_parts_at_the_same_time(monkeypatch):
    """The store answers a part once four parts are there."""
    four_parts = threading.Barrier(4, timeout=MAX_S)
    write = object_server._Handler._write

    def write_together(handler: Any, key: str, query: dict[str, str], body: bytes) -> None:
        four_parts.wait()
        write(handler, key, query, body)

    monkeypatch.setattr(object_server._Handler, "_write", write_together)
    content = bytes(4 * PART_NBYTES)
    with serve_objects() as store:
        bucket = connect_bucket(store, monkeypatch, "gs://bucket/m")
        bucket.write_pieces("f", [content], size=len(content), parts_in_flight=4)
        assert store.objects == {"bucket/m/f": content}


def test_list_files_does_not_retry_403(monkeypatch):
    notes: list[str] = []
    with serve_objects({"bucket/m/w": CONTENT}) as store:
        bucket = connect_bucket(store, monkeypatch, "gs://bucket/m")
        bucket.retry_policy = RetryPolicy(5.0, notes.append)
        store.failing_requests = "GET bucket"
        with pytest.raises(PrepError, match="cannot list"):
            bucket.list_files()
    assert notes == []


def test_bucket_pickles_without_its_connection():
    bucket = Bucket(ObjectStoreUrl("gs", "bucket", "m"), 2)
    bucket.connections[0, False] = object()
    assert pickle.loads(pickle.dumps(bucket)) == bucket
    assert pickle.loads(pickle.dumps(bucket)).connections == {}


def test_redacted_error_text_removes_urls():
    assert redacted_error_text(
        ValueError("Error performing GET https://h/x?X-Amz-Signature=1 in 3s\nand more")
    ) == ("Error performing GET … in 3s")


def test_missing_obstore_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("prepcli.stores.object_store.find_spec", lambda name: None)
    with pytest.raises(PrepError) as caught:
        Bucket(parse_url("gs://bucket/m")).list_files()
    assert caught.value.hint == "`pip install 'prepcli[cloud]'`"


pytest.importorskip("obstore")


def put(bucket: Bucket, path: str, content: bytes = b"content") -> None:
    put_object(bucket, path, np.frombuffer(content, np.uint8))


def test_put_object_compares_an_existing_object(store: FakeObjectStore, bucket: Bucket):
    put(bucket, "a")
    put(bucket, "a")
    with pytest.raises(PrepError, match=r"a of .* was written by another program"):
        put(bucket, "a", b"CONTENT")
    assert store.objects == {"bucket/out/a": b"content"}


def test_put_object_tries_one_conditional_write_without_support(
    store: FakeObjectStore, bucket: Bucket
):
    store.has_conditions = False
    put(bucket, "a")
    put(bucket, "b")
    writes = [line for line in store.requests if line.startswith("PUT")]
    assert writes == ["PUT bucket/out/a", "PUT bucket/out/a", "PUT bucket/out/b"]


def test_uploads_delete_an_object_with_a_forgotten_part(store: FakeObjectStore, bucket: Bucket):
    store.forgets_parts = True
    uploads = ObjectUploads(bucket, {})
    data = np.zeros(PART_NBYTES, np.uint8)
    assert uploads.send("a", data, start=0, size=2 * data.size) is None
    with pytest.raises(PrepError, match=r"the upload of a to .* is incomplete"):
        uploads.send("a", data, start=data.size, size=2 * data.size)
    assert store.objects == {}


def test_uploads_do_not_replace_an_object_that_appeared(store: FakeObjectStore, bucket: Bucket):
    uploads = ObjectUploads(bucket, {})
    data = np.zeros(8, np.uint8)
    assert uploads.send("a", data, start=0, size=16) is None
    store.store("bucket/out/a", b"other")
    with pytest.raises(PrepError, match=r"a of .* appeared during its upload"):
        uploads.send("a", data, start=8, size=16)
    assert store.objects == {"bucket/out/a": b"other"}
    # The next run compares the object.
    put_object(bucket, "a", np.frombuffer(b"other", np.uint8))


@pytest.mark.parametrize(
    ("size", "why"), [(9, "it has 5 bytes, not 9"), (None, "it has 5 bytes, and at least 8 are")]
)
def test_uploads_name_the_size_of_a_foreign_object(
    store: FakeObjectStore, bucket: Bucket, size: int | None, why: str
):
    """A compressed object has no size before its last piece."""
    store.store("bucket/out/a", b"other")
    uploads = ObjectUploads(bucket, {file.path: file for file in bucket.list_files()})
    with pytest.raises(PrepError, match=why):
        uploads.send("a", np.zeros(8, np.uint8), start=0, size=size)


def test_retries_name_the_status_of_the_store(
    store: FakeObjectStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.0)
    notes: list[str] = []
    store.failing_requests = "PUT"
    store.status = 503
    policy = RetryPolicy(timeout_s=1.0, say=notes.append)
    with pytest.raises(PrepError, match="503"):
        put(Bucket(bucket.url, 1, policy), "a")
    retries = [note for note in notes if "trying again" in note]
    assert len(retries) == byte_ranges.MAX_STALLED_TRIES - 1
    assert all(note.startswith(f"HTTP 503 from {bucket.url}") for note in retries)


def upload_two_parts(bucket: Bucket, *, is_streamed: bool) -> bytes:
    """Upload an object in two parts, and return its bytes."""
    data = np.arange(2 * PART_NBYTES, dtype=np.uint32).astype(np.uint8)
    if is_streamed:
        bucket.write_pieces("a", [data.data], size=data.size)
    else:
        uploads = ObjectUploads(bucket, {})
        half = data.size // 2
        uploads.send("a", data[:half], start=0, size=data.size)
        assert uploads.send("a", data[half:], start=half, size=data.size) is not None
    return data.tobytes()


@pytest.mark.parametrize("is_streamed", slow_except([False, True], [True]))
def test_upload_whose_last_answer_is_lost_succeeds(
    store: FakeObjectStore, bucket: Bucket, is_streamed: bool
):
    """The store has completed the upload, and does not know it any more when obstore asks again."""
    store.loses_completions = True
    data = upload_two_parts(bucket, is_streamed=is_streamed)
    assert store.objects == {"bucket/out/a": data}


@pytest.mark.parametrize("is_streamed", slow_except([False, True], [False]))
def test_upload_is_not_confused_with_an_object_of_its_size(
    store: FakeObjectStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
):
    """The answer to the completion is lost, and another program has written the object meanwhile."""
    write = FakeObjectStore.store

    def write_other(
        store: FakeObjectStore, key: str, content: bytes, metadata: Mapping[str, str] | None = None
    ) -> None:
        write(store, key, b"\0" * len(content))

    monkeypatch.setattr(FakeObjectStore, "store", write_other)
    store.loses_completions = True
    with pytest.raises(PrepError, match="cannot write"):
        upload_two_parts(bucket, is_streamed=is_streamed)
    assert not any(store.objects["bucket/out/a"])
