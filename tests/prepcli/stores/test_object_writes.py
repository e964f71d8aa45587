"""Objects of an output: created once, compared if they exist."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.stores import byte_ranges
from prepcli.stores.byte_ranges import RetryPolicy
from prepcli.stores.object_store import PART_NBYTES, Bucket
from prepcli.stores.object_writes import ObjectUploads, put_object
from tests.helpers.object_server import FakeObjectStore
from tests.helpers.slow_cases import slow_except

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
