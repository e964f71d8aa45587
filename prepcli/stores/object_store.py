"""Object stores (`gs://`, `s3://`) through obstore: list, read byte ranges, write and delete objects.

obstore finds credentials, regions and endpoints as the clouds' own tools do: from GOOGLE_* and AWS_* variables, from
Google's application default credentials, and from the metadata server of a cloud machine.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from prepcli.core.errors import RESUME_HINT, PrepError
from prepcli.stores.addresses import ObjectStoreUrl
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import (
    DEFAULT_RETRY_POLICY,
    MAX_IN_FLIGHT,
    MAX_TRIES,
    WRITE_TIMEOUT_FACTOR,
    FailedTries,
    RemoteFile,
    RetryableError,
    RetryPolicy,
    call_with_timeout,
    file_changed_error,
    map_in_daemon_threads,
    read_range,
    receive_body,
)
from prepcli.stores.files import io_error, replacing_file

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta, WritableFile
    from obstore.store import ObjectStore

RETRIES = 10  # of obstore, for each request
MAX_OBJECTS = 200_000  # in one checkpoint
NUM_SMALL_REQUESTS = 32  # concurrent requests for small objects
MAX_ERROR_CHARS = 300
# Size of a part of a multipart upload
PART_NBYTES = 8 << 20
DOWNLOAD_PIECE_NBYTES = 8 << 20
# Object stores accept 10,000. 9,000 parts of 8 MiB reach 70 GiB. Larger objects get larger parts, so that
# no limit of a store bounds the size of a data file.
MAX_PARTS = 9_000
# Metadata of an object: the identity of its upload
TOKEN_KEY = "prep-upload"
WRITE_NBYTES = PART_NBYTES // 4  # passed to obstore in one call
# Time limit of a write with obstore's own retries, in time-outs.
MAX_WRITE_TIMEOUTS = 6

T = TypeVar("T")

PERMANENT_STATUSES = {*range(400, 500), 501} - {408, 425, 429}

_STATUS = re.compile(r"status code: ([0-9]{3})")
_CLIENT_FLAGS = (
    "allow_http",
    "allow_invalid_certificates",
    "http1_only",
    "http2_only",
    "randomize_addresses",
)
_CLIENT_TEXTS = (
    "connect_timeout",
    "timeout",
    "read_timeout",
    "proxy_url",
    "proxy_ca_certificate",
    "proxy_excludes",
)


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload of an object.

    Attributes:
        path: Path of the object below the URL.
        token: Identity of the upload, stored in the metadata of the object.
        writer: Writer of obstore.
    """

    path: str
    token: str
    writer: WritableFile


@dataclass(slots=True)
class Bucket:
    """Client of an object store for the objects below a URL. It is a `RangeReader`.

    Attributes:
        url: Bucket and key prefix.
        retries: Retries by obstore of the parts of uploads and of conditional writes, without reports. Only obstore
            can repeat a part.
        retry_policy: Time-out and reported retries of all other requests.
        has_conditions: Whether the store has conditional writes. False after the first refused one.
    """

    url: ObjectStoreUrl
    retries: int = 0
    retry_policy: RetryPolicy = field(default=DEFAULT_RETRY_POLICY, compare=False)
    # Clients of obstore by number of retries and kind of limits, connected on first use.
    connections: dict[tuple[int, bool], Any] = field(
        default_factory=dict, repr=False, compare=False
    )
    has_conditions: bool = field(default=True, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[Bucket], tuple[ObjectStoreUrl, int, RetryPolicy]]:
        """Pickle without the connection."""
        return Bucket, (self.url, self.retries, self.retry_policy)

    @property
    def name(self) -> str:
        """The URL, for messages."""
        return str(self.url)

    @property
    def store(self) -> ObjectStore:
        """The client for requests that `retry_call` or `read_range` repeats, with limits of the time to answer."""
        return self._connected(0, is_write=False)

    @property
    def write_store(self) -> ObjectStore:
        """The client for requests with a long body that `retry_call` repeats."""
        return self._connected(0, is_write=True)

    @property
    def upload_store(self) -> ObjectStore:
        """The client for requests that obstore repeats."""
        return self._connected(self.retries, is_write=self.retries > 0)

    def _connected(self, retries: int, *, is_write: bool) -> ObjectStore:
        kind = (retries, is_write)
        if kind not in self.connections:
            if find_spec("obstore") is None:
                hint = "`pip install 'prepcli[cloud]'`"
                raise PrepError(f"cannot reach {self.url}", "obstore is not installed", hint)
            with self.translate_errors("reach"):
                self.connections[kind] = _connect(self.url, self.retry_policy.timeout_s, *kind)
        return self.connections[kind]

    def list_files(self) -> tuple[RemoteFile, ...]:
        """List all objects below the URL except locks, sorted by their path from there."""
        store = self.store
        with self.translate_errors("list"):
            files = self.retry_call(lambda: self._list_objects(store))
        return tuple(sorted(files, key=lambda file: file.path))

    def list_folder_files(self) -> tuple[RemoteFile, ...]:
        """List the objects directly in the folder of the URL, sorted by their names."""
        store = self.store
        limit_s = MAX_WRITE_TIMEOUTS * self.retry_policy.timeout_s
        prefix = self.url.path or None
        with self.translate_errors("list"):
            listed = self.retry_call(
                lambda: call_with_timeout(lambda: store.list_with_delimiter(prefix), limit_s)
            )
        files = self._remote_files(listed["objects"])
        self._check_count(files)
        return tuple(sorted(files, key=lambda file: file.path))

    def find_file(self, path: str) -> RemoteFile | None:
        """Return an object below the URL, or None if it does not exist."""
        with self.translate_errors("read"):
            answer = self._head(path)
        return None if answer is None else _remote_file(path, answer.meta)

    def _head(self, path: str) -> GetResult | None:
        """Return the metadata of an object, or None if it does not exist. Raises the errors of obstore."""
        from obstore import exceptions

        key = self.url.key(path)
        limit_s = WRITE_TIMEOUT_FACTOR * self.retry_policy.timeout_s
        store = self.store
        try:
            return self.retry_call(
                lambda: call_with_timeout(lambda: store.get(key, options={"head": True}), limit_s)
            )
        except (exceptions.NotFoundError, FileNotFoundError):
            return None

    def _list_objects(self, store: ObjectStore) -> list[RemoteFile]:
        """List all objects, with a time limit for each page."""
        files = list[RemoteFile]()
        pages = iter(store.list(self.url.path or None, chunk_size=1000))
        limit_s = WRITE_TIMEOUT_FACTOR * self.retry_policy.timeout_s
        while page := call_with_timeout(lambda: next(pages, None), limit_s):
            files += self._remote_files(page)
            self._check_count(files)
        return files

    def _remote_files(self, page: Iterable[ObjectMeta]) -> list[RemoteFile]:
        """Return the objects of a listing except locks, with their paths from the URL."""
        files: list[RemoteFile] = []
        for metadata in page:
            file = _remote_file(metadata["path"].removeprefix(self.url.key("")), metadata)
            if not file.is_lock:
                files.append(file)
        return files

    def _check_count(self, files: Sequence[RemoteFile]) -> None:
        if len(files) > MAX_OBJECTS:
            why = f"there are more than {MAX_OBJECTS:,} objects below it"
            what = f"{self.name} is not a checkpoint"
            raise PrepError(what, why, "name the folder of a checkpoint")

    def retry_call(self, call: Callable[[], T]) -> T:
        """Call a function. Repeat it while the store does not answer or is busy. Raises the errors of obstore."""
        from obstore import exceptions

        tries = FailedTries(self.retry_policy)
        while True:
            began_s = time.monotonic()
            try:
                return call()
            except (exceptions.BaseError, OSError) as error:
                spent_s = time.monotonic() - began_s
                is_answer = status_of(error) in PERMANENT_STATUSES
                if is_answer or not tries.wait_for_next(self._failure_text(error), spent_s):
                    raise

    def _failure_text(self, error: BaseException) -> str:
        """Describe a failed request: the HTTP status, the silent bucket, or obstore's message."""
        # After its own retries, obstore names its `retry_timeout` next to the status.
        status = status_of(error)
        if status:
            return f"HTTP {status} from {self.name}"
        if _is_timeout(error):
            return f"no answer from {self.name} for {self.retry_policy.timeout_s:g} s"
        return redacted_error_text(error)

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        """Make one request. See `RangeReader.read`."""
        from obstore import exceptions

        etag = file.digest.removeprefix("etag:")
        options: Any = {"range": (offset, offset + into.size)}
        # A weak ETag (W/"...") never matches in If-Match: RFC 9110, section 13.1.1.
        if etag.startswith('"'):
            options["if_match"] = etag
        try:
            limit_s = (WRITE_TIMEOUT_FACTOR + 1) * self.retry_policy.timeout_s
            return call_with_timeout(lambda: self._get_range(file, options, offset, into), limit_s)
        except exceptions.PreconditionError as error:
            raise file_changed_error(self, file, f"its ETag is no longer {etag}") from error
        except (exceptions.NotFoundError, FileNotFoundError) as error:
            raise file_changed_error(self, file, "it no longer exists") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise self.request_error("read", error) from error
        except (exceptions.BaseError, OSError) as error:
            raise RetryableError(self._failure_text(error)) from error

    def _get_range(self, file: RemoteFile, options: Any, offset: int, into: ByteArray) -> int:
        from obstore import exceptions

        result = self.store.get(self.url.key(file.path), options=options)
        if result.meta["size"] != file.size:
            raise file_changed_error(
                self, file, f"it had {file.size:,} bytes, now it has {result.meta['size']:,}"
            )
        if result.range[0] != offset:
            raise RetryableError("the server sends another range than the requested one")
        # `min_chunk_size` joins small network reads, so that each pass of the loop copies at least
        # 64 KiB.
        return receive_body(
            result.stream(min_chunk_size=64 << 10),
            into,
            lambda error: isinstance(error, exceptions.BaseError | OSError),
        )

    def download(self, file: RemoteFile, path: Path) -> None:
        """Replace a local file by the content of an object of any size, in bounded memory."""
        try:
            with replacing_file(path) as local_file:
                for offset in range(0, file.size, DOWNLOAD_PIECE_NBYTES):
                    piece = np.empty(min(DOWNLOAD_PIECE_NBYTES, file.size - offset), np.uint8)
                    read_range(self, file, offset=offset, into=piece)
                    local_file.write(piece.data)
        except OSError as error:
            raise io_error(path, error) from error

    def write(
        self, path: str, file: Path, *, on_written: Callable[[int], object] = lambda nbytes: None
    ) -> RemoteFile:
        """Upload a file. The object appears under its name only when it is complete.

        Returns:
            The object, as the store lists it.
        """
        with self.translate_errors("write"), file.open("rb") as stream:
            pieces = iter(partial(stream.read, WRITE_NBYTES), b"")
            return self.write_pieces(path, pieces, size=file.stat().st_size, on_written=on_written)

    def write_pieces(
        self,
        path: str,
        pieces: Iterable[bytes | memoryview],
        *,
        size: int,
        parts_in_flight: int = 2,
        on_written: Callable[[int], object] = lambda nbytes: None,
    ) -> RemoteFile:
        """Upload the concatenation of pieces. See `write`.

        Args:
            path: Path of the object below the URL.
            pieces: The bytes, in order. The memory of a piece must not change later.
            size: Number of bytes.
            parts_in_flight: Number of parts in flight at the same time.
            on_written: Called with the bytes of each write.
        """
        upload = self.open_upload(path, size, parts_in_flight)
        for data in _join_pieces(pieces):
            with self.translate_errors("write"):
                self.call_with_timeout(partial(upload.writer.write, data))
            on_written(len(data))
        written = self.complete_upload(upload)
        if written is None or written.size != size:
            raise self.incomplete_error(path, written, size)
        return written

    def incomplete_error(self, path: str, written: RemoteFile | None, size: int) -> PrepError:
        """Return the error for an object of another size than its upload."""
        stored_nbytes = 0 if written is None else written.size
        why = f"the object has {stored_nbytes:,} bytes, not {size:,}"
        return PrepError(f"the upload of {path} to {self.name} is incomplete", why, RESUME_HINT)

    def open_upload(self, path: str, size: int, parts_in_flight: int) -> Upload:
        """Open an upload, in parts if the object is larger than one. See `complete_upload`."""
        import obstore

        token = secrets.token_hex(8)
        with self.translate_errors("write"):
            # Not the writer's `with`: it would complete the object after an error.
            writer = obstore.open_writer(
                self.upload_store,
                self.url.key(path),
                attributes={TOKEN_KEY: token},
                buffer_size=part_nbytes(size),
                max_concurrency=parts_in_flight,
            )
        return Upload(path, token, writer)

    def complete_upload(self, upload: Upload) -> RemoteFile | None:
        """Complete an upload. Return the object, or None if the store has none."""
        from obstore import exceptions

        with self.translate_errors("write"):
            try:
                self.call_with_timeout(upload.writer.close)
            except (exceptions.BaseError, OSError):
                # The answer to the completion may be lost. The store then does not know the upload any more
                # when obstore asks again. An object of another upload has another token.
                answer = self._head(upload.path)
                attributes = {} if answer is None else cast(Mapping[str, str], answer.attributes)
                if attributes.get(TOKEN_KEY) != upload.token:
                    raise
        return self.find_file(upload.path)

    def delete(self, path: str) -> None:
        """Delete an object, unless it is gone already."""
        from obstore import exceptions

        with self.translate_errors("write"), suppress(FileNotFoundError, exceptions.NotFoundError):
            self.retry_call(
                lambda: self.call_with_timeout(lambda: self.store.delete(self.url.key(path)))
            )

    def delete_files(self, paths: Sequence[str]) -> None:
        """Delete objects, several at a time."""
        map_in_daemon_threads(self.delete, paths, num_threads=2 * MAX_IN_FLIGHT)

    def call_with_timeout(self, call: Callable[[], T]) -> T:
        """Call a function. Note when it takes longer than one time-out.

        Raises:
            TimeoutError: It took MAX_WRITE_TIMEOUTS time-outs.
        """
        timeout_s = self.retry_policy.timeout_s

        message = f"no answer from {self.name} for {timeout_s:g} s; waiting"
        return call_with_timeout(
            call,
            MAX_WRITE_TIMEOUTS * timeout_s,
            on_late=lambda: self.retry_policy.say(message),
            late_s=timeout_s,
        )

    def request_error(self, verb: str, error: Exception) -> PrepError:
        """Return the PrepError for a permanent failure."""
        what = f"cannot {verb} {self.name}"
        status = status_of(error)
        if _is_timeout(error) or status >= 500:
            if status:
                why = redacted_error_text(error)
            else:
                why = self._failure_text(error)
            return PrepError(what, why, f"check the network, then {RESUME_HINT}")
        return PrepError(what, redacted_error_text(error), _HINTS[self.url.scheme])

    @contextmanager
    def translate_errors(self, verb: str) -> Iterator[None]:
        """Raise the errors of obstore in the block as PrepErrors."""
        from obstore import exceptions

        try:
            yield
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise self.request_error(verb, error) from error


def part_nbytes(size: int) -> int:
    """Return the size of the parts of a multipart upload of `size` bytes: 8 MiB up to 70 GiB."""
    return max(PART_NBYTES, -(-size // MAX_PARTS))


def _join_pieces(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Join short pieces and split long ones. Each takes a fraction of a time-out to send."""
    pending = list[memoryview]()
    pending_nbytes = 0
    for piece in pieces:
        data = memoryview(piece)
        for start in range(0, len(data), WRITE_NBYTES):
            part = data[start : start + WRITE_NBYTES]
            pending.append(part)
            pending_nbytes += len(part)
            if pending_nbytes >= WRITE_NBYTES:
                yield b"".join(pending)
                pending = []
                pending_nbytes = 0
    if pending:
        yield b"".join(pending)


def _remote_file(path: str, metadata: ObjectMeta) -> RemoteFile:
    version = metadata["e_tag"] or metadata["version"] or str(metadata["last_modified"])
    return RemoteFile(path, metadata["size"], f"etag:{version}")


_HINTS = {
    "gs": "`gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; GOOGLE_SKIP_SIGNATURE=true"
    " for public objects",
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION; AWS_SKIP_SIGNATURE=true for public objects",
}


def client_settings(prefix: str, environ: Mapping[str, str]) -> dict[str, bool | str]:
    """Read the connection variables of the environment, such as AWS_ALLOW_HTTP.

    obstore reads them itself, but ignores them when it gets options, as it does here.

    >>> client_settings("AWS_", {"AWS_ALLOW_HTTP": "1", "AWS_TIMEOUT": "30 s"})
    {'allow_http': True, 'timeout': '30 s'}
    """
    settings: dict[str, bool | str] = {}
    for name in _CLIENT_FLAGS:
        text = environ.get(prefix + name.upper(), "")
        if text:
            settings[name] = text.lower() in ("1", "true", "yes", "on")
    for name in _CLIENT_TEXTS:
        text = environ.get(prefix + name.upper(), "")
        if text:
            settings[name] = text
    return settings


def _connect(url: ObjectStoreUrl, timeout_s: float, retries: int, is_write: bool) -> ObjectStore:
    """Return a client of a bucket with these timeouts and retries. `is_write` for requests with a long body."""
    from obstore.store import GCSStore, S3Store

    request_limit_s = timeout_s * (MAX_WRITE_TIMEOUTS if is_write else WRITE_TIMEOUT_FACTOR)
    limits: dict[str, timedelta] = {
        "connect_timeout": timedelta(seconds=timeout_s),
        "timeout": timedelta(seconds=request_limit_s),
    }
    # For an upload, the limit would include the time to send the body.
    if not is_write:
        limits["read_timeout"] = timedelta(seconds=timeout_s)
    client = limits | client_settings("AWS_" if url.scheme == "s3" else "GOOGLE_", os.environ)
    config: Any = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=MAX_TRIES * timeout_s),
    }
    if url.scheme == "s3":
        # obstore reads AWS_ENDPOINT_URL and the other AWS_* variables itself
        return S3Store(url.bucket, client_options=cast(Any, client), retry_config=config)
    is_plain_http = os.environ.get("GOOGLE_BASE_URL", "").startswith("http://")
    return GCSStore(
        url.bucket,
        client_options=cast(Any, {"allow_http": is_plain_http} | client),
        retry_config=config,
    )


def status_of(error: BaseException) -> int:
    """Return the HTTP status in obstore's message, or 0 if it has none."""
    match = _STATUS.search(str(error)[: 4 * MAX_ERROR_CHARS])
    if match:
        return int(match[1])
    return 0


def _is_timeout(error: BaseException) -> bool:
    """Return whether a request ended with a time-out, of prep or of obstore."""
    text = redacted_error_text(error).lower()
    return isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text


def redacted_error_text(error: BaseException) -> str:
    """Return the first line of obstore's message, without its URLs."""
    # A URL may contain a signature, which grants access to the object.
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return re.sub(r"https?://\S+", "…", first_line)[:MAX_ERROR_CHARS]
