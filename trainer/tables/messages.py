"""Messages between a reader of tables and its worker process, over a pair of pipes.

A message is its kind (1 byte), the length of its content (8 bytes, little-endian), and the content.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import BinaryIO

HEADER = struct.Struct("<cQ")
RANGE = struct.Struct("<QQ")  # offset and length of bytes of the file
ROWS = struct.Struct("<QQ")  # first row of a batch, and its share of the file's bytes


class Kind(Enum):
    """Kind of a message."""

    OPEN = b"O"  # to the worker: read a file with these settings (JSON)
    DATA = b"D"  # to the worker: bytes of the file
    READ = b"R"  # from the worker: it needs a RANGE of the file
    BATCH = b"B"  # from the worker: ROWS, then a record batch as an Arrow stream
    INVALID_ROW = b"I"  # from the worker: number and fault of a row (JSON)
    FAILED = b"F"  # from the worker: why the rest of the file cannot be read (JSON)
    END = b"E"  # from the worker: the file is read


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
