"""Existing outputs in an object store: their plan, and the state of their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prepcli.core.errors import DamagedError, Option, PrepError, text
from prepcli.engine.digest import digest
from prepcli.formats.manifest import MANIFEST_FILE, NO_MANIFEST, decode_manifest
from prepcli.planning.manifest_fields import Manifest
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.object_store import Bucket
from prepcli.stores.paths import SMALL_NBYTES, read_all

OTHER_ADDRESS_HINT = text(
    "set {} to another address, or pass {}", Option("out"), Option("overwrite", True)
)


def stored_manifest(bucket: Bucket, remote_files: Sequence[RemoteFile]) -> Manifest | None:
    """Return the manifest of an output. None if it has no manifest, NO_MANIFEST if its manifest is damaged."""
    for file in remote_files:
        if file.path == MANIFEST_FILE:
            try:
                return decode_manifest(Path(MANIFEST_FILE), read_all(bucket, file))
            except DamagedError:
                return NO_MANIFEST
    return None


def check_stored_output(
    bucket: Bucket,
    remote_files: Sequence[RemoteFile],
    manifest: Manifest,
    plan_digest: str,
    *,
    restart: bool,
) -> None:
    """Raise PrepError unless the URL holds an intact output of this plan.

    With `restart`, such an output is an error too.
    """
    if manifest.plan != plan_digest:
        why = "it was made by another request, or of another source"
    elif not has_intact_files(bucket, remote_files, manifest):
        why = "this command created it, but its files are damaged"
    elif restart:
        why = "this command created it earlier"
    else:
        return
    raise PrepError(f"{bucket.name} already exists", why, OTHER_ADDRESS_HINT)


def has_intact_files(
    bucket: Bucket, remote_files: Sequence[RemoteFile], manifest: Manifest
) -> bool:
    """Return whether all listed files of an output exist and agree with their records.

    The size of each file is compared. Files of at most SMALL_NBYTES are also fetched, to compare their digests.
    """
    files = {file.path: file for file in remote_files}
    for name, record in manifest.files.items():
        file = files.get(name)
        if file is None or file.size != record["bytes"]:
            return False
        recorded = record.get("xxh3")
        if recorded is None or file.size > SMALL_NBYTES:
            continue
        if digest(read_all(bucket, file)) != recorded:
            return False
    return True
