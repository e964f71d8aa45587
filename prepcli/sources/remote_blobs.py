"""The files of a remote checkpoint in place of their local placeholders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from prepcli.engine.blobs import Blob, MemoryBlob
from prepcli.errors import PrepError
from prepcli.planning.plan import SourceFile
from prepcli.remote.placeholders import RemoteCheckpoint
from prepcli.remote.remote_files import RemoteBlob
from prepcli.sources.source import Source


def with_remote_blobs(source: Source, remote: RemoteCheckpoint) -> Source:
    """Return a source that reads its tensors from the files of a remote checkpoint.

    Raises:
        PrepError: A tensor is decoded from placeholder files, e.g. from compressed chunks.
    """
    placeholders = [blob for blob in source.byte_sources if isinstance(blob, Path)]
    blobs_by_path = dict(zip(placeholders, remote.blobs(placeholders), strict=True))
    blobs: list[Path | Blob] = []
    for blob in source.byte_sources:
        if isinstance(blob, Path):
            blobs.append(blobs_by_path[blob])
        elif isinstance(blob, RemoteBlob | MemoryBlob):
            blobs.append(blob)
        else:
            raise PrepError(
                f"{remote.reader.name} cannot be read remotely",
                "its tensors are compressed, scaled, or split within a file",
                "copy it to a local folder first",
            )
    stamps = _remote_stamps(source, remote.blobs(source.files))
    return replace(source, file_stamps=stamps, blobs=tuple(blobs))


def _remote_stamps(source: Source, files: Iterable[RemoteBlob]) -> tuple[SourceFile, ...]:
    """Return the stamps of the files in the store."""
    stamps: list[SourceFile] = []
    for stamp, blob in zip(source.file_stamps, files, strict=False):
        stamps.append(SourceFile(stamp.path, blob.file.size, 0, blob.file.digest))
    return tuple(stamps)
