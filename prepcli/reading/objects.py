"""Object stores, `gs://` and `s3://`, through obstore: listed, read in ranges, written object by object.

obstore finds credentials, regions and endpoints where the clouds' own tools have them: GOOGLE_* and AWS_* variables,
Google's application default credentials, what a machine in the cloud is told of itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prepcli.engine.files import Bytes
from prepcli.errors import PrepError, usage
from prepcli.reading.remote_files import Lost, RemoteFile, changed

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

MOST_OBJECTS = 200_000  # of a checkpoint; a whole bucket is none
MOST_TEXT = 300

_URL = re.compile(r"(gs|s3)://([a-z0-9][a-z0-9._-]{1,220})(?:/(.*))?", re.DOTALL)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Url:
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


def parse_url(text: str) -> Url:
    """`gs://BUCKET/PATH` or `s3://BUCKET/PATH`; a usage PrepError for what is neither."""
    found = _URL.fullmatch(text.rstrip("/"))
    if found is None:
        raise usage(f"`{text}` is no address that prep knows", "it knows gs://BUCKET/PATH and s3://BUCKET/PATH")
    path = (found[3] or "").strip("/")
    if not path.isprintable() or {"", ".", ".."} & {*path.split("/")} - ({""} if not path else set()):
        raise usage(f"`{text!a}` is no address that prep knows", "its path has an empty part, or `.` or `..`")
    return Url(found[1], found[2], path)


@dataclass(slots=True)
class Bucket:
    """A place in an object store, and the connection to it, which is made when it is first needed."""

    url: Url
    retries: int = 4  # of single requests by obstore itself
    made: Any = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[Bucket], tuple[Url, int]]:
        return Bucket, (self.url, self.retries)

    @property
    def name(self) -> str:
        return str(self.url)

    @property
    def store(self) -> ObjectStore:
        if self.made is None:
            _check_installed(self.url)
            with self.told("reach"):
                self.made = _connect(self.url, self.retries)
        return self.made

    def files(self) -> tuple[RemoteFile, ...]:
        """All objects below the place, by their path from there on, sorted. PrepError for none, or too many."""
        found, store = list[RemoteFile](), self.store
        with self.told("list"):
            for batch in store.list(self.url.path or None, chunk_size=1000):
                found += [_file(each["path"].removeprefix(self.url.key("")), each) for each in batch]
                if len(found) > MOST_OBJECTS:
                    why = f"there are more than {MOST_OBJECTS:,} objects below it"
                    raise PrepError(f"{self.name} is no checkpoint", why, "name the folder of one")
        return tuple(sorted(found, key=lambda file: file.path))

    def read(self, file: RemoteFile, offset: int, into: Bytes) -> int:
        """As `remote.Ranges` has it."""
        from obstore import exceptions

        etag = file.digest.removeprefix("etag:")
        options: Any = {"range": (offset, offset + into.size)}
        if etag.startswith('"'):
            options["if_match"] = etag
        try:
            result = self.store.get(self.url.key(file.path), options=options)
            if result.meta["size"] != file.size:
                raise changed(self, file, f"it had {file.size:,} bytes, now it has {result.meta['size']:,}")
            if result.range[0] != offset:
                raise Lost("the server sends another range than was asked for")
            return _received(result.stream(min_chunk_size=64 << 10), into)
        except exceptions.PreconditionError as error:
            raise changed(self, file, f"its ETag is not {etag} any more") from error
        except (exceptions.NotFoundError, FileNotFoundError) as error:
            raise changed(self, file, "it is not there any more") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise self.refused("read", error) from error
        except (exceptions.BaseError, OSError) as error:
            raise Lost(text_of(error)) from error

    def write(
        self, path: str, file: Path, part_nbytes: int, most_parts: int, told: Callable[[int], object]
    ) -> RemoteFile:
        """Upload a file; the object has its name only when it is whole. PrepError where that failed."""
        size = file.stat().st_size
        part = max(part_nbytes, -(-size // most_parts))
        import obstore

        with self.told("write"), file.open("rb") as stream:
            # Not its `with`: that would give a name to what an error cut short.
            writer = obstore.open_writer(self.store, self.url.key(path), buffer_size=part, max_concurrency=2)
            while data := stream.read(part_nbytes // 4):
                writer.write(data)
                told(len(data))
            writer.close()
            found = _file(path, self.store.head(self.url.key(path)))
        if found.size != size:
            why = f"it has {found.size:,} bytes there, and {size:,} here"
            raise PrepError(f"{path} did not come whole to {self.name}", why, "run the same command again")
        return found

    def delete(self, path: str) -> None:
        """Remove an object."""
        with self.told("write"):
            self.store.delete(self.url.key(path))

    def refused(self, verb: str, error: Exception) -> PrepError:
        """The error for an answer that another try would not change."""
        hint = _HINTS[self.url.scheme]
        return PrepError(f"cannot {verb} {self.name}", text_of(error), hint)

    @contextmanager
    def told(self, verb: str) -> Iterator[None]:
        """Errors of obstore as PrepErrors."""
        from obstore import exceptions

        try:
            yield
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise self.refused(verb, error) from error


def _file(path: str, told: ObjectMeta) -> RemoteFile:
    version = told["e_tag"] or told["version"] or str(told["last_modified"])
    return RemoteFile(path, told["size"], f"etag:{version}")


_HINTS = {
    "gs": "`gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; GOOGLE_SKIP_SIGNATURE=true"
    " for what is public",
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION; AWS_SKIP_SIGNATURE=true for what is public",
}


def _check_installed(url: Url) -> None:
    if find_spec("obstore") is None:
        raise PrepError(f"cannot reach {url}", "obstore is not installed", "`pip install 'prepcli[cloud]'`")


def _connect(url: Url, times: int) -> ObjectStore:
    from obstore.store import GCSStore, S3Store

    retries: Any = {"max_retries": times}
    if url.scheme == "s3":
        return S3Store(url.bucket, retry_config=retries)  # AWS_ENDPOINT_URL, AWS_ALLOW_HTTP … are its own to read
    plain = os.environ.get("GOOGLE_BASE_URL", "").startswith("http://")
    return GCSStore(url.bucket, client_options={"allow_http": plain}, retry_config=retries)


def _received(stream: Any, into: Bytes) -> int:
    """The count of bytes that came before the answer ended, or was cut short."""
    from obstore import exceptions

    done = 0
    try:
        for chunk in stream:
            data = np.frombuffer(chunk, np.uint8)
            count = min(data.size, into.size - done)
            into[done : done + count] = data[:count]
            done += count
    except (exceptions.BaseError, OSError) as error:
        if not done:
            raise Lost(text_of(error)) from error
    return done


def text_of(error: BaseException) -> str:
    """The gist of what obstore says: one line, without the addresses in it."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return re.sub(r"https?://\S+", "…", first)[:MOST_TEXT]
