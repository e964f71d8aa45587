"""Conditional writes of small objects: a write fails if another process has written the object meanwhile.

The store compares the version in the request with the object's version: the ETag on S3, the generation on GCS. The
write is atomic: one of several writers succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, cast

from prepcli.core.errors import PrepError
from prepcli.stores.byte_ranges import WRITE_TIMEOUT_FACTOR, call_with_timeout
from prepcli.stores.object_store import Bucket, status_of

if TYPE_CHECKING:
    from obstore import PutMode, UpdateVersion

NOT_IMPLEMENTED = {405, 501}  # HTTP status of stores without conditional writes


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
