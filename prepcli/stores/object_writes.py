"""Write objects of an output: each is created only if it does not exist, and compared if it does.

A conversion may be killed and started again, on another machine or in several processes at once. All of them write the
same bytes to the same objects. An existing object is therefore read back instead of sent again: with equal
bytes it is a part of the output, with other bytes it belongs to another writer, and is left untouched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

from prepcli.core.errors import RERUN_HINT, RESUME_HINT, Option, PrepError, text
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import RemoteFile, read_range
from prepcli.stores.conditional_objects import is_unsupported_write
from prepcli.stores.object_store import WRITE_NBYTES, Bucket, Upload

# Bytes that are read back at a time, in each thread that sends.
COMPARED_NBYTES = 1 << 20
# Tries to create an object that another process creates and deletes.
MAX_CREATE_TRIES = 4


def put_object(
    bucket: Bucket, path: str, data: ByteArray, *, on_sent: Callable[[int], object] = lambda n: None
) -> RemoteFile:
    """Create an object in one request, or compare it if it exists.

    Args:
        bucket: Client of the output's URL.
        path: Path of the object below the URL.
        data: The bytes.
        on_sent: Called with the number of bytes of each request.

    Returns:
        The object.

    Raises:
        PrepError: The object has other bytes, or the store does not answer.
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

        Raises:
            PrepError: The object has other bytes, or the store does not answer.
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
        return self._complete(path, size)

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

    def _complete(self, path: str, size: int) -> RemoteFile:
        """Complete the multipart upload of an object. Return the object."""
        with self._lock:
            upload = self._uploads.pop(path)
        written = self.bucket.complete_upload(upload)
        if written is None or written.size != size:
            stored_nbytes = 0 if written is None else written.size
            why = f"the object has {stored_nbytes:,} bytes, not {size:,}"
            what = f"the upload of {path} to {self.bucket.name} is incomplete"
            # The next run must not compare the short object, but send it again.
            self.bucket.delete(path)
            raise PrepError(what, why, RESUME_HINT)
        return written


def missing_object_error(bucket: Bucket, path: str) -> PrepError:
    """Return the error for a lost or changed object of the output."""
    what = f"{path} of {bucket.name} is missing or was changed"
    return PrepError(what, "this output has written it before", RERUN_HINT)
