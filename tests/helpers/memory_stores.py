"""Stores of files in memory, with a record of their requests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import DEFAULT_RETRY_POLICY, RemoteFile
from prepcli.stores.paths import StoreListing, StorePath


class MemoryReader:
    """Range reader of files in memory."""

    name = "gs://bucket/m"
    retry_policy = DEFAULT_RETRY_POLICY

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.requests: list[tuple[str, int, int]] = []

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        self.requests.append((file.path, offset, into.size))
        into[:] = np.frombuffer(self.files[file.path], np.uint8)[offset : offset + into.size]
        return into.size


def store_of(files: Mapping[str, bytes]) -> tuple[StorePath, MemoryReader]:
    """Return the folder of files in a store, and its reader."""
    reader = MemoryReader(files)
    listed = [RemoteFile(name, len(data), "") for name, data in files.items()]
    return StoreListing(reader.name, reader, listed).root, reader
