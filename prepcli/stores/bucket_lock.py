"""A lock of a URL in an object store: one plan at a time writes below it.

Object stores have conditional writes instead of locks. The lock is the object `URL/.prep-lock` with the name of its
owner. The owner rewrites it every RENEW_S seconds: the store's time of the last write shows that the owner is alive. A
kill leaves the lock. The same plan takes it over at once, another plan after STALE_S seconds.

with BucketLock(bucket, plan_digest, say=ui.note) as lock:
    bucket.write(...)
    lock.confirm()
    publish_content(bucket, "prep-manifest.json", content)  # the output becomes visible
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta

from prepcli.core.errors import RERUN_HINT, PrepError
from prepcli.core.json_values import load_json
from prepcli.stores.byte_ranges import LOCK_FILE, say_nothing
from prepcli.stores.object_store import Bucket
from prepcli.stores.object_writes import (
    ConditionsNotSupportedError,
    ObjectVersion,
    SmallObject,
    create_object,
    read_object,
    replace_object,
)

# A lock expires after 10 missed renewals. `check` trusts the last renewal for UNSURE_S.
# A write that it allows has at least 300 - 120 = 180 s until another plan may take the lock over.
RENEW_S = 30.0
# Seconds without a renewal until another plan takes the lock over.
STALE_S = 300.0
# Seconds without a successful renewal until `check` asks the store.
UNSURE_S = 120.0
# Seconds without a renewal until another process with the same plan renews a shared lock.
ORPHANED_S = 90.0
MAX_NBYTES = 4096  # size of the lock object
# Tries to acquire a lock while other processes acquire and release it.
MAX_TRIES = 10


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The holder of a lock.

    Attributes:
        host: Its host.
        process: Its process id.
        plan: Digest of its plan.
        token: Random text of this holder. Two holders on one host differ.
        renewals: Number of renewals. Each renewal gives the object another ETag.
    """

    host: str
    process: int
    plan: str
    token: str
    renewals: int = 0

    def __str__(self) -> str:
        """Return the process for messages."""
        return f"process {self.process} on {self.host}"

    def to_bytes(self) -> bytes:
        """Return the content of the lock object."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> LockOwner:
        """Return the owner in a lock object. A malformed object gives an unknown owner."""
        try:
            values = load_json(content)
            owner = cls(**{field.name: values[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError):
            return UNKNOWN_OWNER
        texts = (owner.host, owner.plan, owner.token)
        numbers = (owner.process, owner.renewals)
        is_valid = all(type(text) is str for text in texts) and all(
            type(number) is int for number in numbers
        )
        if is_valid:
            return owner
        return UNKNOWN_OWNER


UNKNOWN_OWNER = LockOwner("an unknown host", 0, "", "")


def lock_owner(bucket: Bucket) -> LockOwner | None:
    """Return the owner of a URL's lock, or None without a lock.

    Raises:
        PrepError: The store does not answer, or access is denied.
    """
    lock_object = read_object(bucket, LOCK_FILE, MAX_NBYTES)
    if lock_object is None:
        return None
    return LockOwner.from_bytes(lock_object.content)


def is_locked_by(bucket: Bucket, plan_digest: str) -> bool:
    """Return whether a process with this plan holds the lock of a URL, or was killed with it.

    Raises:
        PrepError: The store does not answer, or access is denied.
    """
    owner = lock_owner(bucket)
    return owner is not None and owner.plan == plan_digest


class BucketLock:
    """The lock of a URL, held from `acquire` to `release`. A thread renews it.

    A shared lock is held by all processes with one plan. One of them renews it. Another one takes it over if the object
    is gone, or is not renewed any more.
    """

    def __init__(
        self,
        bucket: Bucket,
        plan_digest: str,
        *,
        say: Callable[[str], object] = say_nothing,
        renew_s: float = RENEW_S,
        is_shared: bool = False,
    ) -> None:
        """Create a free lock.

        Args:
            bucket: Client of the URL to lock.
            plan_digest: Digest of the plan. A holder with the same plan is replaced.
            say: Receives a line if the URL cannot be locked or unlocked.
            renew_s: Seconds between two renewals.
            is_shared: Share the lock with processes of the same plan, instead of replacing them.
        """
        self._bucket = bucket
        self._say = say
        self._renew_s = renew_s
        self._is_shared = is_shared
        # Version of the lock object of another process with the same plan, and the time since when it has it
        self._peer: tuple[ObjectVersion, float] | None = None
        self._owner = LockOwner(
            socket.gethostname(), os.getpid(), plan_digest, secrets.token_hex(8)
        )
        # Version of the lock object. None if this process has not written it.
        self._version: ObjectVersion | None = None
        # The owner that has taken the lock over. None while this process holds it.
        self._new_owner: LockOwner | None = None
        self._renewed_s = 0.0
        # Guards `_version`, `_new_owner` and `_owner`: `check` and the renewing thread both renew.
        self._mutex = threading.Lock()
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> BucketLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Acquire the lock, also from a holder with the same plan or without a recent renewal.

        Raises:
            PrepError: A process with another plan holds the lock, or the store does not answer.
        """
        try:
            self._version = self._write_first()
        except ConditionsNotSupportedError:
            self._say(
                f"{self._bucket.name} cannot be locked (the store has no conditional writes): start no second writer "
                "there meanwhile"
            )
            return
        self._renewed_s = time.monotonic()
        self._thread = threading.Thread(target=self._renew_until_released, daemon=True)
        self._thread.start()

    def _write_first(self) -> ObjectVersion:
        """Write the lock object of this owner, and return its version."""
        for _ in range(MAX_TRIES):
            version = create_object(self._bucket, LOCK_FILE, self._owner.to_bytes())
            if version:
                lock_object = None
            else:
                lock_object = read_object(self._bucket, LOCK_FILE, MAX_NBYTES)
            if version is None and lock_object is not None:
                version = self._take_over(lock_object)
            if version is not None:
                return version
        raise PrepError(
            f"{self._bucket.name} cannot be locked",
            "other processes lock it again and again",
            RERUN_HINT,
        )

    def _take_over(self, lock_object: SmallObject) -> ObjectVersion | None:
        """Replace the lock object of another owner. Return None if it has changed meanwhile."""
        owner = LockOwner.from_bytes(lock_object.content)
        if owner.token == self._owner.token:
            # An earlier request of this process arrived, and its answer was lost.
            return lock_object.version
        _check_available(self._bucket, lock_object, self._owner.plan)
        if self._is_shared and owner.plan == self._owner.plan:
            self._peer = (lock_object.version, time.monotonic())
            return lock_object.version
        return replace_object(self._bucket, LOCK_FILE, self._owner.to_bytes(), lock_object.version)

    def check(self) -> None:
        """Raise an error if this process has lost the lock. Call it before an output becomes visible.

        Raises:
            PrepError: Another process has taken the lock over, or the store does not answer.
        """
        if time.monotonic() - self._renewed_s > UNSURE_S:
            self.confirm()
        else:
            self._check_owner()

    def confirm(self) -> None:
        """Check as `check` does, but always ask the store.

        A holder with the same plan may have taken the lock over since the last renewal.

        Raises:
            PrepError: Another process has taken the lock over, or the store does not answer.
        """
        self._renew_lock()
        self._check_owner()

    def _check_owner(self) -> None:
        if self._new_owner is not None:
            why = f"{self._new_owner} works on it now"
            raise PrepError(
                f"{self._bucket.name} was taken over",
                why,
                "wait until it ends, then run the command again",
            )

    def _renew_until_released(self) -> None:
        while not self._released.wait(self._renew_s):
            # Without an answer of the store, the next renewal or `check` asks again.
            with contextlib.suppress(PrepError, ConditionsNotSupportedError):
                self._renew_lock()

    def _renew_lock(self) -> None:
        """Rewrite the lock object. Record its new owner if this process no longer holds it."""
        with self._mutex:
            # No write after `release`: it would create the lock object again.
            if self._version is None or self._new_owner is not None or self._released.is_set():
                return
            if self._peer is not None and not self._is_orphaned(self._peer):
                return
            owner = self._owner
            self._owner = LockOwner(
                owner.host, owner.process, owner.plan, owner.token, owner.renewals + 1
            )
            content = self._owner.to_bytes()
            # The write depends on the version that this process wrote last. The store compares
            # and writes in one step, so of two holders one fails.
            version = replace_object(self._bucket, LOCK_FILE, content, self._version)
            if version:
                lock_object = None
            else:
                lock_object = read_object(self._bucket, LOCK_FILE, MAX_NBYTES)
            if version is None and lock_object is None:
                version = create_object(self._bucket, LOCK_FILE, content)  # a user removed it
            elif lock_object is not None:
                holder = LockOwner.from_bytes(lock_object.content)
                # The token is this owner's if an earlier request arrived and its answer was lost.
                if holder.token == owner.token:
                    version = lock_object.version
                elif self._is_shared and holder.plan == owner.plan:
                    self._peer = (lock_object.version, time.monotonic())
                    self._renewed_s = time.monotonic()
                else:
                    self._new_owner = holder
            if version is not None:
                self._peer = None
                self._version = version
                self._renewed_s = time.monotonic()

    def _is_orphaned(self, peer: tuple[ObjectVersion, float]) -> bool:
        """Return whether this process must renew the lock, instead of the process with the same plan that had it."""
        version, since_s = peer
        lock_object = read_object(self._bucket, LOCK_FILE, MAX_NBYTES)
        if lock_object is None:
            return True
        holder = LockOwner.from_bytes(lock_object.content)
        if holder.plan != self._owner.plan:
            self._new_owner = holder
            return False
        now_s = time.monotonic()
        self._renewed_s = now_s
        if lock_object.version != version:
            self._peer = (lock_object.version, now_s)
            return False
        self._version = version
        return now_s - since_s > ORPHANED_S

    def release(self, *, is_over: bool = False, is_kept: bool = False) -> None:
        """Remove the lock object, unless another process has taken the lock over.

        Args:
            is_over: Whether no other process with the same plan works. Its lock is then removed too.
            is_kept: Whether the lock object stays. A process with the same plan renews it soon, if there is one.
        """
        self._released.set()
        with self._mutex:
            is_held = self._version is not None and self._new_owner is None
            self._version = None
        # The lock object of another owner stays.
        if not is_held or is_kept:
            return
        try:
            owner = lock_owner(self._bucket)
            # A delete has no condition in obstore 0.12. Between this read and the delete, only
            # the same plan could take the lock, or another plan STALE_S after the last renewal.
            if owner is None:
                return
            is_own = owner.token == self._owner.token
            if is_own or (is_over and owner.plan == self._owner.plan):
                self._bucket.delete(LOCK_FILE)
        except PrepError as error:
            self._say(f"{self._bucket.name}/{LOCK_FILE} was not removed: {error.why}")


def check_lock(bucket: Bucket, plan_digest: str) -> None:
    """Raise PrepError if a process with another plan holds a URL's lock."""
    lock_object = read_object(bucket, LOCK_FILE, MAX_NBYTES)
    if lock_object is not None:
        _check_available(bucket, lock_object, plan_digest)


def _check_available(bucket: Bucket, lock_object: SmallObject, plan_digest: str) -> None:
    """Raise PrepError for the lock object of another plan, unless it is stale by the clock of the store."""
    owner = LockOwner.from_bytes(lock_object.content)
    if owner.plan == plan_digest:
        return
    age = _store_time(bucket) - lock_object.modified
    if age < timedelta(seconds=STALE_S):
        why = f"{owner} writes another output there"
        hint = f"wait until it ends; a lock that a killed process left expires after {STALE_S / 60:.0f} minutes"
        raise PrepError(f"{bucket.name} is locked", why, hint)


def _store_time(bucket: Bucket) -> datetime:
    """Return the current time of the store: write an object, and read its modification time."""
    # The clocks of two hosts differ. Both times of an age come from the store.
    path = f"{LOCK_FILE}-time-{secrets.token_hex(8)}"
    create_object(bucket, path, b"\n")
    try:
        written = read_object(bucket, path, MAX_NBYTES)
    finally:
        bucket.delete(path)
    if written is None:
        raise PrepError(
            f"cannot lock {bucket.name}",
            "an object that was written cannot be read back",
            RERUN_HINT,
        )
    return written.modified
