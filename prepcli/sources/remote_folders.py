"""The files of checkpoints in buckets and on the hub: list, select, download."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import join_names
from prepcli.formats.gguf import part_names
from prepcli.formats.manifest import MANIFEST_FILE, RECIPE_FILE, listed_step, listed_steps
from prepcli.formats.model_files import index_suffix, read_weight_map, whole_file
from prepcli.formats.registry import FORMATS, INDEX_FILES, Kind, select_downloads
from prepcli.planning.item_storage import METADATA_FILE
from prepcli.quantized.formats import QUANTIZATION_FILES
from prepcli.sources.detect import Refusal, apply_rules, no_checkpoint_error
from prepcli.sources.open_folder import Access, OpenFolder
from prepcli.sources.references import CONFIG, BucketUrl, HubRepo
from prepcli.sources.side_files import ListedFile, is_weight_file, select_side_files, unread_weights
from prepcli.stores.hub import (
    HubListing,
    cached_snapshot,
    is_hub_down,
    list_repository,
    prepare_hub,
    translate_errors,
)
from prepcli.stores.object_store import Bucket
from prepcli.stores.paths import COPY_HINT, AnyPath, StoreListing, StorePath

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


def open_remote_folder(reference: HubRepo | BucketUrl, access: Access) -> OpenFolder | HubFolder:
    """List the files of a checkpoint on the hub or in a bucket. See `open_hub_folder` and `open_bucket_folder`."""
    if isinstance(reference, HubRepo):
        return open_hub_folder(reference, access)
    return open_bucket_folder(reference, access)


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
