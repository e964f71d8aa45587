"""Write objects of an output: each is created only if it does not exist, and compared if it does.

A conversion may be killed and started again, on another machine or in several processes at once. All of them write the
same bytes to the same objects. An existing object is therefore read back instead of sent again: with equal
bytes it is a part of the output, with other bytes it belongs to another writer, and is left untouched.

A conditional write fails if another process has written the object meanwhile. The store compares the version in the
request with the object's version: the ETag on S3, the generation on GCS. The write is atomic: one of several writers
succeeds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from prepcli.core.errors import RERUN_HINT, Option, PrepError, text
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import (
    WRITE_TIMEOUT_FACTOR,
    RemoteFile,
    call_with_timeout,
    read_range,
)
from prepcli.stores.object_store import WRITE_NBYTES, Bucket, Upload, status_of

if TYPE_CHECKING:
    from obstore import PutMode, UpdateVersion

NOT_IMPLEMENTED = {405, 501}  # HTTP status of stores without conditional writes
# Bytes that are read back at a time, in each thread that sends.
COMPARED_NBYTES = 1 << 20
# Tries to create an object that another process creates and deletes.
MAX_CREATE_TRIES = 4


class ConditionsNotSupportedError(Exception):
    """The store has no conditional writes."""


def is_unsupported_write(error: Exception) -> bool:
    """Return whether a conditional write failed because the store has none."""
    from obstore import exceptions

    if isinstance(error, (exceptions.NotSupportedError, NotImplementedError)):
        return True
    return status_of(error) in NOT_IMPLEMENTED


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Version of an object.

    Attributes:
        etag: ETag, empty if the store has none.
        generation: Generation of GCS, empty for other stores.
    """

    etag: str
    generation: str


@dataclass(frozen=True, slots=True)
class SmallObject:
    """Content of an object.

    Attributes:
        content: The bytes.
        version: Its version.
        modified: Time of its last write, by the clock of the store.
    """

    content: bytes
    version: ObjectVersion
    modified: datetime


def create_object(bucket: Bucket, path: str, content: bytes) -> ObjectVersion | None:
    """Create an object.

    Returns:
        Its version, or None if the object exists.

    Raises:
        ConditionsNotSupportedError: The store has no conditional writes.
        PrepError: The store does not answer, or access is denied.
    """
    return _put_object(bucket, path, content, "create")


def replace_object(
    bucket: Bucket, path: str, content: bytes, version: ObjectVersion
) -> ObjectVersion | None:
    """Overwrite a version of an object.

    Returns:
        The new version, or None if the object has another version or does not exist.

    Raises:
        ConditionsNotSupportedError: The store has no conditional writes.
        PrepError: The store does not answer, or access is denied.
    """
    known: UpdateVersion = {}
    if version.etag:
        known["e_tag"] = version.etag
    if version.generation:
        known["version"] = version.generation
    return _put_object(bucket, path, content, known)


def publish_content(bucket: Bucket, path: str, content: bytes) -> None:
    """Create the manifest of an output, unless another process has done so.

    Call it directly after `BucketLock.confirm`. The object must not exist: the caller deletes the
    one of an earlier output first.
    """
    # The lock and the manifest are two objects, and a store puts a condition only on the object
    # that a request writes. So the requests come in this order:
    #   1. confirm: a compare-and-swap of the lock object. It fails if another process has the lock.
    #   2. create: fails if another process has published the output since step 1.
    # One gap remains. A holder that takes the lock between 1 and 2 may list this output as a
    # leftover, and delete its data after step 2. The manifest then names objects that do not
    # exist: readers report damage, and none of them takes other bytes for values.
    try:
        version = create_object(bucket, path, content)
    except ConditionsNotSupportedError:
        bucket.write_pieces(path, [content], size=len(content))
        return
    if version is not None:
        return
    # obstore repeats a request without an answer. If the first one arrived, the object has
    # exactly this content, and the create has succeeded.
    existing = read_object(bucket, path, len(content) + 1)
    if existing is None or existing.content != content:
        why = f"another process has written its {path} meanwhile"
        hint = "wait until it ends, then run the command again"
        raise PrepError(f"{bucket.name} was taken over", why, hint)


def read_object(bucket: Bucket, path: str, max_nbytes: int) -> SmallObject | None:
    """Read an object, or None if it does not exist."""
    from obstore import exceptions

    def get() -> SmallObject:
        result = bucket.upload_store.get(bucket.url.key(path))
        content = bytearray()
        for chunk in result.stream():
            content += chunk
            # The size of the object is not trusted: the loop ends after the first chunk above the limit.
            if len(content) > max_nbytes:
                break
        metadata = result.meta
        version = ObjectVersion(metadata["e_tag"] or "", metadata["version"] or "")
        return SmallObject(bytes(content[:max_nbytes]), version, metadata["last_modified"])

    with bucket.translate_errors("read"):
        try:
            return call_with_timeout(get, _timeout_s(bucket))
        except (exceptions.NotFoundError, FileNotFoundError):
            return None


def _put_object(bucket: Bucket, path: str, content: bytes, mode: PutMode) -> ObjectVersion | None:
    """Write an object on a condition, and return its version, or None if the condition did not hold."""
    from obstore import exceptions

    if not bucket.has_conditions:
        raise ConditionsNotSupportedError
    with bucket.translate_errors("write"):
        try:
            result = call_with_timeout(
                lambda: bucket.upload_store.put(bucket.url.key(path), content, mode=mode),
                _timeout_s(bucket),
            )
        except (
            exceptions.AlreadyExistsError,
            exceptions.PreconditionError,
            exceptions.NotFoundError,
        ):
            return None
        except FileExistsError:
            return None
        except (exceptions.BaseError, NotImplementedError) as error:
            if is_unsupported_write(error):
                # A refused request takes seconds of retries.
                bucket.has_conditions = False
                raise ConditionsNotSupportedError from error
            raise
    return ObjectVersion(cast(str, result["e_tag"] or ""), cast(str, result["version"] or ""))


def _timeout_s(bucket: Bucket) -> float:
    return WRITE_TIMEOUT_FACTOR * bucket.retry_policy.timeout_s


def put_object(
    bucket: Bucket, path: str, data: ByteArray, *, on_sent: Callable[[int], object] = lambda n: None
) -> RemoteFile:
    """Create an object in one request, or compare it if it exists.

    Returns:
        The object.
    """
    for _ in range(MAX_CREATE_TRIES):
        on_sent(data.size)
        created = _create(bucket, path, data)
        if created is not None:
            return created
        existing = bucket.find_file(path)
        if existing is not None:
            check_equal_object(bucket, existing, data, start=0, size=data.size)
            return existing
    raise foreign_object_error(bucket, path, "another process creates and deletes it")


def _create(bucket: Bucket, path: str, data: ByteArray) -> RemoteFile | None:
    """Create an object. Return None if it exists."""
    from obstore import exceptions

    key = bucket.url.key(path)
    exists_errors = (
        exceptions.AlreadyExistsError,
        exceptions.PreconditionError,
        FileExistsError,
    )

    def put(mode: Any) -> Any:
        # Errors that are an answer return None, because `retry_call` repeats a call that raises.
        try:
            return bucket.call_with_timeout(
                lambda: bucket.write_store.put(key, data.data, mode=mode, use_multipart=False)
            )
        except exists_errors:
            return None

    result: Any = None
    with bucket.translate_errors("write"):
        if bucket.has_conditions:
            try:
                result = bucket.retry_call(partial(put, "create"))
            except (exceptions.BaseError, NotImplementedError) as error:
                if not is_unsupported_write(error):
                    raise
                # The lock has said so.
                bucket.has_conditions = False
        if not bucket.has_conditions:
            result = bucket.retry_call(partial(put, "overwrite"))
    if result is None:
        return None
    return RemoteFile(path, data.size, f"etag:{cast(str, result['e_tag'] or result['version'])}")


def check_equal_object(
    bucket: Bucket, existing: RemoteFile, data: ByteArray, *, start: int, size: int | None
) -> None:
    """Raise PrepError unless an object has `size` bytes, and `data` at offset `start`.

    An object of unknown size has at least the bytes of `data`.
    """
    least_nbytes = start + data.size
    if size is not None and existing.size != size:
        why = f"it has {existing.size:,} bytes, not {size:,}"
        raise foreign_object_error(bucket, existing.path, why)
    if existing.size < least_nbytes:
        why = f"it has {existing.size:,} bytes, and at least {least_nbytes:,} are needed"
        raise foreign_object_error(bucket, existing.path, why)
    block = np.empty(min(COMPARED_NBYTES, data.size), np.uint8)
    for offset in range(0, data.size, COMPARED_NBYTES):
        part = data[offset : offset + COMPARED_NBYTES]
        stored = block[: part.size]
        read_range(bucket, existing, offset=start + offset, into=stored)
        if not np.array_equal(stored, part):
            why = f"its bytes differ from byte {start + offset:,} on"
            raise foreign_object_error(bucket, existing.path, why)


def foreign_object_error(bucket: Bucket, path: str, why: str) -> PrepError:
    """Return the error for an object of another writer."""
    return PrepError(
        f"{path} of {bucket.name} was written by another program",
        why,
        text("use another URL, or delete the objects with {}", Option("restart", True)),
    )


@dataclass(slots=True)
class ObjectUploads:
    """Sends the pieces of objects.

    Attributes:
        bucket: Client of the output's URL.
        existing: Objects of an earlier run, by path. They are compared and not sent again.
        parts_in_flight: Number of parts of one object in flight at the same time.
        on_sent: Called with the number of bytes of each request.
    """

    bucket: Bucket
    existing: Mapping[str, RemoteFile]
    parts_in_flight: int = 1
    on_sent: Callable[[int], object] = lambda n: None
    # Uploads under way, by path
    _uploads: dict[str, Upload] = field(default_factory=dict[str, Upload])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(
        self, path: str, data: ByteArray, *, start: int, size: int | None, max_nbytes: int = 0
    ) -> RemoteFile | None:
        """Send consecutive bytes of an object. The pieces of an object come in order, one at a time.

        Args:
            path: Path of the object below the URL.
            data: The bytes.
            start: Offset of the bytes in the object.
            size: Size of the object. None if it is not known before the last piece.
            max_nbytes: About the largest size of an object with an unknown size.

        Returns:
            The object after its last piece, otherwise None.
        """
        is_last = start + data.size == size
        existing = self.existing.get(path)
        if existing is not None:
            check_equal_object(self.bucket, existing, data, start=start, size=size)
            return existing if is_last else None
        if data.size == size:
            return put_object(self.bucket, path, data, on_sent=self.on_sent)
        if data.size:
            self._append(path, data, max(size or 0, max_nbytes))
        if size is None or not is_last:
            return None
        # A multipart upload has no condition: this check comes right before the object appears.
        if self.bucket.find_file(path) is not None:
            what = f"{path} of {self.bucket.name} appeared during its upload"
            # The next run compares the object.
            raise PrepError(what, "another process has written it", RERUN_HINT)
        with self._lock:
            upload = self._uploads.pop(path)
        written = self.bucket.complete_upload(upload)
        if written is None or written.size != size:
            # The next run must not compare the short object, but send it again.
            self.bucket.delete(path)
            raise self.bucket.incomplete_error(path, written, size)
        return written

    def _append(self, path: str, data: ByteArray, size: int) -> None:
        """Append bytes to the multipart upload of an object."""
        bucket = self.bucket
        with self._lock:
            upload = self._uploads.get(path)
        if upload is None:
            upload = bucket.open_upload(path, size, self.parts_in_flight)
        with bucket.translate_errors("write"):
            for offset in range(0, data.size, WRITE_NBYTES):
                part = data[offset : offset + WRITE_NBYTES]
                bucket.call_with_timeout(partial(upload.writer.write, part.data))
                self.on_sent(part.size)
        with self._lock:
            self._uploads[path] = upload


def missing_object_error(bucket: Bucket, path: str) -> PrepError:
    """Return the error for a lost or changed object of the output."""
    what = f"{path} of {bucket.name} is missing or was changed"
    return PrepError(what, "this output has written it before", RERUN_HINT)
