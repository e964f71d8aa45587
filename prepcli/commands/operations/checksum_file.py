"""Check the file with the checksums of a checkpoint's blocks. The digests of tensors do not cover it."""

from __future__ import annotations

import contextlib

from prepcli.core.errors import DamagedError
from prepcli.formats.again_hint import again_hint
from prepcli.formats.checksums import read_checksum_bytes
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source
from prepcli.stores.placeholders import rename_in_errors


def check_checksum_file(source: Source, located: LocatedCheckpoint) -> None:
    """Compare `prep-checksums.bin` with its digest in the manifest. A checkpoint may have no such file.

    Raises:
        DamagedError: The file differs from the digest.
        PrepError: The file cannot be read, or has an unsupported format.
    """
    remote = located.local_files.remote
    names: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if remote is not None:
        names = rename_in_errors(remote.placeholder_folder, located.display_name)
    try:
        with names:
            read_checksum_bytes(source.root, source.manifest or NO_MANIFEST)
    except DamagedError as error:
        # Its hint is for commands with an option to read without checks.
        raise error.with_texts(hint=again_hint(source.manifest)) from error.__cause__
