"""The format that PyTorch wrote before 1.6: pickles one after another, then the storages.

All raises ValueError with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from prepcli.formats.torch_pickle import MAX_NBYTES, Loaded, Pairs, Window, load
from prepcli.formats.torch_state import EXPECTED, Storage, storages_of
from prepcli.formats.untrusted import shown

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
LENGTH_NBYTES = 8  # the little-endian number of elements before each storage


@dataclass(frozen=True, slots=True)
class Legacy:
    """The object that is pickled, the first byte of each storage by its key, and where the storages begin."""

    loaded: Loaded
    places: Mapping[str, int]
    data_start: int


def read_legacy(file: BinaryIO) -> Legacy:
    """The pickles of a file, and the lengths of its storages, whose bytes are passed over."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    window = Window(file, min(size, MAX_NBYTES))
    _check_head(window)
    loaded = load(window, EXPECTED)
    keys = load(window, ()).root
    data_start = file.tell()
    storages = storages_of(loaded)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("its list of storages is broken")
    if len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise ValueError("its list of storages is not that of its tensors")
    places, end = _places(file, [storages[key] for key in keys], size)
    if end != size:
        raise ValueError(f"its storages end at byte {end:,}, the file has {size:,}")
    return Legacy(loaded, places, data_start)


def _check_head(window: Window) -> None:
    """What stands before the object: a magic number, the version, and the machine that wrote it."""
    if load(window, ()).root != MAGIC:
        raise ValueError("it begins like a pickle, but not like one of PyTorch's")
    if load(window, ()).root != PROTOCOL:
        raise ValueError(f"its version is not {PROTOCOL}")
    system = load(window, ()).root
    if not isinstance(system, Pairs) or ("little_endian", True) not in [
        (key, value) for key, value in system.items if isinstance(key, str) and isinstance(value, bool)
    ]:
        raise ValueError("it was written on a machine whose numbers begin with their highest byte")


def _places(file: BinaryIO, storages: list[Storage], size: int) -> tuple[dict[str, int], int]:
    """The first byte of each storage, and where the last one ends."""
    places: dict[str, int] = {}
    at = file.tell()
    for storage in storages:
        file.seek(at)
        length = file.read(LENGTH_NBYTES)
        count = int.from_bytes(length, "little", signed=True)
        if len(length) < LENGTH_NBYTES or at + LENGTH_NBYTES + storage.nbytes > size:
            raise ValueError(f"it is cut short in storage {shown(storage.key)}")
        if count * storage.item != storage.nbytes:
            said = storage.nbytes // storage.item
            raise ValueError(f"storage {shown(storage.key)} has {count:,} elements, its tensors say {said:,}")
        places[storage.key] = at + LENGTH_NBYTES
        at += LENGTH_NBYTES + storage.nbytes
    return places, at
