"""Checkpoints of the Hugging Face hub: download into the hub's own cache, or open for remote reads.

huggingface_hub reads its HF_* variables when it is imported, so functions import it after the variables are set.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.console.formatting import format_bytes
from prepcli.console.progress import Progress
from prepcli.errors import PrepError
from prepcli.formats.detect import (
    ADAPTER_CONFIG,
    CONFIG,
    adapter_error,
    check_config,
    quantised_files_error,
    unsupported_format_error,
)
from prepcli.formats.flax_folder import select_flax_files
from prepcli.formats.msgpack import SUFFIX as FLAX_SUFFIX
from prepcli.formats.torch_files import SUFFIXES, select_torch_files
from prepcli.remote.hub_client import (
    CHECK_ENDPOINT,
    MALFORMED_ANSWER,
    NoAnswerError,
    install_retrying_client,
)
from prepcli.remote.hub_errors import at_endpoint, is_hub_down, is_unreachable, translate_errors
from prepcli.remote.hub_ranges import HubRangeReader
from prepcli.remote.placeholders import RemoteCheckpoint, create_placeholder_folder, write_headers, write_small_file
from prepcli.remote.remote_files import RemoteFile
from prepcli.remote.retries import DEFAULT_RETRY_POLICY, RetryPolicy, map_in_daemon_threads

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SMALL_FILE_PATTERNS = (
    CONFIG,
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "spiece.model",
)
POLL_S = 0.5
MAX_DOWNLOADS = 8  # concurrent

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def download(
    hub_id: str,
    revision: str | None,
    offline: bool,
    progress: Progress,
    warn: Callable[[str], object],
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY,
) -> Path:
    """Download a model into the hub's cache, unless it is there.

    Only the files of one weight format are downloaded, safetensors if possible, with config and tokenizer. Unsupported
    formats, quantised models and a full disk are detected before the download.

    Args:
        hub_id: `OWNER/NAME`.
        revision: Branch, tag or commit; `main` by default.
        offline: Use only the cache.
        progress: Receives the downloaded bytes.
        warn: Called with a warning if the hub is unreachable and a cached model is used.
        retry_policy: Time-out and retries of each request.

    Returns:
        Folder of the snapshot in the cache, named by its commit.

    Raises:
        PrepError: The model is not supported, gated or missing; or it is not cached and the hub is unreachable.
    """
    _set_hub_variables(offline)
    install_retrying_client(retry_policy)
    from huggingface_hub.constants import HF_HUB_OFFLINE

    offline = offline or HF_HUB_OFFLINE
    with translate_errors(hub_id, revision, offline):
        if offline:
            return _cached_folder(hub_id, revision)
        try:
            info = _fetch_model_info(hub_id, revision)
        except Exception as error:
            if not is_hub_down(error):
                raise
            return _fall_back_to_cache(error, hub_id, revision, warn)
        return _download_files(hub_id, revision, info, progress)


def open_remote(
    hub_id: str, revision: str | None, offline: bool, retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY
) -> tuple[str, RemoteCheckpoint]:
    """Open a model for remote reads: only headers and small files are fetched.

    Args:
        hub_id: `OWNER/NAME`.
        revision: Branch, tag or commit; `main` by default.
        offline: Refuse, because remote reads need the network.
        retry_policy: Time-out and retries of each request.

    Returns:
        The commit and the remote checkpoint.

    Raises:
        PrepError: The model is not supported, gated or missing; or the hub is unreachable, or `offline` is set.
    """
    _set_hub_variables(offline)
    install_retrying_client(retry_policy)
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if offline or HF_HUB_OFFLINE:
        why = "--offline" if offline else f"HF_HUB_OFFLINE={os.environ.get('HF_HUB_OFFLINE', '1')}"
        raise PrepError(f"cannot stream {hub_id}", f"{why} asks for no network", "without `--stream` the cache is used")
    with translate_errors(hub_id, revision, offline):
        try:
            return _open_remote(hub_id, _fetch_model_info(hub_id, revision), retry_policy)
        except Exception as error:
            if isinstance(error, NoAnswerError) or not is_unreachable(error):
                raise
            why = f"the hub cannot be reached{at_endpoint()}"
            raise PrepError(f"cannot stream {hub_id}", why, "check the network") from error


def _open_remote(hub_id: str, info: ModelInfo, retry_policy: RetryPolicy) -> tuple[str, RemoteCheckpoint]:
    """Write the placeholder files of a listed model."""
    from huggingface_hub import constants, hf_hub_download, snapshot_download

    siblings = {file.rfilename: file for file in info.siblings or ()}
    names = files_to_download(list(siblings))
    _check_format(list(siblings), names, hub_id)
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights or info.sha is None:
        why = "`--stream` reads safetensors, and the model has none"
        raise PrepError(f"cannot stream {hub_id}", why, "without `--stream` it is downloaded first")
    if CONFIG in names:
        check_config(Path(hf_hub_download(hub_id, CONFIG, revision=info.sha)), hub_id)
    small_names = sorted({*names} - {*weights})
    cached = Path(snapshot_download(hub_id, revision=info.sha, allow_patterns=small_names))
    reader = HubRangeReader(hub_id, info.sha, constants.ENDPOINT, retry_policy)
    remote = RemoteCheckpoint(
        tuple(_remote_file(hub_id, info.sha, siblings[name]) for name in names), reader, create_placeholder_folder()
    )
    for file in remote.files:
        if file.path in small_names:
            write_small_file(remote.placeholder_folder, file, (cached / file.path).read_bytes())
    write_headers(remote.placeholder_folder, reader, [file for file in remote.files if file.path in weights])
    return info.sha, remote


def _remote_file(hub_id: str, commit: str, sibling: RepoSibling) -> RemoteFile:
    """Return a file with the hub's hash of it: SHA-256 of a large file, the git blob id of a small one."""
    if not isinstance(sibling.size, int) or not 0 <= sibling.size < 1 << 63:
        raise PrepError(f"cannot stream {hub_id}", f"the hub lists no size of {sibling.rfilename}")
    if sibling.lfs and sibling.lfs.sha256:
        digest = f"sha256:{sibling.lfs.sha256}"
    else:
        digest = f"git:{sibling.blob_id}" if sibling.blob_id else commit
    return RemoteFile(sibling.rfilename, sibling.size, digest)


def files_to_download(names: Sequence[str]) -> list[str]:
    """Select the top-level files of a repository to read or copy in a conversion.

    Weights are the numbered shards if there is an index, else model.safetensors, else all *.safetensors. PyTorch files
    are selected if there are no safetensors, Flax files if there is neither.
    """
    top = [name for name in names if "/" not in name]
    if INDEX_FILE in top:
        weights = [INDEX_FILE, *(name for name in top if _SHARD.fullmatch(name))]
    else:
        weights = [SINGLE_FILE] if SINGLE_FILE in top else [name for name in top if name.endswith(".safetensors")]
    weights = weights or non_safetensors_weights(top)
    small_names = [name for name in top if any(fnmatchcase(name, pattern) for pattern in SMALL_FILE_PATTERNS)]
    return sorted({*weights, *small_names})


def non_safetensors_weights(names: Sequence[str]) -> list[str]:
    """Select the weights of a model without safetensors: PyTorch files, else Flax files."""
    return select_torch_files(names) or select_flax_files(names)


def _set_hub_variables(offline: bool) -> None:
    """Silence the progress bars and logs of huggingface_hub, unless the user set them."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _fetch_model_info(hub_id: str, revision: str | None) -> ModelInfo:
    from huggingface_hub import HfApi

    info = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
    files = info.siblings or ()
    texts = [info.sha or "", *(file.rfilename for file in files)]
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(f.size, int | None) for f in files):
        raise PrepError(f"cannot read {hub_id}", MALFORMED_ANSWER, CHECK_ENDPOINT)
    return info


def _cached_folder(hub_id: str, revision: str | None) -> Path:
    """Return the snapshot folder of a completely cached model; raise FileNotFoundError if a file is missing."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(hub_id, revision=revision, local_files_only=True, allow_patterns=[CONFIG]))
    names = [path.name for path in folder.iterdir()]
    weights = [name for name in names if name.endswith(".safetensors")] or non_safetensors_weights(names)
    if not weights and unsupported_format_error(names, hub_id) is None:
        raise FileNotFoundError(f"{folder} has no weights")
    return folder


def _fall_back_to_cache(error: Exception, hub_id: str, revision: str | None, warn: Callable[[str], object]) -> Path:
    """Return the cached snapshot folder after an error of the hub; raise that error if there is none."""
    try:
        folder = _cached_folder(hub_id, revision)
    except FileNotFoundError:
        raise error from None
    warn(f"the hub cannot be reached: using {hub_id} as it is in the cache, commit {folder.name}")
    return folder


def _download_files(hub_id: str, revision: str | None, info: ModelInfo, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    names = files_to_download(list(sizes))
    _check_format(list(sizes), names, hub_id)
    if CONFIG in names:
        check_config(Path(hf_hub_download(hub_id, CONFIG, revision=info.sha)), hub_id)
    missing = _missing_files(hub_id, info.sha, names)
    needed_bytes = sum(sizes[name] for name in missing)
    _check_disk_space(hub_id, needed_bytes, Path(HF_HUB_CACHE))
    blobs = Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "blobs"
    with _report_progress(blobs, needed_bytes, progress):
        # Not in the library's own threads: Ctrl-C would wait for them
        map_in_daemon_threads(lambda name: hf_hub_download(hub_id, name, revision=info.sha), missing, MAX_DOWNLOADS)
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=names))


def _check_format(all_names: Sequence[str], names: Sequence[str], hub_id: str) -> None:
    if (refusal := quantised_files_error(all_names, hub_id)) is not None:
        raise refusal
    if any(name.endswith((".safetensors", *SUFFIXES, f".{FLAX_SUFFIX}")) for name in names):
        if ADAPTER_CONFIG in all_names and CONFIG not in all_names:
            raise adapter_error(hub_id)
        return
    top = sorted(name for name in all_names if "/" not in name)
    listed = ", ".join(top[:6]) or "nothing"
    raise unsupported_format_error(top, hub_id) or PrepError(f"{hub_id} holds no checkpoint", f"its files are {listed}")


def _missing_files(hub_id: str, commit: str | None, names: Sequence[str]) -> list[str]:
    from huggingface_hub import try_to_load_from_cache

    return [name for name in names if not isinstance(try_to_load_from_cache(hub_id, name, revision=commit), str)]


def _check_disk_space(hub_id: str, needed_bytes: int, cache: Path) -> None:
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        why = f"needs {format_bytes(needed_bytes)}, {cache} has {format_bytes(free_bytes)} free"
        raise PrepError(f"not enough room for {hub_id}", why, "set HF_HUB_CACHE to a folder on another disk")


@contextmanager
def _report_progress(blobs: Path, total_bytes: int, progress: Progress) -> Iterator[None]:
    """Report the growth of a cache folder as download progress, in place of the library's progress bars."""
    if not total_bytes:
        yield
        return
    initial_bytes, stop = _allocated_bytes(blobs), threading.Event()
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
    """Return the allocated bytes of a folder's files, without holes; files may vanish meanwhile."""
    allocated_bytes = 0
    for path in folder.glob("*"):
        try:
            allocated_bytes += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return allocated_bytes
