"""Data files of a run that are not on this machine: objects of buckets, and datasets on the hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.core.formatting import format_bytes
from prepcli.core.observer import NullProgress
from prepcli.sources.folders import Access
from prepcli.stores.addresses import parse_hub_address, parse_url
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.files import open_regular_file
from prepcli.stores.hub import (
    HubListing,
    cached_snapshot,
    is_hub_down,
    list_repository,
    prepare_hub,
    translate_errors,
)
from prepcli.stores.object_store import Bucket
from prepcli.stores.paths import StoreListing
from trainer.data.dataset_layout import (
    MAX_README_NBYTES,
    README,
    matches,
    read_metadata,
    select_files,
    select_folder_files,
)
from trainer.data.files import DataFile
from trainer.data.remote_files import GLOB_SIGNS, Selection

HUB_HINT = "`hf://datasets/OWNER/NAME`, or `hf://datasets/OWNER/NAME/FILE`"
SCHEMES = ("gs://", "s3://", "hf://")


@dataclass(frozen=True, slots=True)
class DataFinder:
    """Finder of data files by URL. It implements the trainer's `RemoteFiles`.

    Attributes:
        access: Time-outs and retries, and whether only the hub's cache may be used.
        note: Called with a message before a download.
    """

    access: Access
    note: Callable[[str], None]

    def find(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> Sequence[DataFile]:
        """List the data files of a URL.

        See `RemoteFiles.find`.
        """
        if not url.startswith(SCHEMES):
            why = "supported: paths, gs://, s3:// and hf://datasets/"
            raise usage_error(f"cannot read data from {url}", why, _web_address_hint(url))
        if url.startswith("hf://"):
            files = self._find_on_hub(url, accepts, selection)
        else:
            files = self._find_in_bucket(url, accepts, selection)
        if not files:
            why = "no object of that name, no data file in a folder of that name, and no match of it as a glob"
            hint = text("check the spelling; {} sets the type of files", Key("data.type"))
            raise PrepError(f"no data in `{url}`", why, hint)
        return files

    def _find_in_bucket(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> list[DataFile]:
        """Return an object, or else the data of a folder or a glob, sorted by name."""
        glob = GLOB_SIGNS.search(url)
        # List below the last folder before the first sign of a glob, e.g. `gs://b/a` of `gs://b/a/x-*`.
        literal = url.rstrip("/")
        if glob:
            literal = url[: glob.start()]
        parent, _, name = literal.rpartition("/")
        pattern = url.removeprefix(f"{parent}/")
        # `gs://b` is a whole bucket. It has no object name after the last slash.
        is_bucket = parent.endswith(":/")
        folder = parent
        if is_bucket:
            folder = url
        bucket = Bucket(parse_url(folder), retry_policy=self.access.retry_policy)
        if not glob and not is_bucket and (file := bucket.find_file(name)) is not None:
            return [_bucket_file(bucket, file)]
        if not glob and not is_bucket:
            bucket = replace(bucket, url=parse_url(url))
        files: dict[str, DataFile] = {}
        for file in bucket.list_files():
            if not any(part.startswith(".") for part in file.path.split("/")):
                files[file.path] = _bucket_file(bucket, file)
        # A glob selects files by its pattern. In a folder, the type of the data and the part of a dataset select them.
        if glob:
            names = [name for name in files if matches(name, pattern)]
        else:
            metadata = _bucket_metadata(files.get(README))
            names = select_folder_files(
                url, [*files], metadata, selection, accepts=accepts, note=self.note
            )
        return [files[name] for name in names]

    def _find_on_hub(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> list[DataFile]:
        """Return the files of a dataset on the hub, named by a URL and a selection."""
        address = parse_hub_address(url)
        if address is None or address.repo_type != "dataset":
            raise usage_error(
                f"`{url}` is an invalid URL", "it names no dataset on the hub", HUB_HINT
            )
        if address.revision and selection.revision not in (None, address.revision):
            key = Key("data.revision")
            why = text("`@{}` and {} {}", address.revision, key, selection.revision)
            raise usage_error(f"`{url}` has two revisions", why, "remove one of them")
        revision = address.revision or selection.revision
        is_offline = prepare_hub(self.access.offline, self.access.retry_policy)
        with translate_errors(address.hub_id, revision, offline=is_offline, repo_type="dataset"):
            dataset = self._open_dataset(address.hub_id, revision, is_offline=is_offline)
            metadata = read_metadata(dataset.readme())
            if address.path:
                names = sorted(name for name in dataset.names if matches(name, address.path))
            else:
                names = select_files(
                    address.hub_id,
                    dataset.names,
                    metadata,
                    selection,
                    accepts=accepts,
                )
            return [dataset.data_file(name) for name in names]

    def _open_dataset(
        self, hub_id: str, revision: str | None, *, is_offline: bool
    ) -> HubDataset | CachedDataset:
        """List the files of a dataset on the hub.

        Offline, or if the hub is down, list the files in the hub's cache instead.
        """
        if is_offline:
            return CachedDataset(hub_id, cached_snapshot(hub_id, revision, "dataset"))
        try:
            policy = self.access.retry_policy
            return HubDataset(
                list_repository(hub_id, revision, retry_policy=policy, repo_type="dataset"),
                self.note,
            )
        except Exception as error:
            if not is_hub_down(error):
                raise
            try:
                cached = CachedDataset(hub_id, cached_snapshot(hub_id, revision, "dataset"))
            except FileNotFoundError:
                raise error from None
            self.access.warn(f"the hub cannot be reached: using the files of {hub_id} in the cache")
            return cached


def _bucket_file(bucket: Bucket, file: RemoteFile) -> DataFile:
    """Return an object as a data file, which is identified by its ETag."""

    def open_stream() -> BinaryIO:
        return (StoreListing(bucket.name, bucket, [file]).root / file.path).stream(0)

    return DataFile(f"{bucket.url}/{file.path}", file.size, file.digest, open_stream)


def _bucket_metadata(readme: DataFile | None) -> Mapping[str, object]:
    """Return the metadata of the README in a bucket. It is empty without a README."""
    if readme is None:
        return {}
    with TemporaryDirectory() as folder, readme.open() as stream:
        path = Path(folder, README)
        path.write_bytes(stream.read(MAX_README_NBYTES + 1))
        return read_metadata(path, str(readme.path))


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset that the hub lists.

    Its files are downloaded into the hub's cache when they are opened.
    """

    listing: HubListing
    note: Callable[[str], None]

    @property
    def names(self) -> Sequence[str]:
        """Names of its files."""
        return [*self.listing.siblings]

    def readme(self) -> Path | None:
        """Download the README, if there is one, and return its path in the cache.

        The download also records the commit of the revision in the cache.
        """
        # Without a README, the download still records the commit of the revision. A later start
        # without network finds the files by it.
        names: list[str] = []
        if README in self.listing.siblings:
            names = [README]
        folder = self.listing.download(names, NullProgress())
        if names:
            return folder / README
        return None

    def data_file(self, name: str) -> DataFile:
        """Return a file, identified by the hub's hash of its content."""
        file = self.listing.remote_file(name)
        return _hub_file(self.listing.hub_id, file, partial(self._open, file))

    def _open(self, file: RemoteFile) -> BinaryIO:
        hub_id = self.listing.hub_id
        self.note(
            f"reading {file.path} of {hub_id} ({format_bytes(file.size)}) through the hub's cache"
        )
        with translate_errors(hub_id, self.listing.revision, repo_type="dataset"):
            return open_regular_file(self.listing.download_file(file.path), buffering=0)


@dataclass(frozen=True, slots=True)
class CachedDataset:
    """The files of a dataset in the hub's cache."""

    hub_id: str
    folder: Path

    @property
    def names(self) -> Sequence[str]:
        """Names of its files."""
        names: list[str] = []
        for path in self.folder.rglob("*"):
            if path.is_file():
                names.append(str(path.relative_to(self.folder)))
        return sorted(names)

    def readme(self) -> Path | None:
        """Return the path of the README.

        None if it is not in the cache.
        """
        path = self.folder / README
        if path.is_file():
            return path
        return None

    def data_file(self, name: str) -> DataFile:
        """Return a file with the hub's digest of its content.

        A file in the cache is a link. The name of the link's target is the digest.
        """
        path = self.folder / name
        file = RemoteFile(name, path.stat().st_size, os.path.basename(os.path.realpath(path)))
        return _hub_file(self.hub_id, file, partial(open_regular_file, path, buffering=0))


def _hub_file(hub_id: str, file: RemoteFile, open_file: Callable[[], BinaryIO]) -> DataFile:
    digest = file.digest.rpartition(":")[2]
    return DataFile(f"hf://datasets/{hub_id}/{file.path}", file.size, f"hub:{digest}", open_file)


def _web_address_hint(url: str) -> str:
    """Return the name for recipes of a dataset's page on the hub, and how to read any other address."""
    address = parse_hub_address(url)
    if address is None or address.repo_type != "dataset":
        return "download it, and name the file"
    revision = f"@{address.revision}" if address.revision else ""
    path = f"/{address.path}" if address.path else ""
    return f"`hf://datasets/{address.hub_id}{revision}{path}`"
