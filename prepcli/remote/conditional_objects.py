"""Conditional writes of small objects: a write fails if another process has written the object meanwhile.

The store compares the version in the request with the object's version: the ETag on S3, the generation on GCS. The
write is atomic, so that one of several writers succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, cast

from prepcli.remote.object_store import Bucket, status_of
from prepcli.remote.retries import WRITE_TIMEOUT_FACTOR, call_with_timeout

if TYPE_CHECKING:
    from obstore import PutMode, UpdateVersion

NOT_IMPLEMENTED = {405, 501}  # HTTP status of stores without conditional writes


class ConditionsNotSupportedError(Exception):
    """The store has no conditional writes."""


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Version of an object.

    Attributes:
        etag: ETag; empty if the store has none.
        generation: Generation of GCS; empty for other stores.
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
    """Write an object that does not exist.

    Args:
        bucket: Client of the store.
        path: Path of the object below the URL.
        content: The bytes.

    Returns:
        Its version; None if the object exists.

    Raises:
        ConditionsNotSupportedError: The store has no conditional writes.
        PrepError: The store does not answer, or access is denied.
    """
    return _put(bucket, path, content, "create")


def replace_object(bucket: Bucket, path: str, content: bytes, version: ObjectVersion) -> ObjectVersion | None:
    """Overwrite an object that still has a version.

    Args:
        bucket: Client of the store.
        path: Path of the object below the URL.
        content: The bytes.
        version: The version to replace.

    Returns:
        The new version; None if the object has another version or does not exist.

    Raises:
        ConditionsNotSupportedError: The store has no conditional writes.
        PrepError: The store does not answer, or access is denied.
    """
    known: UpdateVersion = {}
    if version.etag:
        known["e_tag"] = version.etag
    if version.generation:
        known["version"] = version.generation
    return _put(bucket, path, content, known)


def read_object(bucket: Bucket, path: str, max_nbytes: int) -> SmallObject | None:
    """Read an object; None if it does not exist.

    Args:
        bucket: Client of the store.
        path: Path of the object below the URL.
        max_nbytes: Maximum number of bytes to read.

    Raises:
        PrepError: The store does not answer, or access is denied.
    """
    from obstore import exceptions

    def get() -> SmallObject:
        result = bucket.store.get(bucket.url.key(path))
        content = bytearray()
        for chunk in result.stream():
            content += chunk
            if len(content) > max_nbytes:
                break
        metadata = result.meta
        version = ObjectVersion(metadata["e_tag"] or "", metadata["version"] or "")
        return SmallObject(bytes(content[:max_nbytes]), version, metadata["last_modified"])

    with bucket.translate_errors("read"):
        try:
            return call_with_timeout(get, _limit_s(bucket))
        except (exceptions.NotFoundError, FileNotFoundError):
            return None


def _put(bucket: Bucket, path: str, content: bytes, mode: PutMode) -> ObjectVersion | None:
    from obstore import exceptions

    with bucket.translate_errors("write"):
        try:
            result = call_with_timeout(
                lambda: bucket.store.put(bucket.url.key(path), content, mode=mode), _limit_s(bucket)
            )
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotFoundError):
            return None
        except FileExistsError:
            return None
        except (exceptions.BaseError, NotImplementedError) as error:
            is_unsupported = isinstance(error, (exceptions.NotSupportedError, NotImplementedError))
            if is_unsupported or status_of(error) in NOT_IMPLEMENTED:
                raise ConditionsNotSupportedError from error
            raise
    return ObjectVersion(cast(str, result["e_tag"] or ""), cast(str, result["version"] or ""))


def _limit_s(bucket: Bucket) -> float:
    return WRITE_TIMEOUT_FACTOR * bucket.retry_policy.timeout_s
