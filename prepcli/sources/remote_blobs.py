"""The files of a remote checkpoint in place of their local placeholders."""

from __future__ import annotations

from dataclasses import replace

from prepcli.planning.plan import SourceFile
from prepcli.sources.source import Source
from prepcli.stores.placeholders import RemoteCheckpoint


def with_remote_blobs(source: Source, remote: RemoteCheckpoint) -> Source:
    """Return a source with the files of a remote checkpoint in place of its placeholders.

    Raises:
        PrepError: A tensor is made from placeholder files in another way than by the decoding of chunks.
    """
    files = remote.remote_files(source.files)
    blobs = remote.remote_blobs(source.blobs, source.files, files)
    stamps = tuple(
        SourceFile(stamp.path, blob.file.size, 0, blob.file.digest)
        for stamp, blob in zip(source.file_stamps, files)
    )
    return replace(source, file_stamps=stamps, blobs=blobs, remote_files=files)
