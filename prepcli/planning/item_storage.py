"""Storage forms of the arrays of an Orbax item, and the compression of their chunks.

A form decides the names of chunks, the metadata documents of arrays, and whether an item has one database or one file
per chunk. This module imports no NumPy: every start of `prep` reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from prepcli.algebra.grids import ChunkIndex

# The values of `--storage`.
StorageName = Literal["ocdbt", "files", "zarr3", "zarr3-files"]


# File with the metadata of an item, as Orbax and as Levanter name it.
METADATA_FILE = "_METADATA"
LEVANTER_METADATA_FILE = "metadata.json"


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Encoding of chunk indices as keys. The prefix `c` is the default of zarr 3."""

    has_prefix: bool
    separator: str

    def key(self, index: Iterable[int | str]) -> str:
        """Return the key of a chunk without the name of its array.

        >>> ZARR2.chunk_keys.key((0, 3)), ZARR3.chunk_keys.key((0, 3))
        ('0.3', 'c/0/3')
        >>> ZARR2.chunk_keys.key(()), ZARR3.chunk_keys.key(())
        ('0', 'c')
        """
        numbers = self.separator.join(map(str, index))
        if not self.has_prefix:
            return numbers or "0"
        return f"c{self.separator}{numbers}" if numbers else "c"

    def keys(self, labels: Sequence[Sequence[str]]) -> Iterator[str]:
        """Yield the keys of the chunks with each combination of labels, one of each axis, the last one fastest."""
        if not labels:
            yield self.key(())
            return
        start = f"c{self.separator}" if self.has_prefix else ""
        # A 13B model has 10^5 chunks.
        for numbers in map(self.separator.join, itertools.product(*labels)):
            yield start + numbers


@dataclass(frozen=True, slots=True)
class ZarrVersion:
    """A version of zarr: the file name of an array's metadata document, and the keys of chunks as prep writes them."""

    number: int
    document: str
    chunk_keys: ChunkKeys


ZARR2 = ZarrVersion(2, ".zarray", ChunkKeys(False, "."))
ZARR3 = ZarrVersion(3, "zarr.json", ChunkKeys(True, "/"))


@dataclass(frozen=True, slots=True)
class ItemStorage:
    """Storage of the arrays of an item.

    Attributes:
        name: Value of the manifest's key `storage`.
        zarr: Version of the arrays.
        has_chunk_files: Whether each array is a folder, and each chunk a file. Otherwise the item has one OCDBT
            database.
        metadata_file: File that describes the item.
        name_separator: Text between the parts of a path in the name of an array.
    """

    name: str
    zarr: ZarrVersion
    has_chunk_files: bool = False
    metadata_file: str = METADATA_FILE
    name_separator: str = "."

    def chunk_path(self, array_name: str, index: ChunkIndex) -> str:
        """Return the path of a chunk in an item of files, e.g. `params.embed/0.3` or `params.embed/c/0/3`."""
        return f"{array_name}/{self.zarr.chunk_keys.key(index)}"


OCDBT = ItemStorage("ocdbt", ZARR2)
LEVANTER = ItemStorage("levanter", ZARR3, metadata_file=LEVANTER_METADATA_FILE, name_separator="/")
OCDBT_ZARR3 = ItemStorage("zarr3", ZARR3)
# The forms of Orbax items, by the value of `--storage`.
ORBAX_STORAGES: dict[StorageName, ItemStorage] = {
    "ocdbt": OCDBT,
    "files": ItemStorage("files", ZARR2, has_chunk_files=True),
    "zarr3": OCDBT_ZARR3,
    "zarr3-files": ItemStorage("zarr3-files", ZARR3, has_chunk_files=True),
}
_STORAGES = {storage.name: storage for storage in (*ORBAX_STORAGES.values(), LEVANTER)}


def recorded_storage(name: str | None) -> ItemStorage:
    """Return the recorded storage. A manifest has no record of the default, an OCDBT database of zarr 2."""
    return _STORAGES.get(name or OCDBT.name, OCDBT)


@dataclass(frozen=True, slots=True)
class Compression:
    """Codec and level of compressed chunks. The text is the value of `--compress` and of the manifest's key."""

    codec_name: str
    level: int

    def __str__(self) -> str:
        """Return e.g. `zstd:1`."""
        return f"{self.codec_name}:{self.level}"
