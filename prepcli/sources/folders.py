"""The files of a checkpoint, local or remote, as one protocol."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from prepcli.core.observer import Observer
from prepcli.core.progress import NullProgress, Progress
from prepcli.formats.orbax import ITEM_MARKERS, find_item, item_metadata_file
from prepcli.planning.item_storage import METADATA_FILE
from prepcli.stores.placeholders import RemoteCheckpoint, rename_in_errors
from prepcli.stores.reading import list_folder, read_bytes
from prepcli.stores.retries import DEFAULT_RETRY_POLICY, RetryPolicy, retry_policy_from_env

Kind = Literal["safetensors", "orbax", "torch", "meta", "dcp", "flax", "easylm", "adapter", "gguf"]


@dataclass(frozen=True, slots=True)
class Access:
    """Settings for reading remote checkpoints.

    Attributes:
        offline: Use only local files and the hub's cache.
        stream: Read tensors of a hub model remotely instead of downloading it.
        allow_urls: Accept object store URLs. Their tensors are read remotely.
        allow_adapters: Accept adapters of PEFT. They are not complete models.
        allow_quantized: Accept models with quantised weights.
        allow_gguf: Accept GGUF files.
        progress: Receives the progress of a download.
        warn: Called with a warning if the hub is unreachable and a cached model is used.
        note: Called with a note if settings or tensors of the model are ignored.
        retry_policy: Time-out and retries of each request.
        copied_files: Name patterns of further side files to fetch.
        strict: Refuse tensors that the index does not name.
    """

    offline: bool = False
    stream: bool = False
    allow_urls: bool = False
    allow_adapters: bool = False
    allow_quantized: bool = False
    allow_gguf: bool = False
    progress: Progress = field(default_factory=NullProgress)
    warn: Callable[[str], object] = str
    note: Callable[[str], object] = str
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY
    copied_files: tuple[str, ...] = ()
    strict: bool = False


DEFAULT_ACCESS = Access()


def make_access(
    observer: Observer, *, offline: bool, stream: bool = False, allow_urls: bool = False
) -> Access:
    """Return the access to remote checkpoints, with the time-outs that the environment sets."""
    policy = retry_policy_from_env(os.environ, observer.note)
    return Access(
        offline,
        stream,
        allow_urls,
        progress=observer.progress(),
        warn=observer.warn,
        note=observer.note,
        retry_policy=policy,
    )


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Local files of a checkpoint to open.

    Attributes:
        path: Folder or file of the checkpoint. The folder of placeholder files if it is read remotely.
        remote: Remote files that the tensors are read from. None if they are in `path`.
        commit: Commit on the hub.
        omitted: Descriptions of remote files and subfolders that are not in `path`, e.g. `onnx/ (weights)`.
    """

    path: Path
    remote: RemoteCheckpoint | None = None
    commit: str | None = None
    omitted: tuple[str, ...] = ()

    def rename_in_errors(self, display_name: str) -> AbstractContextManager[None]:
        """Replace the folder of placeholder files by the checkpoint's name in the PrepErrors of the block."""
        if self.remote is None:
            return nullcontext()
        return rename_in_errors(self.remote.placeholder_folder, display_name)


class Folder(Protocol):
    """Files of a checkpoint: a local folder, a repository on the hub, or objects in a bucket."""

    @property
    def display_name(self) -> str:
        """Name of the checkpoint in messages."""
        ...

    def names(self) -> Sequence[str]:
        """List the files at the top, and the metadata file of each Orbax item with its path."""
        ...

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a listed file, or fewer if the file is shorter."""
        ...

    def fetch_headers(self) -> Path | None:
        """Return a local folder with the headers of all weight files, or None if they cannot be read alone.

        A local folder is returned as it is, with weights of any format.

        Raises:
            PrepError: A header cannot be fetched.
        """
        ...

    def prepare_local_files(self, kind: Kind) -> LocalFiles:
        """Return the local files from which a checkpoint of this format is opened.

        A local folder is returned as it is. All files of a remote checkpoint are downloaded. If its tensors are read
        remotely, only the headers and small files are downloaded.

        Raises:
            PrepError: This format cannot be read from here, or a file cannot be fetched.
        """
        ...


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A local folder or a single file. `commit` is set for a snapshot in the hub's cache."""

    display_name: str
    path: Path
    commit: str | None = None

    def names(self) -> list[str]:
        """List the names in the folder, and the metadata file of its Orbax item."""
        item = find_item(self.path)
        names = [name for name in list_folder(self.path) if name != METADATA_FILE]
        # Only the item that will be opened is listed, e.g. the one of a run's last step.
        if item is None:
            return names
        folder = item.relative_to(self.path)
        metadata_files = ITEM_MARKERS[item_metadata_file(item) or METADATA_FILE]
        return [*((folder / name).as_posix() for name in metadata_files), *names]

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a file, or fewer if the file is shorter."""
        return read_bytes(self.path / name, start, stop - start)

    def fetch_headers(self) -> Path:
        """Return the folder itself."""
        return self.path

    def prepare_local_files(self, kind: Kind) -> LocalFiles:
        """Return the folder itself: local files are read where they are."""
        return LocalFiles(self.path, commit=self.commit)
