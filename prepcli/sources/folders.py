"""The files of a checkpoint, on a disk, in a bucket or on the hub, as one protocol."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Literal, Protocol

from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.observer import NullProgress, Observer, Progress
from prepcli.formats.orbax import ITEM_MARKERS, find_item, item_metadata_file
from prepcli.formats.run_steps import RECIPE_FILE, listed_step, listed_steps
from prepcli.planning.item_storage import METADATA_FILE
from prepcli.sources.references import BucketUrl
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.object_store import Bucket
from prepcli.stores.paths import (
    COPY_HINT,
    AnyPath,
    StoreListing,
    StorePath,
    local_copy,
    path_in_folder,
)
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
class CheckpointFiles:
    """The files of a checkpoint to open.

    Attributes:
        path: Folder or file of the checkpoint, on a disk or in a store.
        commit: Commit on the hub.
        omitted: Descriptions of files and subfolders on the hub that are not in `path`, e.g. `onnx/ (weights)`.
    """

    path: AnyPath
    commit: str | None = None
    omitted: tuple[str, ...] = ()

    @property
    def is_remote(self) -> bool:
        """Whether the files are read from a server."""
        return isinstance(self.path, StorePath)


class Folder(Protocol):
    """Files of a checkpoint: a folder on a disk or in a bucket, or a repository on the hub."""

    @property
    def display_name(self) -> str:
        """Name of the checkpoint in messages."""
        ...

    def names(self) -> Sequence[str]:
        """List the files at the top, and the metadata file of each Orbax item with its path."""
        ...

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a small listed file, or fewer if the file is shorter."""
        ...

    def open_headers(self) -> AnyPath | None:
        """Return a folder with all weight files whose headers can be read, or None if there is none.

        Raises:
            PrepError: A file cannot be fetched.
        """
        ...

    def fetch(self, kind: Kind) -> CheckpointFiles:
        """Return the files from which a checkpoint of this format is opened.

        A folder is returned as it is. The files of a repository on the hub are downloaded, unless they are streamed.

        Raises:
            PrepError: This format cannot be read from here, or a file cannot be fetched.
        """
        ...


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """A folder or a single file, on a disk or in a bucket. `commit` is set for a snapshot in the hub's cache."""

    display_name: str
    path: AnyPath
    commit: str | None = None

    def names(self) -> list[str]:
        """List the names in the folder, and the metadata file of its Orbax item."""
        item = find_item(self.path)
        names = [name for name in list_folder(self.path) if name != METADATA_FILE]
        # Only the item that will be opened is listed, e.g. the one of a run's last step.
        if item is None:
            return names
        folder = path_in_folder(item, self.path) or PurePath()
        metadata_files = ITEM_MARKERS[item_metadata_file(item) or METADATA_FILE]
        return [*((folder / name).as_posix() for name in metadata_files), *names]

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a small file, or fewer if the file is shorter."""
        # The local copy of a file in a store: the opener reads it again.
        return read_bytes(local_copy(self.path / name), start, stop - start)

    def open_headers(self) -> AnyPath:
        """Return the folder itself."""
        return self.path

    def fetch(self, kind: Kind) -> CheckpointFiles:
        """Return the folder itself: its files are read where they are."""
        return CheckpointFiles(self.path, self.commit)


def open_bucket_folder(reference: BucketUrl, access: Access) -> OpenFolder:
    """List the files of a checkpoint in an object store.

    Raises:
        PrepError: The store is unreachable or has nothing there.
        UsageError: `access` excludes URLs.
    """
    name = reference.display_name
    if access.offline:
        raise usage_error(
            text("cannot read `{}` with {}", name, Option("offline", True)),
            "an object store needs the network",
            COPY_HINT,
        )
    if not access.allow_urls:
        raise usage_error(f"`{name}` is a URL", "this command does not read URLs", COPY_HINT)
    bucket = Bucket(reference.url, retry_policy=access.retry_policy)
    if files := _without_older_steps(bucket.list_files()):
        return OpenFolder(name, StoreListing(name, bucket, files).root)
    if file := _find_single_file(reference, access):
        return file
    why = "no object has this prefix"
    raise PrepError(f"{bucket.name} holds no checkpoint", why, "check the spelling")


def _find_single_file(reference: BucketUrl, access: Access) -> OpenFolder | None:
    """Return the object that a URL names, beside the other objects of its folder, or None if there is none."""
    folder, _, name = reference.url.path.rpartition("/")
    if not name:
        return None
    bucket = Bucket(replace(reference.url, path=folder), retry_policy=access.retry_policy)
    if bucket.find_file(name) is None:
        return None
    files = bucket.list_folder_files()
    return OpenFolder(reference.display_name, StoreListing(bucket.name, bucket, files).root / name)


def _without_older_steps(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Leave out all steps of a training run but the last complete one. A step is complete if it has a manifest."""
    paths = [file.path for file in files]
    steps = listed_steps(paths)
    if not steps and RECIPE_FILE not in paths:
        return list(files)
    # A step without a manifest is being written, or a kill left it. Neither may be opened as the
    # newest one. A run that has only such steps keeps its other files, and is reported as begun.
    kept_steps = (None, *steps[-1:])
    return [file for file in files if listed_step(file.path) in kept_steps]
