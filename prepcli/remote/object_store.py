"""Object stores, `gs://` and `s3://`, through obstore: listed, read in ranges, written object by object.

obstore finds credentials, regions and endpoints where the clouds' own tools have them: GOOGLE_* and AWS_* variables,
Google's application default credentials, what a machine in the cloud is told of itself.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from prepcli.engine.files import ByteArray
from prepcli.errors import PrepError, usage_error
from prepcli.remote.remote_files import RemoteFile, RetryableError, file_changed_error
from prepcli.remote.retries import DEFAULT_RETRY_POLICY, MAX_TRIES, WRITE_TIMEOUT_FACTOR, RetryPolicy, call_with_timeout

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

MAX_OBJECTS = 200_000  # of a checkpoint; a whole bucket is none
MAX_ERROR_CHARS = 300
MAX_WRITE_TIMEOUTS = 6  # within which obstore's own retries of a write have to succeed

T = TypeVar("T")

PERMANENT_STATUSES = {*range(400, 500)} - {408, 425, 429}

_STATUS = re.compile(r"status code: ([0-9]{3})")
_URL = re.compile(r"(gs|s3)://([a-z0-9][a-z0-9._-]{1,220})(?:/(.*))?", re.DOTALL)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class ObjectStoreUrl:
    """A place in a bucket: `path` without slashes at its ends."""

    scheme: str
    bucket: str
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}".rstrip("/")

    def key(self, path: str) -> str:
        """The name in the bucket of a file below this place."""
        return f"{self.path}/{path}" if self.path else path


def is_url(text: str) -> bool:
    """Whether a text is meant as an address, be it one that prep knows or not."""
    return _SCHEME.match(text) is not None


def parse_url(text: str) -> ObjectStoreUrl:
    """`gs://BUCKET/PATH` or `s3://BUCKET/PATH`; a usage PrepError for what is neither."""
    found = _URL.fullmatch(text.rstrip("/"))
    if found is None:
        raise usage_error(f"`{text}` is no address that prep knows", "it knows gs://BUCKET/PATH and s3://BUCKET/PATH")
    path = (found[3] or "").strip("/")
    if not path.isprintable() or {"", ".", ".."} & {*path.split("/")} - ({""} if not path else set()):
        raise usage_error(f"`{text!a}` is no address that prep knows", "its path has an empty part, or `.` or `..`")
    return ObjectStoreUrl(found[1], found[2], path)


@dataclass(slots=True)
class Bucket:
    """A place in an object store, and the connection to it, which is made when it is first needed."""

    url: ObjectStoreUrl
    retries: int = 0  # of single requests by obstore itself, which tells nobody
    retry_policy: RetryPolicy = field(default=DEFAULT_RETRY_POLICY, compare=False)
    connection: Any = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[Bucket], tuple[ObjectStoreUrl, int, RetryPolicy]]:
        return Bucket, (self.url, self.retries, self.retry_policy)

    @property
    def name(self) -> str:
        return str(self.url)

    @property
    def store(self) -> ObjectStore:
        if self.connection is None:
            _check_installed(self.url)
            with self.translate_errors("reach"):
                self.connection = _connect(self.url, self.retries, self.retry_policy.timeout_s)
        return self.connection

    def list_files(self) -> tuple[RemoteFile, ...]:
        """All objects below the place, by their path from there on, sorted. PrepError for none, or too many."""
        store = self.store
        with self.translate_errors("list"):
            found = self._repeated(lambda: self._listed(store))
        return tuple(sorted(found, key=lambda file: file.path))

    def _listed(self, store: ObjectStore) -> list[RemoteFile]:
        """List all objects; each page has to come in time."""
        found, pages = list[RemoteFile](), iter(store.list(self.url.path or None, chunk_size=1000))
        while batch := call_with_timeout(lambda: next(pages, None), WRITE_TIMEOUT_FACTOR * self.retry_policy.timeout_s):
            found += [_file(each["path"].removeprefix(self.url.key("")), each) for each in batch]
            if len(found) > MAX_OBJECTS:
                why = f"there are more than {MAX_OBJECTS:,} objects below it"
                raise PrepError(f"{self.name} is no checkpoint", why, "name the folder of one")
        return found

    def _repeated(self, ask: Callable[[], T]) -> T:
        """Ask again where the store did not answer, or was busy; the last error after a few tries."""
        from obstore import exceptions

        spent_s, tries = 0.0, 0
        while True:
            began_s, tries = time.monotonic(), tries + 1
            try:
                return ask()
            except (exceptions.BaseError, OSError) as error:
                spent_s += time.monotonic() - began_s
                if (
                    tries == MAX_TRIES
                    or spent_s >= MAX_TRIES * self.retry_policy.timeout_s
                    or _status(error) in PERMANENT_STATUSES
                ):
                    raise
                self.retry_policy.report_retry(self._failure(error), self.retry_policy.backoff_s(tries), tries)
            time.sleep(self.retry_policy.backoff_s(tries))

    def _failure(self, error: BaseException) -> str:
        """Name a failed request: its status, the bucket where nothing came in time, else what obstore says."""
        if _is_late(error):
            return f"no answer from {self.name} for {self.retry_policy.timeout_s:g} s"
        status = _status(error)
        return f"{self.name}: the store says {status}" if status else redacted_error_text(error)

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        """As `remote.Ranges` has it."""
        from obstore import exceptions

        etag = file.digest.removeprefix("etag:")
        options: Any = {"range": (offset, offset + into.size)}
        if etag.startswith('"'):
            options["if_match"] = etag
        try:
            limit_s = (WRITE_TIMEOUT_FACTOR + 1) * self.retry_policy.timeout_s
            return call_with_timeout(lambda: self._get(file, options, offset, into), limit_s)
        except exceptions.PreconditionError as error:
            raise file_changed_error(self, file, f"its ETag is not {etag} any more") from error
        except (exceptions.NotFoundError, FileNotFoundError) as error:
            raise file_changed_error(self, file, "it is not there any more") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise self.request_error("read", error) from error
        except (exceptions.BaseError, OSError) as error:
            raise RetryableError(self._failure(error)) from error

    def _get(self, file: RemoteFile, options: Any, offset: int, into: ByteArray) -> int:
        result = self.store.get(self.url.key(file.path), options=options)
        if result.meta["size"] != file.size:
            raise file_changed_error(self, file, f"it had {file.size:,} bytes, now it has {result.meta['size']:,}")
        if result.range[0] != offset:
            raise RetryableError("the server sends another range than was asked for")
        return _received(result.stream(min_chunk_size=64 << 10), into)

    def write(
        self, path: str, file: Path, part_nbytes: int, max_parts: int, on_written: Callable[[int], object]
    ) -> RemoteFile:
        """Upload a file; the object has its name only when it is whole. PrepError where that failed."""
        size = file.stat().st_size
        part = max(part_nbytes, -(-size // max_parts))
        import obstore

        with self.translate_errors("write"), file.open("rb") as stream:
            # Not its `with`: that would give a name to what an error cut short.
            writer = obstore.open_writer(self.store, self.url.key(path), buffer_size=part, max_concurrency=2)
            while data := stream.read(part_nbytes // 4):
                self._within(partial(writer.write, data))
                on_written(len(data))
            self._within(writer.close)
            found = _file(path, self._within(lambda: self.store.head(self.url.key(path))))
        if found.size != size:
            why = f"it has {found.size:,} bytes there, and {size:,} here"
            raise PrepError(f"{path} did not come whole to {self.name}", why, "run the same command again")
        return found

    def delete(self, path: str) -> None:
        """Remove an object."""
        with self.translate_errors("write"):
            self._within(lambda: self.store.delete(self.url.key(path)))

    def _within(self, call: Callable[[], T]) -> T:
        """Return the result of a call that obstore itself retries; a note once it takes longer than one time-out.

        Raises:
            TimeoutError: It took WRITE_TIMEOUTS time-outs.
        """
        timeout_s = self.retry_policy.timeout_s

        def tell() -> None:
            self.retry_policy.note(f"no answer from {self.name} for {timeout_s:g} s; waiting")

        return call_with_timeout(call, MAX_WRITE_TIMEOUTS * timeout_s, on_late=tell, late_s=timeout_s)

    def request_error(self, verb: str, error: Exception) -> PrepError:
        """The error for an answer that another try would not change."""
        what, status = f"cannot {verb} {self.name}", _status(error)
        if _is_late(error) or status >= 500:
            why = redacted_error_text(error) if status else self._failure(error)
            return PrepError(what, why, "check the network and run the same command again: what was written is kept")
        return PrepError(what, redacted_error_text(error), _HINTS[self.url.scheme])

    @contextmanager
    def translate_errors(self, verb: str) -> Iterator[None]:
        """Errors of obstore as PrepErrors."""
        from obstore import exceptions

        try:
            yield
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise self.request_error(verb, error) from error


def _file(path: str, told: ObjectMeta) -> RemoteFile:
    version = told["e_tag"] or told["version"] or str(told["last_modified"])
    return RemoteFile(path, told["size"], f"etag:{version}")


_HINTS = {
    "gs": "`gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; GOOGLE_SKIP_SIGNATURE=true"
    " for what is public",
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION; AWS_SKIP_SIGNATURE=true for what is public",
}


def _check_installed(url: ObjectStoreUrl) -> None:
    if find_spec("obstore") is None:
        raise PrepError(f"cannot reach {url}", "obstore is not installed", "`pip install 'prepcli[cloud]'`")


def _connect(url: ObjectStoreUrl, retries: int, timeout_s: float) -> ObjectStore:
    from obstore.store import GCSStore, S3Store

    whole_s = timeout_s * (MAX_WRITE_TIMEOUTS if retries else WRITE_TIMEOUT_FACTOR)
    limits: dict[str, Any] = {"connect_timeout": timedelta(seconds=timeout_s), "timeout": timedelta(seconds=whole_s)}
    if not retries:  # of an upload, the time to send the body would count too
        limits["read_timeout"] = timedelta(seconds=timeout_s)
    client = limits | _client_settings("AWS_" if url.scheme == "s3" else "GOOGLE_", os.environ)
    config: Any = {"max_retries": retries, "retry_timeout": timedelta(seconds=MAX_TRIES * timeout_s)}
    if url.scheme == "s3":
        return S3Store(
            url.bucket, client_options=cast(Any, client), retry_config=config
        )  # AWS_ENDPOINT_URL … are its own to read
    plain = os.environ.get("GOOGLE_BASE_URL", "").startswith("http://")
    return GCSStore(url.bucket, client_options=cast(Any, {"allow_http": plain} | client), retry_config=config)


def _client_settings(prefix: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the variables of the connection, as AWS_ALLOW_HTTP: options given to obstore replace all that it reads."""
    texts = {name: environ.get(prefix + name.upper(), "") for name in (*_CLIENT_FLAGS, *_CLIENT_TEXTS)}
    flags = {name: texts[name].lower() in ("1", "true", "yes", "on") for name in _CLIENT_FLAGS if texts[name]}
    return flags | {name: texts[name] for name in _CLIENT_TEXTS if texts[name]}


_CLIENT_FLAGS = ("allow_http", "allow_invalid_certificates", "http1_only", "http2_only", "randomize_addresses")
_CLIENT_TEXTS = ("connect_timeout", "timeout", "read_timeout", "proxy_url", "proxy_ca_certificate", "proxy_excludes")


def _status(error: BaseException) -> int:
    """Return the status that a store answered with; 0 where obstore's text names none."""
    found = _STATUS.search(str(error)[: 4 * MAX_ERROR_CHARS])
    return int(found[1]) if found else 0


def _is_late(error: BaseException) -> bool:
    """Return whether a request ended because of a time-out, ours or obstore's."""
    text = redacted_error_text(error).lower()
    return isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text


def _received(stream: Any, into: ByteArray) -> int:
    """The count of bytes that came before the answer ended, or was cut short."""
    from obstore import exceptions

    done = 0
    try:
        for chunk in stream:
            data = np.frombuffer(chunk, np.uint8)
            count = min(data.size, into.size - done)
            into[done : done + count] = data[:count]
            done += count
    except (exceptions.BaseError, OSError):
        if not done:
            raise
    return done


def redacted_error_text(error: BaseException) -> str:
    """The gist of what obstore says: one line, without the addresses in it."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return re.sub(r"https?://\S+", "…", first)[:MAX_ERROR_CHARS]
