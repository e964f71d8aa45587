"""Checkpoints of the Hugging Face hub: what a conversion needs of one, downloaded into the hub's own cache.

huggingface_hub reads its HF_* variables when it is imported, so it is imported in the functions, after they are set.
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
    is_malformed_answer,
)
from prepcli.remote.hub_ranges import HTTP_LIBRARIES, HubRangeReader
from prepcli.remote.placeholders import RemoteCheckpoint, create_placeholder_folder, write_headers, write_small_file
from prepcli.remote.remote_files import RemoteFile
from prepcli.remote.retries import DEFAULT_RETRY_POLICY, TIMEOUT_VARIABLE, RetryPolicy, map_in_daemon_threads

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
MAX_DOWNLOADS = 8  # at a time

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def download(
    hub_id: str,
    revision: str | None,
    offline: bool,
    progress: Progress,
    warn: Callable[[str], object],
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY,
) -> Path:
    """The folder in the hub's cache that holds a model, named by its commit; downloads what is not there.

    Only files of one weight format are fetched, safetensors, beside config and tokenizer. Formats that are not read,
    quantised models and a full disk are noticed before. Raises PrepError for all of this, for models that are gated,
    missing or not cached while offline, and for a hub that cannot be reached, or does not answer within `patience`.
    """
    _set_variables(offline)
    install_retrying_client(retry_policy)
    from huggingface_hub.constants import HF_HUB_OFFLINE

    offline = offline or HF_HUB_OFFLINE
    with _told(hub_id, revision, offline):
        if offline:
            return _cached(hub_id, revision)
        try:
            info = _listing(hub_id, revision)
        except Exception as error:
            if not _is_away(error):
                raise
            return _instead(error, hub_id, revision, warn)
        return _fetch(hub_id, revision, info, progress)


def open_remote(
    hub_id: str, revision: str | None, offline: bool, retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY
) -> tuple[str, RemoteCheckpoint]:
    """The commit of a model and its files, of which only headers and what is small are fetched; tensors are read from
    the hub. Raises PrepError for what `download` refuses, and while offline."""
    _set_variables(offline)
    install_retrying_client(retry_policy)
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if offline or HF_HUB_OFFLINE:
        why = "--offline" if offline else f"HF_HUB_OFFLINE={os.environ.get('HF_HUB_OFFLINE', '1')}"
        raise PrepError(f"cannot stream {hub_id}", f"{why} asks for no network", "without `--stream` the cache is used")
    with _told(hub_id, revision, offline):
        try:
            return _streamed(hub_id, _listing(hub_id, revision), retry_policy)
        except Exception as error:
            if isinstance(error, NoAnswerError) or not _is_unreachable(error):
                raise
            why = f"the hub cannot be reached{_at_endpoint()}"
            raise PrepError(f"cannot stream {hub_id}", why, "check the network") from error


def _streamed(hub_id: str, info: ModelInfo, patience: RetryPolicy) -> tuple[str, RemoteCheckpoint]:
    from huggingface_hub import constants, hf_hub_download, snapshot_download

    siblings = {file.rfilename: file for file in info.siblings or ()}
    names = files_to_download(list(siblings))
    _check_format(list(siblings), names, hub_id)
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights or info.sha is None:
        why = "`--stream` reads safetensors, and it has none"
        raise PrepError(f"cannot stream {hub_id}", why, "without `--stream` it is downloaded first")
    if CONFIG in names:
        check_config(Path(hf_hub_download(hub_id, CONFIG, revision=info.sha)), hub_id)
    small = sorted({*names} - {*weights})
    cached = Path(snapshot_download(hub_id, revision=info.sha, allow_patterns=small))
    ranges = HubRangeReader(hub_id, info.sha, constants.ENDPOINT, patience)
    remote = RemoteCheckpoint(
        tuple(_remote_file(hub_id, info.sha, siblings[name]) for name in names), ranges, create_placeholder_folder()
    )
    for file in remote.files:
        if file.path in small:
            write_small_file(remote.placeholder_folder, file, (cached / file.path).read_bytes())
    write_headers(remote.placeholder_folder, ranges, [file for file in remote.files if file.path in weights])
    return info.sha, remote


def _remote_file(hub_id: str, commit: str, told: RepoSibling) -> RemoteFile:
    """A file with the hash that the hub keeps of it: SHA-256 of large ones, else what git calls it."""
    if not isinstance(told.size, int) or not 0 <= told.size < 1 << 63:
        raise PrepError(f"cannot stream {hub_id}", f"the hub does not say how large {told.rfilename} is")
    sha256 = told.lfs.sha256 if told.lfs else None
    return RemoteFile(
        told.rfilename, told.size, f"sha256:{sha256}" if sha256 else f"git:{told.blob_id}" if told.blob_id else commit
    )


def files_to_download(names: Sequence[str]) -> list[str]:
    """Of the files of a repository those that a conversion reads or copies; all lie at the top.

    Weights are the numbered shards where there is an index, else model.safetensors, else all *.safetensors, and only
    where there are none PyTorch's own, else Flax's.
    """
    top = [name for name in names if "/" not in name]
    if INDEX_FILE in top:
        weights = [INDEX_FILE, *(name for name in top if _SHARD.fullmatch(name))]
    else:
        weights = [SINGLE_FILE] if SINGLE_FILE in top else [name for name in top if name.endswith(".safetensors")]
    weights = weights or non_safetensors_weights(top)
    small = [name for name in top if any(fnmatchcase(name, pattern) for pattern in SMALL_FILE_PATTERNS)]
    return sorted({*weights, *small})


def non_safetensors_weights(names: Sequence[str]) -> list[str]:
    """The weights of a model without safetensors."""
    return select_torch_files(names) or select_flax_files(names)


def _set_variables(offline: bool) -> None:
    """prep draws its own progress and reports errors itself; what the user has set stays."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _listing(hub_id: str, revision: str | None) -> ModelInfo:
    from huggingface_hub import HfApi

    info = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
    files = info.siblings or ()
    texts = [info.sha or "", *(file.rfilename for file in files)]
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(f.size, int | None) for f in files):
        raise PrepError(f"cannot read {hub_id}", MALFORMED_ANSWER, CHECK_ENDPOINT)
    return info


def _cached(hub_id: str, revision: str | None) -> Path:
    """The folder of a model whose files are all in the cache; raises the library's FileNotFoundError if one is not."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(hub_id, revision=revision, local_files_only=True, allow_patterns=[CONFIG]))
    names = [path.name for path in folder.iterdir()]
    weights = [name for name in names if name.endswith(".safetensors")] or non_safetensors_weights(names)
    if not weights and unsupported_format_error(names, hub_id) is None:
        raise FileNotFoundError(f"{folder} has no weights")
    return folder


def _instead(error: Exception, hub_id: str, revision: str | None, warn: Callable[[str], object]) -> Path:
    """What the cache has while the hub is away; raises the error of the hub where that is nothing."""
    try:
        folder = _cached(hub_id, revision)
    except FileNotFoundError:
        raise error from None
    warn(f"the hub cannot be reached: using {hub_id} as it is in the cache, commit {folder.name}")
    return folder


def _fetch(hub_id: str, revision: str | None, info: ModelInfo, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    names = files_to_download(list(sizes))
    _check_format(list(sizes), names, hub_id)
    if CONFIG in names:
        check_config(Path(hf_hub_download(hub_id, CONFIG, revision=info.sha)), hub_id)
    missing = _missing(hub_id, info.sha, names)
    needed_bytes = sum(sizes[name] for name in missing)
    _check_room(hub_id, needed_bytes, Path(HF_HUB_CACHE))
    blobs = Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "blobs"
    with _watched(blobs, needed_bytes, progress):
        # In daemon threads, other than the library's, so that Ctrl-C does not wait for them
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
    shown = ", ".join(top[:6]) or "nothing"
    raise unsupported_format_error(top, hub_id) or PrepError(f"{hub_id} holds no checkpoint", f"its files are {shown}")


def _missing(hub_id: str, commit: str | None, names: Sequence[str]) -> list[str]:
    from huggingface_hub import try_to_load_from_cache

    return [name for name in names if not isinstance(try_to_load_from_cache(hub_id, name, revision=commit), str)]


def _check_room(hub_id: str, needed_bytes: int, cache: Path) -> None:
    there = next(path for path in (cache, *cache.parents) if path.exists())
    free_bytes = shutil.disk_usage(there).free
    if needed_bytes > free_bytes:
        why = f"needs {format_bytes(needed_bytes)}, {cache} has {format_bytes(free_bytes)} free"
        raise PrepError(f"not enough room for {hub_id}", why, "set HF_HUB_CACHE to a folder on another disk")


@contextmanager
def _watched(blobs: Path, total_bytes: int, progress: Progress) -> Iterator[None]:
    """Tell how the files in a folder of the cache grow: the library's own bars are not ours to draw."""
    if not total_bytes:
        yield
        return
    before_bytes, stop = _stored(blobs), threading.Event()
    told_bytes = 0

    def tell(grown_bytes: int) -> None:
        nonlocal told_bytes
        now_bytes = min(total_bytes, max(told_bytes, grown_bytes))
        progress.advance(now_bytes - told_bytes)
        told_bytes = now_bytes

    def watch() -> None:
        while not stop.wait(POLL_S):
            tell(_stored(blobs) - before_bytes)

    progress.begin("download", total_bytes)
    watcher = threading.Thread(target=watch, name="prep-download-progress", daemon=True)
    watcher.start()
    complete = False
    try:
        yield
        complete = True
    finally:
        stop.set()
        watcher.join()
        tell(total_bytes if complete else _stored(blobs) - before_bytes)
        progress.end()


def _stored(folder: Path) -> int:
    """Bytes that files of a folder take on disk, holes not counted, whichever are there while others come and go."""
    stored_bytes = 0
    for path in folder.glob("*"):
        try:
            stored_bytes += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return stored_bytes


@contextmanager
def _told(hub_id: str, revision: str | None, offline: bool) -> Iterator[None]:
    """Errors of the library as PrepErrors; others pass."""
    try:
        yield
    except PrepError:
        raise
    except Exception as error:
        told = _explained(error, hub_id, revision, offline)
        if told is None:
            raise
        raise told from error


def _explained(error: Exception, hub_id: str, revision: str | None, offline: bool) -> PrepError | None:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RevisionNotFoundError

    what = f"cannot read {hub_id}"
    if isinstance(error, NoAnswerError):
        return _unanswered(what, error)
    if isinstance(error, RevisionNotFoundError):
        return PrepError(
            f"{hub_id} has no revision `{revision or 'main'}`", "the hub says 404", "see its page for names"
        )
    if isinstance(error, HfHubHTTPError):
        return _refused(what, error.response.status_code, isinstance(error, GatedRepoError))
    if isinstance(error, HFValidationError):
        return PrepError(what, str(error))
    if is_malformed_answer(error):
        return PrepError(what, MALFORMED_ANSWER, CHECK_ENDPOINT)
    if type(error).__name__ == "TooManyRedirects":
        return PrepError(what, f"the hub redirects in a circle{_at_endpoint()}", CHECK_ENDPOINT)
    is_missing = isinstance(error, FileNotFoundError)  # from the cache: the library's errors are some
    if is_missing and offline:
        variable = os.environ.get("HF_HUB_OFFLINE", "1")
        return PrepError(what, f"not in the cache and HF_HUB_OFFLINE={variable}", "run once with network")
    if is_missing or _is_unreachable(error):
        why = f"the hub cannot be reached{_at_endpoint()}, and the model is not in the cache"
        return PrepError(what, why, "check the network, or name a folder that is here")
    return None


def _unanswered(what: str, error: NoAnswerError) -> PrepError:
    if error.status:
        return _refused(what, error.status, False)
    why = f"{error}, and the model is not in the cache"
    return PrepError(what, why, f"check the network, or wait longer: {TIMEOUT_VARIABLE}=60 is seconds for each answer")


def _at_endpoint() -> str:
    endpoint = os.environ.get("HF_ENDPOINT")
    return f" at HF_ENDPOINT={endpoint}" if endpoint else ""


def _refused(what: str, status: int, gated: bool) -> PrepError:
    page = "open its page, then `hf auth login`"
    if gated:
        return PrepError(what, f"the hub says {status}: access must be granted to your account", page)
    if status in (401, 403):
        return PrepError(what, f"the hub says {status}: it is private, or there is no such model", page)
    if status == 404:
        return PrepError(what, "not a folder here, and the hub says 404: there is no such model", "check the spelling")
    if _is_trouble(status):
        return PrepError(what, f"the hub says {status}", "try again later; a download goes on where it stopped")
    return PrepError(what, f"the hub says {status}")


def _is_unreachable(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError

    from_library = type(error).__module__.partition(".")[0] in HTTP_LIBRARIES
    return (from_library or isinstance(error, ConnectionError | TimeoutError | NoAnswerError)) and not isinstance(
        error, HfHubHTTPError
    )


def _is_away(error: Exception) -> bool:
    """Nobody answers, or the hub has trouble of its own."""
    from huggingface_hub.errors import HfHubHTTPError

    has_trouble = isinstance(error, HfHubHTTPError) and _is_trouble(error.response.status_code)
    return has_trouble or _is_unreachable(error)


def _is_trouble(status: int) -> bool:
    return status == 429 or status >= 500
