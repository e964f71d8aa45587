"""Read the format of PyTorch before 1.6: consecutive pickles, then the storages.

Functions raise ValueError for invalid files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from prepcli.formats.torch_pickle import (
    MAX_NBYTES,
    BoundedReader,
    PickledMapping,
    UnpickledObject,
    interpret_pickle,
)
from prepcli.formats.torch_state import ALLOWED_NAMES, TorchStorage, collect_storages
from prepcli.formats.untrusted import CutShortError, quote_name

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001
# The little-endian element count before each storage.
LENGTH_NBYTES = 8


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """Unpickled object of a file, offset of each storage by key, and offset of the first storage."""

    unpickled: UnpickledObject
    storage_offsets: Mapping[str, int]
    data_start: int


# torch.save before 1.6 (serialization.py, `_legacy_save`): five pickles in a row, then storages.
#   magic number, version 1001, {"little_endian": True, ...}, the object, the keys of storages
#   then for each key, in this order: element count [8, little endian], elements
def read_legacy_file(file: BinaryIO) -> LegacyFile:
    """Read the pickles of a file and the lengths of its storages, without their bytes."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    reader = BoundedReader(file, min(size, MAX_NBYTES))
    _check_preamble(reader)
    unpickled = interpret_pickle(reader, ALLOWED_NAMES)
    keys = interpret_pickle(reader, ()).root
    data_start = file.tell()
    storages = collect_storages(unpickled)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("its list of storages is invalid")
    if len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise ValueError("its list of storages differs from the storages of its tensors")
    storage_offsets, end = _read_storage_offsets(file, [storages[key] for key in keys], size)
    if end != size:
        raise ValueError(f"its storages end at byte {end:,}, the file has {size:,}")
    return LegacyFile(unpickled, storage_offsets, data_start)


def _check_preamble(reader: BoundedReader) -> None:
    """Check the pickles before the object: magic number, version and byte order."""
    if interpret_pickle(reader, ()).root != LEGACY_MAGIC:
        raise ValueError("it starts with a pickle that is not PyTorch's magic number")
    if interpret_pickle(reader, ()).root != LEGACY_VERSION:
        raise ValueError(f"its version is not {LEGACY_VERSION}")
    system = interpret_pickle(reader, ()).root
    if not isinstance(system, PickledMapping) or ("little_endian", True) not in [
        (key, value)
        for key, value in system.items
        if isinstance(key, str) and isinstance(value, bool)
    ]:
        raise ValueError("it was written on a big-endian machine")


def _read_storage_offsets(
    file: BinaryIO, storages: list[TorchStorage], size: int
) -> tuple[dict[str, int], int]:
    """Return the offset of each storage, and the end of the last one."""
    offsets: dict[str, int] = {}
    header_offset = file.tell()
    for storage in storages:
        file.seek(header_offset)
        length = file.read(LENGTH_NBYTES)
        count = int.from_bytes(length, "little", signed=True)
        if len(length) < LENGTH_NBYTES or header_offset + LENGTH_NBYTES + storage.nbytes > size:
            raise CutShortError(f"it is cut short in storage {quote_name(storage.key)}")
        if count * storage.item_nbytes != storage.nbytes:
            element_count = storage.nbytes // storage.item_nbytes
            raise ValueError(
                f"storage {quote_name(storage.key)} has {count:,} elements, its tensors need {element_count:,}"
            )
        offsets[storage.key] = header_offset + LENGTH_NBYTES
        header_offset += LENGTH_NBYTES + storage.nbytes
    return offsets, header_offset
