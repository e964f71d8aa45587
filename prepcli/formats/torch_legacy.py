"""The format that PyTorch wrote before 1.6: pickles one after another, then the storages.

All raises ValueError with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from prepcli.formats.torch_pickle import MAX_NBYTES, BoundedReader, PickledMapping, UnpickledObject, interpret_pickle
from prepcli.formats.torch_state import ALLOWED_NAMES, TorchStorage, collect_storages
from prepcli.formats.untrusted import quote_name

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001
LENGTH_NBYTES = 8  # the little-endian number of elements before each storage


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """The object that is pickled, the first byte of each storage by its key, and where the storages begin."""

    unpickled: UnpickledObject
    storage_offsets: Mapping[str, int]
    data_start: int


def read_legacy_file(file: BinaryIO) -> LegacyFile:
    """The pickles of a file, and the lengths of its storages, whose bytes are passed over."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    window = BoundedReader(file, min(size, MAX_NBYTES))
    _check_head(window)
    loaded = interpret_pickle(window, ALLOWED_NAMES)
    keys = interpret_pickle(window, ()).root
    data_start = file.tell()
    storages = collect_storages(loaded)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("its list of storages is broken")
    if len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise ValueError("its list of storages is not that of its tensors")
    places, end = _places(file, [storages[key] for key in keys], size)
    if end != size:
        raise ValueError(f"its storages end at byte {end:,}, the file has {size:,}")
    return LegacyFile(loaded, places, data_start)


def _check_head(window: BoundedReader) -> None:
    """What stands before the object: a magic number, the version, and the machine that wrote it."""
    if interpret_pickle(window, ()).root != LEGACY_MAGIC:
        raise ValueError("it begins like a pickle, but not like one of PyTorch's")
    if interpret_pickle(window, ()).root != LEGACY_VERSION:
        raise ValueError(f"its version is not {LEGACY_VERSION}")
    system = interpret_pickle(window, ()).root
    if not isinstance(system, PickledMapping) or ("little_endian", True) not in [
        (key, value) for key, value in system.items if isinstance(key, str) and isinstance(value, bool)
    ]:
        raise ValueError("it was written on a machine whose numbers begin with their highest byte")


def _places(file: BinaryIO, storages: list[TorchStorage], size: int) -> tuple[dict[str, int], int]:
    """The first byte of each storage, and where the last one ends."""
    places: dict[str, int] = {}
    at = file.tell()
    for storage in storages:
        file.seek(at)
        length = file.read(LENGTH_NBYTES)
        count = int.from_bytes(length, "little", signed=True)
        if len(length) < LENGTH_NBYTES or at + LENGTH_NBYTES + storage.nbytes > size:
            raise ValueError(f"it is cut short in storage {quote_name(storage.key)}")
        if count * storage.item_nbytes != storage.nbytes:
            said = storage.nbytes // storage.item_nbytes
            raise ValueError(f"storage {quote_name(storage.key)} has {count:,} elements, its tensors say {said:,}")
        places[storage.key] = at + LENGTH_NBYTES
        at += LENGTH_NBYTES + storage.nbytes
    return places, at
