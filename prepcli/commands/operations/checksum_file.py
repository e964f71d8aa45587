"""Check the file with the checksums of a checkpoint's blocks. The digests of tensors do not cover it."""

from __future__ import annotations

from prepcli.core.errors import DamagedError
from prepcli.formats.checksums import read_checksum_bytes
from prepcli.formats.manifest import NO_MANIFEST, again_hint
from prepcli.sources.source import Source


def check_checksum_file(source: Source) -> None:
    """Compare `prep-checksums.bin` with its digest in the manifest. A checkpoint may have no such file.

    Raises:
        DamagedError: The file differs from the digest.
        PrepError: The file cannot be read, or has an unsupported format.
    """
    try:
        read_checksum_bytes(source.root, source.manifest or NO_MANIFEST)
    except DamagedError as error:
        # Its hint is for commands with an option to read without checks.
        raise error.with_texts(hint=again_hint(source.manifest)) from error.__cause__
