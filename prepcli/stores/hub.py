"""Repositories of the Hugging Face hub: list them, download into the hub's own cache, or open for remote reads.

huggingface_hub reads its HF_* variables when it is imported, so functions import it after the variables are set. It
compares only the sizes of downloads. A proxy, a mirror or a bad disk may change bytes without changing their number, so
new downloads are compared with the digests that the hub publishes. Errors of the library become PrepErrors with hints.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.core.errors import RERUN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.formatting import format_bytes
from prepcli.core.observer import Progress
from prepcli.stores.byte_ranges import (
    TIMEOUT_VARIABLE,
    RemoteFile,
    RetryPolicy,
    map_in_daemon_threads,
)
from prepcli.stores.files import io_error, open_regular_file, read_bytes
from prepcli.stores.hub_client import (
    CHECK_ENDPOINT,
    HTTP_LIBRARIES,
    MALFORMED_ANSWER,
    HubRangeReader,
    NoAnswerError,
    install_retrying_client,
    is_malformed_answer,
)
from prepcli.stores.paths import AnyPath, StoreListing, StorePath

if TYPE_CHECKING:
    from hashlib import _Hash

    from huggingface_hub.hf_api import RepoSibling

SHA256 = "sha256:"
# SHA-1 of a small file with git's header, e.g. `blob 12\0` and 12 bytes.
GIT_BLOB = "git:"
PIECE_NBYTES = 4 << 20
# huggingface_hub 1.x has no exception type for this error.
WRONG_SIZE = "Consistency check failed"
TOKEN_HINT = "`hf auth login`, or set HF_TOKEN"
POLL_S = 0.5
MAX_DOWNLOADS = 8  # concurrent downloads


def check_download(path: Path, digest: str, display_name: str) -> None:
    """Compare a downloaded file with its published digest, and delete it if they differ.

    Args:
        path: The file in the hub's cache, usually a link to its content.
        digest: `sha256:HEX` or `git:HEX`. Other texts are not digests of content: the file is not read.
        display_name: Name of the repository, for the message.
    """
    for prefix, start in _HASHES.items():
        if not digest.startswith(prefix):
            continue
        computed = _hash_file(path, start(path.stat().st_size))
        if computed != digest.removeprefix(prefix):
            # The next run would find the file in the cache, and would not download or check it.
            blob = path.resolve()
            path.unlink(missing_ok=True)
            # On file systems without links the snapshot holds the content itself.
            with suppress(FileNotFoundError):
                blob.unlink()
            why = f"the hub lists {digest}, the downloaded bytes have {prefix}{computed}"
            what = f"{path.name} of {display_name} is damaged"
            raise DamagedError(what, why, f"{RERUN_HINT}: the file is downloaded again")


def sha256_of_file(path: AnyPath) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Raise PrepError if it cannot be read."""
    try:
        return _hash_file(path, hashlib.sha256())
    except OSError as error:
        raise io_error(path, error) from error


_HASHES: dict[str, Callable[[int], _Hash]] = {
    SHA256: lambda _: hashlib.sha256(),
    # The header of a blob in git's object format
    GIT_BLOB: lambda nbytes: hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False),
}


def _hash_file(path: AnyPath, content_hash: _Hash) -> str:
    """Hash a file in bounded memory, and return the hexadecimal digest."""
    with open_regular_file(path, buffering=0) as stream:
        while piece := stream.read(PIECE_NBYTES):
            content_hash.update(piece)
    return content_hash.hexdigest()


@contextmanager
def translate_errors(
    hub_id: str,
    revision: str | None,
    *,
    offline: bool = False,
    is_streamed: bool = False,
    repo_type: str = "model",
) -> Iterator[None]:
    """Convert errors of huggingface_hub in the block to PrepErrors. Other errors are raised unchanged.

    Args:
        hub_id: `OWNER/NAME`.
        revision: The requested revision.
        offline: Whether only the cache is used.
        is_streamed: Whether the model is read remotely. The cache cannot replace the hub then.
        repo_type: `model` or `dataset`.
    """
    try:
        yield
    except PrepError:
        raise
    except Exception as error:
        if is_streamed and is_unreachable(error) and not isinstance(error, NoAnswerError):
            why = f"the hub cannot be reached{at_endpoint()}"
            raise PrepError(f"cannot stream {hub_id}", why, "check the network") from error
        translated = _to_prep_error(error, hub_id, revision, offline=offline, repo_type=repo_type)
        if translated is None:
            raise
        raise translated from error


def _to_prep_error(
    error: Exception, hub_id: str, revision: str | None, *, offline: bool, repo_type: str
) -> PrepError | None:
    """Return the PrepError for an error of huggingface_hub, or None for other errors."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RevisionNotFoundError,
    )

    what = f"cannot read {hub_id}"
    page = page_url(hub_id, repo_type)
    if isinstance(error, NoAnswerError):
        if error.status:
            return _status_error(what, error.status, repo_type, page=page, is_gated=False)
        why = f"{error}, and the {repo_type} is not in the cache"
        hint = (
            f"check the network, or wait longer: {TIMEOUT_VARIABLE}=60 sets the seconds per answer"
        )
        return PrepError(what, why, hint)
    if isinstance(error, RevisionNotFoundError):
        return PrepError(
            f"{hub_id} has no revision `{revision or 'main'}`",
            "HTTP 404 from the hub",
            "see its page for revisions",
        )
    if isinstance(error, HfHubHTTPError):
        is_gated = isinstance(error, GatedRepoError)
        return _status_error(
            what, error.response.status_code, repo_type, page=page, is_gated=is_gated
        )
    if isinstance(error, HFValidationError):
        return PrepError(what, str(error), "a hub id has the form OWNER/NAME")
    if is_malformed_answer(error):
        return PrepError(what, MALFORMED_ANSWER, CHECK_ENDPOINT)
    if type(error).__name__ == "TooManyRedirects":
        return PrepError(
            what, f"the hub answers with a redirect loop{at_endpoint()}", CHECK_ENDPOINT
        )
    if isinstance(error, OSError) and WRONG_SIZE in str(error):
        why = "a file has a different number of bytes than the hub announced"
        return PrepError(what, why, "try again; a proxy may have changed the answer")
    # The library's errors about the cache are subclasses.
    is_missing = isinstance(error, FileNotFoundError)
    if is_missing and offline:
        variable = os.environ.get("HF_HUB_OFFLINE", "1")
        why = f"no such folder here, not in the cache and HF_HUB_OFFLINE={variable}"
        return PrepError(what, why, "check the name, or run once with network")
    if is_missing or is_unreachable(error):
        why = f"the hub cannot be reached{at_endpoint()}, and the {repo_type} is not in the cache"
        return PrepError(what, why, "check the network, or name a local folder")
    return None


def page_url(hub_id: str, repo_type: str = "model") -> str:
    """Return the address of a repository's page, where access to it is requested."""
    from huggingface_hub.constants import ENDPOINT

    return f"{ENDPOINT}/datasets/{hub_id}" if repo_type == "dataset" else f"{ENDPOINT}/{hub_id}"


def at_endpoint() -> str:
    """Return the address of the hub for messages, if it is not the default one."""
    endpoint = os.environ.get("HF_ENDPOINT")
    return f" at HF_ENDPOINT={endpoint}" if endpoint else ""


def _status_error(
    what: str, status: int, repo_type: str, *, page: str, is_gated: bool
) -> PrepError:
    """Return the PrepError for an HTTP status of the hub."""
    if is_gated:
        why = f"HTTP {status} from the hub: access must be granted to your account"
        return PrepError(what, why, f"accept its licence at {page}, then {TOKEN_HINT}")
    # The hub does not tell a private repository from a missing one to a client without access.
    if status in (401, 403):
        why = f"HTTP {status} from the hub: it is private, or there is no such {repo_type}"
        return PrepError(what, why, f"check {page}, then {TOKEN_HINT}")
    if status == 404:
        why = f"HTTP 404 from the hub: there is no such {repo_type}"
        if repo_type == "model":
            why = f"not a folder here, and {why}"
        return PrepError(what, why, "check the spelling")
    if _is_server_trouble(status):
        return PrepError(
            what,
            f"HTTP {status} from the hub",
            "try again later; a download continues where it stopped",
        )
    return PrepError(what, f"HTTP {status} from the hub", f"check {page}")


def is_unreachable(error: Exception) -> bool:
    """Return whether no hub answered, given an error."""
    from huggingface_hub.errors import HfHubHTTPError

    from_library = type(error).__module__.partition(".")[0] in HTTP_LIBRARIES
    return (
        from_library or isinstance(error, ConnectionError | TimeoutError | NoAnswerError)
    ) and not isinstance(error, HfHubHTTPError)


def is_hub_down(error: Exception) -> bool:
    """Return whether the hub is unreachable, or answers with a server error."""
    from huggingface_hub.errors import HfHubHTTPError

    has_trouble = isinstance(error, HfHubHTTPError) and _is_server_trouble(
        error.response.status_code
    )
    return has_trouble or is_unreachable(error)


def _is_server_trouble(status: int) -> bool:
    return status == 429 or status >= 500


@dataclass(frozen=True, slots=True)
class HubListing:
    """The listed files of one revision of a repository."""

    hub_id: str
    revision: str | None  # as requested, None for `main`
    commit: str | None
    siblings: Mapping[str, RepoSibling]
    retry_policy: RetryPolicy
    repo_type: str = "model"

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Download a small file into the hub's cache, and return bytes of it."""
        return read_bytes(self.download_file(name), start, stop - start)

    def download(self, names: Sequence[str], progress: Progress) -> Path:
        """Download files into the hub's cache, unless they are there.

        Returns:
            Folder of the snapshot in the cache, named by its commit.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.file_download import repo_folder_name

        missing = _missing_files(self, names)
        needed_bytes = sum(self.siblings[name].size or 0 for name in missing)
        _check_disk_space(self.hub_id, needed_bytes, Path(HF_HUB_CACHE))
        blobs = (
            Path(HF_HUB_CACHE)
            / repo_folder_name(repo_id=self.hub_id, repo_type=self.repo_type)
            / "blobs"
        )
        with _report_progress(blobs, needed_bytes, progress):
            # Not in the library's own threads: Ctrl-C would wait for them
            map_in_daemon_threads(self._download_missing, missing, num_threads=MAX_DOWNLOADS)
            return Path(
                snapshot_download(
                    self.hub_id,
                    repo_type=self.repo_type,
                    revision=self.revision,
                    allow_patterns=[*names],
                )
            )

    def download_file(self, name: str) -> Path:
        """Download a file of the listed commit into the hub's cache, unless it is there, and return its path."""
        from huggingface_hub.constants import HF_HUB_CACHE

        if not _missing_files(self, [name]):
            return self._download_unchecked(name)
        _check_disk_space(self.hub_id, self.siblings[name].size or 0, Path(HF_HUB_CACHE))
        return self._download_missing(name)

    def _download_missing(self, name: str) -> Path:
        """Download a file and compare its bytes with the hub's digest of it.

        Only new downloads are compared: hashing the whole cache on each start would read every weight once more.
        """
        path = self._download_unchecked(name)
        check_download(path, self._digest(name), self.hub_id)
        return path

    def _download_unchecked(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        return Path(
            hf_hub_download(self.hub_id, name, repo_type=self.repo_type, revision=self.commit)
        )

    def open_remote(self, names: Iterable[str]) -> StorePath:
        """Return the folder of some files of the listed commit, to read them remotely.

        Small files are fetched whole, through the hub's cache.
        """
        from huggingface_hub import constants

        assert self.commit is not None
        reader = HubRangeReader(self.hub_id, self.commit, constants.ENDPOINT, self.retry_policy)
        files = [self.remote_file(name) for name in sorted(names)]
        return StoreListing(self.hub_id, reader, files, self._fetch_small_file).root

    def _fetch_small_file(self, name: str) -> Path:
        """Download a file of a streamed model. See `download_file`."""
        with translate_errors(self.hub_id, self.revision, is_streamed=True):
            return self.download_file(name)

    def remote_file(self, name: str) -> RemoteFile:
        """Return a file with the hub's hash of it: SHA-256 of a large file, the git blob id of a small one."""
        sibling = self.siblings[name]
        if not isinstance(sibling.size, int) or not 0 <= sibling.size < 1 << 63:
            why = f"the hub lists no size of {name}"
            hint = text("without {} it is downloaded first", Option("stream", True))
            raise PrepError(f"cannot stream {self.hub_id}", why, hint)
        return RemoteFile(name, sibling.size, self._digest(name))

    def _digest(self, name: str) -> str:
        """Return the hub's digest of a file, or the commit if the hub lists none."""
        sibling = self.siblings[name]
        if sibling.lfs and sibling.lfs.sha256:
            return f"{SHA256}{sibling.lfs.sha256}"
        if sibling.blob_id:
            return f"{GIT_BLOB}{sibling.blob_id}"
        return str(self.commit)


def prepare_hub(offline: bool, retry_policy: RetryPolicy) -> bool:
    """Set up huggingface_hub, and return whether only its cache may be used."""
    _set_hub_variables(offline)
    install_retrying_client(retry_policy)
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return offline or HF_HUB_OFFLINE


def list_repository(
    hub_id: str, revision: str | None, *, retry_policy: RetryPolicy, repo_type: str = "model"
) -> HubListing:
    """List the files of a repository. A failed request raises an error of huggingface_hub."""
    from huggingface_hub import HfApi

    api = HfApi()
    list_info = api.dataset_info if repo_type == "dataset" else api.model_info
    info = list_info(hub_id, revision=revision, files_metadata=True)
    files = info.siblings or ()
    # huggingface_hub copies the values of the answer without a check of their types.
    is_valid = isinstance(info.sha, str | None)
    for file in files:
        is_valid = is_valid and isinstance(file.rfilename, str)
        is_valid = is_valid and isinstance(file.size, int | None)
    if not is_valid:
        raise PrepError(f"cannot read {hub_id}", MALFORMED_ANSWER, CHECK_ENDPOINT)
    return HubListing(
        hub_id,
        revision,
        info.sha,
        {file.rfilename: file for file in files},
        retry_policy,
        repo_type,
    )


def cached_snapshot(hub_id: str, revision: str | None, repo_type: str = "model") -> Path:
    """Return the snapshot folder of a revision in the cache.

    Raise FileNotFoundError if there is none.
    """
    from huggingface_hub import snapshot_download

    # A file that every user of the cache has.
    pattern = "README.md" if repo_type == "dataset" else "config.json"
    return Path(
        snapshot_download(
            hub_id,
            repo_type=repo_type,
            revision=revision,
            local_files_only=True,
            allow_patterns=[pattern],
        )
    )


def _set_hub_variables(offline: bool) -> None:
    """Silence the progress bars and logs of huggingface_hub, unless the user set them."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _missing_files(listing: HubListing, names: Sequence[str]) -> list[str]:
    from huggingface_hub import try_to_load_from_cache

    missing: list[str] = []
    for name in names:
        path = try_to_load_from_cache(
            listing.hub_id, name, revision=listing.commit, repo_type=listing.repo_type
        )
        if not isinstance(path, str):
            missing.append(name)
    return missing


def _check_disk_space(hub_id: str, needed_bytes: int, cache: Path) -> None:
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        why = f"needs {format_bytes(needed_bytes)}, {cache} has {format_bytes(free_bytes)} free"
        raise PrepError(
            f"not enough room for {hub_id}", why, "set HF_HUB_CACHE to a folder on another disk"
        )


@contextmanager
def _report_progress(blobs: Path, total_bytes: int, progress: Progress) -> Iterator[None]:
    """Report the growth of a cache folder as download progress, in place of the library's progress bars."""
    if not total_bytes:
        yield
        return
    initial_bytes = _allocated_bytes(blobs)
    stop = threading.Event()
    reported_bytes = 0

    def report(grown_bytes: int) -> None:
        nonlocal reported_bytes
        current_bytes = min(total_bytes, max(reported_bytes, grown_bytes))
        progress.advance(current_bytes - reported_bytes)
        reported_bytes = current_bytes

    def watch() -> None:
        while not stop.wait(POLL_S):
            report(_allocated_bytes(blobs) - initial_bytes)

    progress.begin("download", total_bytes)
    watcher = threading.Thread(target=watch, name="prep-download-progress", daemon=True)
    watcher.start()
    is_complete = False
    try:
        yield
        is_complete = True
    finally:
        stop.set()
        watcher.join()
        report(total_bytes if is_complete else _allocated_bytes(blobs) - initial_bytes)
        progress.end()


def _allocated_bytes(folder: Path) -> int:
    """Return the allocated bytes of a folder's files, without holes. Files may vanish meanwhile."""
    allocated_bytes = 0
    for path in folder.glob("*"):
        try:
            allocated_bytes += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return allocated_bytes
