"""The lock of a URL: one plan at a time. The fake store decides on versions and on the time."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta

import pytest

from prepcli.core.errors import PrepError
from prepcli.stores import bucket_lock
from prepcli.stores.bucket_lock import BucketLock, check_lock, lock_owner
from prepcli.stores.object_store import Bucket
from prepcli.stores.object_writes import publish_content
from tests.helpers.object_server import FakeObjectStore
from tests.helpers.slow_cases import slow_except

pytestmark = pytest.mark.waits

LOCK = "bucket/out/.prep-lock"
NEVER_S = 3600.0
pytest.importorskip("obstore")


def new_lock(bucket: Bucket, plan: str = "plan", *, renew_s: float = NEVER_S) -> BucketLock:
    return BucketLock(bucket, plan, renew_s=renew_s)


def test_lock_names_its_owner_and_is_removed(store: FakeObjectStore, bucket: Bucket):
    with new_lock(bucket) as lock:
        fields = json.loads(store.objects[LOCK])
        assert set(fields) == {"host", "process", "plan", "token", "renewals"}
        assert fields["plan"] == "plan"
        assert bucket.list_files() == (), "readers ignore it"
        lock.check()
    assert store.objects == {}


def test_another_plan_is_refused_with_the_owner(store: FakeObjectStore, bucket: Bucket):
    with new_lock(bucket, "first"):
        owner = lock_owner(bucket)
        for attempt in (new_lock(bucket, "second").acquire, lambda: check_lock(bucket, "second")):
            with pytest.raises(PrepError, match=f"^{bucket.name} is locked - {owner}") as caught:
                attempt()
            assert "5 minutes" in caught.value.hint
        check_lock(bucket, "first")
        assert [*store.objects] == [LOCK], "the objects that show the time are gone"
    check_lock(bucket, "second")


def test_the_same_plan_takes_the_lock_over_at_once(store: FakeObjectStore, bucket: Bucket):
    killed = new_lock(bucket)
    killed.acquire()
    with new_lock(bucket):
        killed._renew_lock()
        with pytest.raises(PrepError, match="was taken over - process"):
            killed.check()
        killed.release()
        assert LOCK in store.objects, "the lock of another holder stays"
    assert LOCK not in store.objects


@pytest.mark.parametrize(("age_s", "is_stale"), [(299, False), (301, True)])
def test_a_lock_is_stale_by_the_clock_of_the_store(
    age_s: int, is_stale: bool, store: FakeObjectStore, bucket: Bucket
):
    new_lock(bucket, "killed").acquire()
    store.time += timedelta(seconds=age_s)
    lock = new_lock(bucket, "new")
    if is_stale:
        lock.acquire()
        assert json.loads(store.objects[LOCK])["plan"] == "new"
    else:
        with pytest.raises(PrepError, match="is locked"):
            lock.acquire()


def test_renewals_keep_a_lock_fresh(store: FakeObjectStore, bucket: Bucket):
    lock = new_lock(bucket, "slow")
    lock.acquire()
    for renewals in range(1, 4):
        store.time += timedelta(seconds=200)
        lock._renew_lock()
        assert json.loads(store.objects[LOCK])["renewals"] == renewals
    with pytest.raises(PrepError, match="is locked"):
        new_lock(bucket, "other").acquire()


def test_a_thread_renews_the_lock(store: FakeObjectStore, bucket: Bucket):
    with new_lock(bucket, renew_s=0.001):
        while json.loads(store.objects[LOCK])["renewals"] < 3:
            time.sleep(0.001)
    assert store.objects == {}


def test_of_many_plans_one_gets_the_lock(store: FakeObjectStore, bucket: Bucket):
    locks, winners, losers = [new_lock(bucket, str(i)) for i in range(8)], list[int](), list[int]()

    def acquire(number: int) -> None:
        try:
            locks[number].acquire()
            winners.append(number)
        except PrepError:
            losers.append(number)

    threads = [threading.Thread(target=acquire, args=(number,)) for number in range(len(locks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(winners), len(losers)) == (1, 7)
    assert json.loads(store.objects[LOCK])["plan"] == str(winners[0])


def test_a_suspended_holder_asks_the_store(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    suspended = new_lock(bucket)
    suspended.acquire()
    new_lock(bucket).acquire()
    suspended.check()
    monkeypatch.setattr(bucket_lock, "UNSURE_S", -1.0)
    with pytest.raises(PrepError, match="was taken over"):
        suspended.check()


def test_a_removed_lock_is_written_again(store: FakeObjectStore, bucket: Bucket):
    with new_lock(bucket) as lock:
        del store.objects[LOCK]
        lock._renew_lock()
        lock.check()
        assert json.loads(store.objects[LOCK])["renewals"] == 1


def test_a_write_without_an_answer_is_recognized(store: FakeObjectStore, bucket: Bucket):
    """The store has the object, and the client sends it again."""
    lock = new_lock(bucket)
    store.store(LOCK, lock._owner.to_bytes())
    lock.acquire()
    store.store(LOCK, store.objects[LOCK])
    lock._renew_lock()
    lock.check()
    owner = json.loads(lock._owner.to_bytes())
    assert json.loads(store.objects[LOCK])["token"] == owner["token"]


INFINITE_PROCESS = b'{"host": "a", "process": Infinity, "plan": "p", "token": "t", "renewals": 0}'


@pytest.mark.parametrize(
    "content",
    slow_except(
        [b"\n", b"[]", b"\xff", b"{}", b"[" * 100_000, b'{"host": 1}', INFINITE_PROCESS],
        [b"\n", b"[" * 100_000],
    ),
)
def test_malformed_lock_counts_as_foreign(content: bytes, store: FakeObjectStore, bucket: Bucket):
    store.store(LOCK, content)
    with pytest.raises(PrepError, match="process 0 on an unknown host"):
        new_lock(bucket).acquire()
    store.time += timedelta(seconds=301)
    new_lock(bucket).acquire()


def test_store_without_conditional_writes_gives_a_note(store: FakeObjectStore, bucket: Bucket):
    store.has_conditions = False
    notes = list[str]()
    with BucketLock(bucket, "plan", say=notes.append) as lock:
        lock.check()
    assert ["cannot be locked" in note for note in notes] == [True]
    assert store.objects == {}


@pytest.mark.parametrize("has_conditions", [True, False])
def test_publish_content_writes_the_object(
    has_conditions: bool, store: FakeObjectStore, bucket: Bucket
):
    store.has_conditions = has_conditions
    publish_content(bucket, "manifest", b"mine")
    assert store.objects == {"bucket/out/manifest": b"mine"}


@pytest.mark.parametrize(
    "content", slow_except([b"other", b"mine, and more", b"min"], [b"mine, and more"])
)
def test_publish_content_keeps_the_object_of_another_process(
    content: bytes, store: FakeObjectStore, bucket: Bucket
):
    store.store("bucket/out/manifest", content)
    with pytest.raises(PrepError, match="was taken over - another process has written"):
        publish_content(bucket, "manifest", b"mine")
    assert store.objects == {"bucket/out/manifest": content}


def test_publish_content_accepts_its_own_earlier_request(store: FakeObjectStore, bucket: Bucket):
    """The first request arrived, its answer was lost, and the client sent it again."""
    store.store("bucket/out/manifest", b"mine")
    publish_content(bucket, "manifest", b"mine")
    assert store.objects == {"bucket/out/manifest": b"mine"}
