"""Messages between a reader of tables and its worker process, over a pair of pipes.

A message is its kind (1 byte), the length of its content (8 bytes, little-endian), and the content.
The parent writes only while the worker waits for a message, so the pipes cannot deadlock:

    parent                      worker
    OPEN settings         ->
                          <-    READ range      as often as the decoder needs bytes
    DATA bytes            ->
                          <-    BATCH rows, INVALID_ROW
                          <-    END, or FAILED
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import BinaryIO

HEADER = struct.Struct("<cQ")
# Offset and length of bytes of the file.
RANGE = struct.Struct("<QQ")
# First row of a batch, and the bytes of the file that it accounts for.
ROWS = struct.Struct("<QQ")


class Kind(Enum):
    """Kind of a message."""

    # To the worker: read a file with these settings (JSON).
    OPEN = b"O"
    # To the worker: bytes of the file.
    DATA = b"D"
    # From the worker: it needs a RANGE of the file.
    READ = b"R"
    # From the worker: ROWS, then a record batch as an Arrow stream.
    BATCH = b"B"
    # From the worker: number and fault of a row (JSON).
    INVALID_ROW = b"I"
    # From the worker: why the rest of the file cannot be read (JSON).
    FAILED = b"F"
    # From the worker: the file is read.
    END = b"E"


def write_message(stream: BinaryIO, kind: Kind, *parts: bytes | memoryview) -> None:
    """Write a message.

    Args:
        stream: The pipe.
        kind: Kind of the message.
        *parts: Parts of its content, in order.
    """
    stream.write(HEADER.pack(kind.value, sum(len(part) for part in parts)))
    for part in parts:
        stream.write(part)
    stream.flush()


def read_message(stream: BinaryIO) -> tuple[Kind, bytes]:
    """Read the next message.

    Raises:
        EOFError: The other process has ended.
    """
    kind, nbytes = HEADER.unpack(_read_exactly(stream, HEADER.size))
    return Kind(kind), _read_exactly(stream, nbytes)


def _read_exactly(stream: BinaryIO, nbytes: int) -> bytes:
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise EOFError
    return data
