"""Arrays whose items are in several files, read as one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# Files that a process maps at the same time, of all arrays together. Each one has a file descriptor.
MAX_MAPS = 128


class TokenArray(Protocol):
    """A one-dimensional array of a store. NumPy arrays are such arrays."""

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def __getitem__(self, items: slice, /) -> npt.NDArray[Any]:
        """Return consecutive items."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ArrayFile:
    """A file with a part of an array.

    Attributes:
        path: The file.
        n_items: Number of its items.
        offset: Is added to each item.
        codes: Replacement of each item by its value. None keeps the items.
    """

    path: Path
    n_items: int
    offset: int = 0
    codes: npt.NDArray[np.uint8] | None = None


class JoinedArray:
    """An array whose items are in several files, one after the other.

    A file is mapped into memory when it is read. A map costs no memory of its own: the pages belong to the page
    cache, all processes of a host share them, and the system may drop them at any time.

    Attributes:
        dtype: Dtype of the items.
    """

    def __init__(self, files: Sequence[ArrayFile], dtype: np.dtype[Any]) -> None:
        """Join files.

        Args:
            files: The files in order.
            dtype: Dtype of the items on disk.
        """
        self.dtype = dtype
        self._files = files
        self._ends = np.cumsum([file.n_items for file in files], dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of items."""
        return int(self._ends[-1])

    def __getitem__(self, items: slice, /) -> npt.NDArray[Any]:
        """Return consecutive items."""
        return self._join(items, self._map_items)

    def read(self, items: slice) -> npt.NDArray[Any]:
        """Return consecutive items without a map. Its pages would count as memory of the process."""
        return self._join(items, self._read_file)

    def _join(self, items: slice, read: ReadItems) -> npt.NDArray[Any]:
        """Return consecutive items of all files."""
        low, high, step = items.indices(len(self))
        assert step == 1, items
        parts: list[npt.NDArray[Any]] = []
        index = int(np.searchsorted(self._ends, low, side="right"))
        while low < high:
            file = self._files[index]
            first = int(self._ends[index]) - file.n_items
            end = min(high - first, file.n_items)
            if low - first < end:
                part = read(index, low - first, end)
                if file.offset:
                    part = part + self.dtype.type(file.offset)
                if file.codes is not None:
                    part = file.codes[part]
                parts.append(part)
            low = first + end
            index += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def _read_file(self, index: int, low: int, high: int) -> npt.NDArray[Any]:
        offset = low * self.dtype.itemsize
        return np.fromfile(self._files[index].path, self.dtype, high - low, offset=offset)

    def _map_items(self, index: int, low: int, high: int) -> npt.NDArray[Any]:
        return _map_file(self._files[index], self.dtype)[low:high]


@lru_cache(MAX_MAPS)
def _map_file(file: ArrayFile, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Map a file of one array. Another array maps its path anew, e.g. after a damaged shard was replaced."""
    # A plain array: each slice of a memmap creates another object of that class, which is slow.
    return np.asarray(np.memmap(file.path, dtype, "r", shape=(file.n_items,)))


class ReadItems(Protocol):
    """Function to read items of a file of a `JoinedArray`."""

    def __call__(self, index: int, low: int, high: int, /) -> npt.NDArray[Any]:
        """Return the items `low` to `high` of file `index`."""
        ...
