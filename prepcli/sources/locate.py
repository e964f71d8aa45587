"""One path from the name of a checkpoint to its format and files: parse, list, detect, fetch.

The files are on a disk, in a bucket or on the hub, with one interface: see `detect.Folder`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePath
from typing import assert_never

from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import join_names
from prepcli.core.json_values import HFConfig
from prepcli.core.observer import NullProgress, Observer, Progress
from prepcli.formats.gguf import part_names
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    RECIPE_FILE,
    item_manifest_folder,
    listed_step,
    listed_steps,
    read_manifest,
    read_manifest_of_file,
)
from prepcli.formats.model_files import index_suffix, read_weight_map, whole_file
from prepcli.formats.orbax import (
    ITEM_MARKERS,
    find_item,
    item_metadata_file,
    list_checkpoint_folders,
)
from prepcli.formats.registry import FORMATS, INDEX_FILES, Kind, select_downloads
from prepcli.planning.item_storage import METADATA_FILE
from prepcli.planning.manifest_fields import Manifest
from prepcli.quantized.formats import QUANTIZATION_FILES
from prepcli.sources.detect import (
    Detected,
    Refusal,
    apply_rules,
    detect,
    detect_file,
    detect_gguf,
    no_checkpoint_error,
    unused_quantization_note,
)
from prepcli.sources.references import (
    CONFIG,
    BucketUrl,
    HubRepo,
    LocalPath,
    RunStep,
    parse_reference,
)
from prepcli.sources.side_files import ListedFile, is_weight_file, select_side_files, unread_weights
from prepcli.sources.source import read_config
from prepcli.stores.byte_ranges import (
    DEFAULT_RETRY_POLICY,
    RetryPolicy,
    retry_policy_from_env,
)
from prepcli.stores.files import list_folder, name_fault, read_bytes
from prepcli.stores.hub import (
    HubListing,
    cached_snapshot,
    is_hub_down,
    list_repository,
    prepare_hub,
    translate_errors,
)
from prepcli.stores.object_store import Bucket
from prepcli.stores.paths import (
    COPY_HINT,
    AnyPath,
    StoreListing,
    StorePath,
    local_copy,
    path_in_folder,
)


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


# Without slots: a cached property needs the dict of the instance.
@dataclass(frozen=True)
class OpenFolder:
    """A folder or a single file of a checkpoint, on a disk or in a bucket. Its names are listed once.

    Attributes:
        display_name: Name of the checkpoint in messages.
        path: Folder or file.
        commit: Commit on the hub, if it is a model of the hub.
        omitted: Descriptions of files and subfolders on the hub that are not in `path`, e.g. `onnx/ (weights)`.
    """

    display_name: str
    path: AnyPath
    commit: str | None = None
    omitted: tuple[str, ...] = ()

    @property
    def is_remote(self) -> bool:
        """Whether the files are read from a server."""
        return isinstance(self.path, StorePath)

    @cached_property
    def listed_names(self) -> Sequence[str]:
        """Names of all files and subfolders."""
        return list_folder(self.path)

    @cached_property
    def item(self) -> AnyPath | None:
        """The Orbax item that the folder is or holds."""
        return find_item(self.path, self.listed_names)

    def names(self) -> list[str]:
        """List the names in the folder, and the metadata file of its Orbax item."""
        names = [name for name in self.listed_names if name != METADATA_FILE]
        # Only the item that will be opened is listed, e.g. the one of a run's last step.
        if self.item is None:
            return names
        folder = path_in_folder(self.item, self.path) or PurePath()
        metadata_files = ITEM_MARKERS[item_metadata_file(self.item) or METADATA_FILE]
        return [*((folder / name).as_posix() for name in metadata_files), *names]

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a small file, or fewer if the file is shorter."""
        # The local copy of a file in a store: the opener reads it again.
        return read_bytes(local_copy(self.path / name), start, stop - start)

    def checkpoint_folders(self) -> list[AnyPath]:
        """List the subfolders with checkpoints of their own."""
        return list_checkpoint_folders(self.path)

    def open_headers(self) -> AnyPath:
        """Return the folder itself."""
        return self.path

    def fetch(self, kind: Kind) -> OpenFolder:
        """Return the folder itself: its files are read where they are."""
        return self


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
    files = bucket.list_files()
    paths = [file.path for file in files]
    steps = listed_steps(paths)
    if steps or RECIPE_FILE in paths:
        # Of a training run, only the last complete step is kept: a step without a manifest is being
        # written, or a kill left it. Neither may be opened as the newest one. A run that has only such
        # steps keeps its other files, and is reported as begun.
        kept_steps = (None, *steps[-1:])
        files = [file for file in files if listed_step(file.path) in kept_steps]
    if files:
        return OpenFolder(name, StoreListing(name, bucket, files).root)
    # The URL may name one object beside the other objects of its folder.
    folder, _, file_name = reference.url.path.rpartition("/")
    if file_name:
        parent = Bucket(replace(reference.url, path=folder), retry_policy=access.retry_policy)
        if parent.find_file(file_name) is not None:
            listing = StoreListing(parent.name, parent, parent.list_folder_files())
            return OpenFolder(name, listing.root / file_name)
    why = "no object has this prefix"
    raise PrepError(f"{bucket.name} holds no checkpoint", why, "check the spelling")


SMALL_FILE_PATTERNS = (
    CONFIG,
    MANIFEST_FILE,
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "spiece.model",
    "tekken.json",
    "*processor_config.json",
    *QUANTIZATION_FILES,
)


def open_hub_folder(repo: HubRepo, access: Access) -> OpenFolder | HubFolder:
    """List the files of a model on the hub, or in the hub's cache if there is no network.

    Raises:
        PrepError: The model is gated or missing, or the hub is unreachable and the model is not in the cache.
    """
    hub_id = repo.display_name
    revision = repo.revision
    is_offline = prepare_hub(access.offline, access.retry_policy)
    if is_offline and access.stream:
        if access.offline:
            reason = text("{} disables network access", Option("offline", True))
        else:
            variable = f"HF_HUB_OFFLINE={os.environ.get('HF_HUB_OFFLINE', '1')}"
            reason = text("{} disables network access", variable)
        raise PrepError(
            f"cannot stream {hub_id}",
            reason,
            text("remove {} to read from the cache", Option("stream", True)),
        )
    with translate_errors(hub_id, revision, offline=is_offline, is_streamed=access.stream):
        if is_offline:
            return _cached_files(repo)
        try:
            listing = list_repository(hub_id, revision, retry_policy=access.retry_policy)
        except Exception as error:
            if access.stream or not is_hub_down(error):
                raise
            try:
                folder = _cached_files(repo)
            except FileNotFoundError:
                raise error from None
            access.warn(
                f"the hub cannot be reached: using {repo.display_name} as it is in the cache, commit {folder.commit}"
            )
            return folder
    return HubFolder(listing, access, repo.file)


def cached_model(repo: HubRepo, revision: str | None) -> Path:
    """Return the cached snapshot of a model, without a request to the hub."""
    try:
        return cached_snapshot(repo.display_name, revision)
    except FileNotFoundError as error:
        hint = text("{} downloads it", Option("quantized_source", repo.display_name))
        raise PrepError(f"{repo.display_name} is not in the cache of the hub", "", hint) from error


def _cached_files(repo: HubRepo) -> OpenFolder:
    """Return the cached snapshot of a model, or a file of it. Raise FileNotFoundError if there is none."""
    if not repo.file:
        path = cached_snapshot(repo.display_name, repo.revision)
        folder = OpenFolder(repo.display_name, path, commit=path.name)
        names = folder.names()
        # Another program may have cached only the tokenizer or the config of this revision. A folder of a
        # recognized but unsupported format passes too, because a later error names the format.
        if not select_downloads(names) and not isinstance(apply_rules(names)[0], Refusal):
            raise FileNotFoundError(f"{path} has no weights")
        return folder
    path = cached_snapshot(repo.display_name, repo.revision)
    if not (path / repo.file).is_file():
        raise FileNotFoundError(f"{path} has no {repo.file}")
    return OpenFolder(repo.display_name, path / repo.file, commit=path.name)


@dataclass(frozen=True, slots=True)
class HubFolder:
    """The files of a repository as a `Folder`. `fetch` downloads the model unless it is streamed.

    Attributes:
        listing: The listed files.
        access: Settings for reading them.
        file: A GGUF file to read, with its other parts. Empty for the model of the top folder.
    """

    listing: HubListing
    access: Access
    file: str = ""

    @property
    def display_name(self) -> str:
        """Return the hub id."""
        return self.listing.hub_id

    def names(self) -> list[str]:
        """List the files at the top of the repository.

        The metadata file of an Orbax item is absent, because items cannot be read from the hub.
        """
        return [name for name in self.listing.siblings if "/" not in name and name != METADATA_FILE]

    def checkpoint_folders(self) -> Sequence[AnyPath]:
        """Return none: a repository is one model."""
        return ()

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a small file, which is downloaded whole."""
        with self._translate_errors():
            return self.listing.read(name, start, stop)

    def open_headers(self) -> AnyPath | None:
        """Return the weights and settings to download, read where they are, if the hub reports a commit."""
        with self._translate_errors():
            names = self._files_to_fetch()
            if self.listing.commit is None or not select_downloads(names):
                return None
            return self.listing.open_remote(names)

    def fetch(self, kind: Kind) -> OpenFolder:
        """Download the files of one weight format, the config and the tokenizer, unless they are streamed."""
        if self.file:
            names = part_names(self.file)
            missing = [name for name in names if name not in self.listing.siblings]
            if missing:
                known = [name for name in self.listing.siblings if name.endswith(".gguf")]
                why = f"its GGUF files are {join_names(known)}" if known else "it has no GGUF file"
                hint = text(
                    "{} lists the tensors of a file", Command("inspect", "OWNER/NAME/FILE.gguf")
                )
                raise PrepError(f"{self.display_name} has no {missing[0]}", why, hint)
            if self.access.stream:
                return OpenFolder(
                    self.display_name, self._streamed_folder(names) / self.file, self.listing.commit
                )
            with self._translate_errors():
                path = self.listing.download(names, self.access.progress)
            return OpenFolder(self.display_name, path / self.file, path.name)
        with self._translate_errors():
            names = self._files_to_fetch()
        if not select_downloads(names):
            raise no_checkpoint_error(sorted(self.names()), self.display_name)
        listed: list[ListedFile] = []
        for name, sibling in self.listing.siblings.items():
            if "/" in name:
                listed.append(ListedFile(name, sibling.size or 0))
        nested = select_side_files(listed, self.access.copied_files)
        omitted = (*nested.omitted, *unread_weights(self.names(), names))
        names = [*names, *nested.copied]
        # A model's repository may have an adapter too. Only the adapter itself needs these settings,
        # and a conversion would copy them next to its output.
        settings = FORMATS[kind].settings_files
        names += [name for name in settings if name in self.listing.siblings]
        names = [*dict.fromkeys(names)]
        with self._translate_errors():
            if self.access.stream:
                return OpenFolder(
                    self.display_name, self._streamed_folder(names), self.listing.commit, omitted
                )
            path = self.listing.download(names, self.access.progress)
        return OpenFolder(self.display_name, path, path.name, omitted)

    def _files_to_fetch(self) -> list[str]:
        """Return the files of one weight format, the config and the side files. An index decides which weights."""
        names = files_to_download(self.names(), self.access.copied_files)
        for index in INDEX_FILES:
            if index in names:
                weight_map = read_weight_map(self.listing.download_file(index))
                indexed = {*weight_map.values()}
                if whole_file(index, weight_map) in names:
                    indexed = {whole_file(index, weight_map)}
                suffix = index_suffix(index)
                names = [name for name in names if not name.endswith(suffix) or name in indexed]
        return names

    def _streamed_folder(self, names: Iterable[str]) -> StorePath:
        """Return the folder of files that are read where they are."""
        # Requests for ranges name the commit: between two of them, a branch could move to weights of
        # another version.
        if self.listing.commit is None:
            hint = text("without {} it is downloaded first", Option("stream", True))
            why = "the hub did not report a commit"
            raise PrepError(f"cannot stream {self.display_name}", why, hint)
        return self.listing.open_remote(names)

    def _translate_errors(self) -> AbstractContextManager[None]:
        return translate_errors(
            self.display_name, self.listing.revision, is_streamed=self.access.stream
        )


def files_to_download(names: Sequence[str], patterns: Sequence[str] = ()) -> list[str]:
    """Select the top-level files of a repository to read or copy in a conversion.

    With an index, weights are all files that it may name. `HubFolder` reads the index, and leaves the others. Without
    an index, weights are model.safetensors, else all *.safetensors. PyTorch files are selected if there are no
    safetensors, Flax files if there is neither. `patterns` select further files.
    """
    top = [name for name in names if "/" not in name]
    selected = set(select_downloads(top))
    side_files = [name for name in top if not is_weight_file(name)]
    for pattern in (*SMALL_FILE_PATTERNS, *patterns):
        selected.update(name for name in side_files if fnmatchcase(name, pattern))
    return sorted(selected)


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """A checkpoint of a known format, with the files to open it from.

    Attributes:
        display_name: Name of the checkpoint in messages.
        model_name: Name that outputs are called after, without a folder.
        kind: Format of the checkpoint.
        files: The files from which the checkpoint is opened.
        manifest: Manifest of an output of prep, else None.
        part: EasyLM part in the name, as `params` in `params::PATH`.
        access: How the checkpoint was accessed. Opening it gives notes to the same receiver.
        item: The Orbax item that the path is or holds, if any.
        may_be_quantized: Whether settings of a quantisation tool may be among the files.
        config: Content of the config.json in the folder of the files, if it was read to detect the format.
    """

    display_name: str
    model_name: str
    kind: Kind
    files: OpenFolder
    manifest: Manifest | None
    part: str = ""
    access: Access = DEFAULT_ACCESS
    item: AnyPath | None = None
    may_be_quantized: bool = True
    config: HFConfig | None = None

    @property
    def manifest_folder(self) -> AnyPath:
        """Folder of the manifest, if there is one: of the item, its step or export, or of the files."""
        if self.item is not None:
            return item_manifest_folder(self.item)
        path = self.files.path
        # `OUTPUT/flax_model.msgpack` given by its own path: its manifest is in the same folder.
        return path.parent if path.is_file() else path

    @property
    def config_in_folder(self) -> HFConfig:
        """Content of the config.json in the folder of the files, empty if there is none."""
        path = self.files.path / CONFIG
        return self.read_config(path) if path.is_file() else {}

    def read_config(self, path: AnyPath) -> HFConfig:
        """Return the content of a config.json. The one that detection has read is not read again."""
        if self.config is not None and path == self.files.path / CONFIG:
            return self.config
        return read_config(path)


def locate(
    name: str,
    revision: str | None = None,
    *,
    step: int | str | None = None,
    cwd: Path | None = None,
    access: Access = DEFAULT_ACCESS,
) -> LocatedCheckpoint:
    """Resolve the name of a checkpoint, detect its format, and fetch its headers or all of it.

    Args:
        name: A path, an object store URL, an alias or a hub id. See `parse_reference`.
        revision: Revision on the hub.
        step: Step of the training run `name`.
        cwd: Folder that relative paths start from. The working directory by default.
        access: How a remote checkpoint may be read.

    Raises:
        UsageError: The argument is not a known name or path.
        PrepError: The checkpoint does not exist, is not readable or has an unsupported format.
    """
    reference = parse_reference(name, revision, step=step, cwd=cwd)
    match reference:
        case LocalPath() | RunStep():
            folder = OpenFolder(reference.display_name, reference.path)
        case HubRepo():
            folder = open_hub_folder(reference, access)
        case BucketUrl():
            folder = open_bucket_folder(reference, access)
        case _:
            assert_never(reference)
    display_name = reference.display_name
    if isinstance(folder, OpenFolder) and folder.path.is_file():
        detected = Detected(detect_file(folder.path, display_name, allow_gguf=access.allow_gguf))
    elif isinstance(reference, HubRepo) and reference.file:
        kind = detect_gguf(reference.file, display_name, is_allowed=access.allow_gguf)
        detected = Detected(kind)
    else:
        detected = detect(
            folder,
            allow_adapters=access.allow_adapters,
            allow_quantized=access.allow_quantized,
        )
    # Only now, with a known and supported format, are files fetched: a refused model costs a listing.
    files = folder.fetch(detected.kind)
    item = None if detected.item is None else files.path / detected.item
    if files.path.is_file():
        manifest = read_manifest_of_file(files.path)
    else:
        manifest = read_manifest(files.path if item is None else item_manifest_folder(item))
    if FORMATS[detected.kind].is_hf_folder and detected.may_be_quantized:
        remark = unused_quantization_note(detected.config or {}, files.path)
        if remark:
            access.note(remark)
    model_name = reference.model_name
    # A model of the hub has the name of its repository, and a single file its own.
    if manifest is not None and not isinstance(reference, HubRepo) and not files.path.is_file():
        recorded_name: object = manifest.name
        # Outputs are called after it.
        if isinstance(recorded_name, str) and recorded_name and not name_fault(recorded_name):
            model_name = recorded_name
    return LocatedCheckpoint(
        display_name=display_name,
        model_name=model_name,
        kind=detected.kind,
        files=files,
        manifest=manifest,
        part=reference.part if isinstance(reference, LocalPath) else "",
        access=access,
        item=item,
        may_be_quantized=detected.may_be_quantized,
        config=detected.config,
    )


def check_stream(*located: LocatedCheckpoint) -> None:
    """Raise UsageError for `--stream` if every checkpoint is a local folder."""
    if all(not checkpoint.files.is_remote for checkpoint in located):
        names = " and ".join(checkpoint.model_name for checkpoint in located)
        option = Option("stream", True)
        raise usage_error(
            text("{} has no effect", option),
            f"{names} is read from a local folder",
            text("remove {}", option),
        )
