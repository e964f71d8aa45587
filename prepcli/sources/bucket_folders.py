"""A checkpoint in an object store: what its reader needs is brought into a mirror, tensors stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prepcli.console.formatting import bytes_text
from prepcli.errors import PrepError
from prepcli.formats.ocdbt import MANIFEST, Place
from prepcli.formats.ocdbt_read import read_database
from prepcli.formats.orbax import METADATA, find_item
from prepcli.remote.object_store import Bucket, parse_url
from prepcli.remote.patience import PATIENT, Patience, map_in_daemons
from prepcli.remote.placeholders import (
    SMALL_NBYTES,
    Remote,
    add_headers,
    add_holes,
    add_small,
    checked_path,
    new_mirror,
    told_of,
    whole,
)
from prepcli.remote.remote_files import IN_FLIGHT, RemoteFile
from prepcli.sources.source import WEIGHTS

MOST_INDEX_NBYTES = 1 << 30  # of all nodes of an index
MOST_DOCUMENT_NBYTES = 1 << 20
MOST_SMALL_NBYTES = 1 << 30  # of all small files together
_DATA_FOLDERS = frozenset({"d", "ocdbt_data", "ocdbt_meta"})
_DOCUMENTS = (b".zarray", b"zarr.json")


def open_url(text: str, patience: Patience = PATIENT) -> Remote:
    """The checkpoint at an address. PrepError for what is none, or cannot be reached."""
    return open_bucket(Bucket(parse_url(text), patience=patience))


def open_bucket(bucket: Bucket) -> Remote:
    """The checkpoint below a place in an object store. PrepError as of `open_url`."""
    files = bucket.files()
    if not files:
        raise PrepError(f"{bucket.name} holds no checkpoint", "nothing has a name that begins so", "check the spelling")
    remote = Remote(files, bucket, new_mirror())
    for file in files:
        checked_path(remote.mirror, file)
    with told_of(remote.mirror, bucket.name):
        (_add_item if _is_orbax(files) else _add_folder)(remote)
    return remote


def _is_orbax(files: Sequence[RemoteFile]) -> bool:
    """An item, a step or a run: somewhere not far below there is the list of a tree's leaves."""
    return any(file.path.rpartition("/")[2] == METADATA and file.path.count("/") <= 2 for file in files)


def _add_folder(remote: Remote) -> None:
    """A Hugging Face folder: what lies at its top."""
    top = [file for file in remote.files if "/" not in file.path]
    weights = [file for file in top if Path(file.path).suffix in WEIGHTS]
    _add_all_small(remote, [f for f in top if f not in weights and f.size <= SMALL_NBYTES])
    for file in weights:
        add_holes(remote.mirror, remote.ranges, file)
    add_headers(remote.mirror, remote.ranges, [file for file in weights if file.path.endswith(".safetensors")])


def _add_item(remote: Remote) -> None:
    """What is not in data files, then of the item that is meant the nodes of its index."""
    if not any(file.path.rpartition("/")[2] == MANIFEST for file in remote.files):
        raise _without_index(remote)
    data = [file for file in remote.files if _is_data(file)]
    _add_all_small(remote, [file for file in remote.files if not _is_data(file)])
    item = find_item(remote.mirror)
    if item is None or not (item / MANIFEST).is_file():
        raise _without_index(remote)
    for file in data:
        if checked_path(remote.mirror, file).is_relative_to(item):
            add_holes(remote.mirror, remote.ranges, file)
    _add_index(remote, item)


def _without_index(remote: Remote) -> PrepError:
    why = "it has no OCDBT index: its arrays are folders of files, or it was not finished"
    return PrepError(f"{remote.ranges.name} cannot be read from afar", why, "copy it to a folder here first")


def _is_data(file: RemoteFile) -> bool:
    """Whether a file is one that an OCDBT database keeps nodes and values in, as TensorStore or Orbax calls them."""
    return file.size > SMALL_NBYTES or not _DATA_FOLDERS.isdisjoint(file.path.split("/")[:-1])


def _add_index(remote: Remote, item: Path) -> None:
    """Bring in the index of a database, node by node, and the documents of arrays that are not in it."""
    files = {checked_path(remote.mirror, file): file for file in remote.files}
    brought = 0

    def bring(place: Place) -> None:
        nonlocal brought
        brought += place.nbytes
        if brought > MOST_INDEX_NBYTES:
            why = f"it has more than {bytes_text(MOST_INDEX_NBYTES)}"
            raise PrepError(f"the index of {remote.ranges.name} is too large", why)
        path = item / place.path
        if path in files:
            add_holes(remote.mirror, remote.ranges, files[path], [(place.offset, place.nbytes)])

    for key, value in read_database(item, bring):
        if isinstance(value, Place) and key.endswith(_DOCUMENTS) and value.nbytes <= MOST_DOCUMENT_NBYTES:
            bring(value)


def _add_all_small(remote: Remote, files: Sequence[RemoteFile]) -> None:
    total = sum(file.size for file in files)
    if total > MOST_SMALL_NBYTES:
        why = f"{len(files):,} small files have {bytes_text(total)} together"
        raise PrepError(f"{remote.ranges.name} is no checkpoint", why, "name the folder of one")

    def add(file: RemoteFile) -> None:
        add_small(remote.mirror, file, whole(remote.ranges, file))

    map_in_daemons(add, files, 2 * IN_FLIGHT)
