"""Repositories of the Hugging Face hub: list them, download into the hub's own cache, or open for remote reads.

huggingface_hub reads its HF_* variables when it is imported, so functions import it after the variables are set.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.core.errors import Option, PrepError, text
from prepcli.core.formatting import format_bytes
from prepcli.core.observer import Progress
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.hub_client import CHECK_ENDPOINT, MALFORMED_ANSWER, install_retrying_client
from prepcli.stores.hub_errors import translate_errors
from prepcli.stores.hub_ranges import HubRangeReader
from prepcli.stores.paths import StoreListing, StorePath
from prepcli.stores.published_digests import GIT_BLOB, SHA256, check_download
from prepcli.stores.reading import read_bytes
from prepcli.stores.retries import RetryPolicy, map_in_daemon_threads

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

POLL_S = 0.5
MAX_DOWNLOADS = 8  # concurrent downloads


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
        """Download a small file into the hub's cache, and return bytes of it.

        Raises:
            PrepError: The disk has not enough room, or the bytes differ from the hub's digest.
        """
        return read_bytes(self.download_file(name), start, stop - start)

    def download(self, names: Sequence[str], progress: Progress) -> Path:
        """Download files into the hub's cache, unless they are there.

        Args:
            names: The files.
            progress: Receives the downloaded bytes.

        Returns:
            Folder of the snapshot in the cache, named by its commit.

        Raises:
            PrepError: The disk has not enough room, or the bytes of a file differ from the hub's digest.
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
        """Download a file of the listed commit into the hub's cache, unless it is there, and return its path.

        Raises:
            PrepError: The disk has not enough room, or the bytes differ from the hub's digest.
        """
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
        """Return the folder of some files of the listed commit, which are read where they are.

        Small files are fetched whole, through the hub's cache.

        Raises:
            PrepError: A file has no listed size.
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
    """Set up huggingface_hub, and return whether only its cache may be used.

    Args:
        offline: Use only the cache, as HF_HUB_OFFLINE does.
        retry_policy: Time-out and retries of each request.
    """
    _set_hub_variables(offline)
    install_retrying_client(retry_policy)
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return offline or HF_HUB_OFFLINE


def list_repository(
    hub_id: str, revision: str | None, *, retry_policy: RetryPolicy, repo_type: str = "model"
) -> HubListing:
    """List the files of a repository. A failed request raises an error of huggingface_hub.

    Args:
        hub_id: `OWNER/NAME`.
        revision: Branch, tag or commit, or None for `main`.
        retry_policy: Time-out and retries of each request.
        repo_type: `model` or `dataset`.

    Raises:
        PrepError: The answer is malformed.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    if repo_type == "dataset":
        list_info = api.dataset_info
    else:
        list_info = api.model_info
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
    if repo_type == "dataset":
        pattern = "README.md"
    else:
        pattern = "config.json"
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

    def is_cached(name: str) -> bool:
        path = try_to_load_from_cache(
            listing.hub_id, name, revision=listing.commit, repo_type=listing.repo_type
        )
        return isinstance(path, str)

    return [name for name in names if not is_cached(name)]


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
