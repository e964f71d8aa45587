"""Write small Orbax items for tests, with data files from a simple reference encoder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from prepcli.formats.ocdbt import NODE_NBYTES, OcdbtEntry, encode_ocdbt_index
from prepcli.formats.orbax import OrbaxNonArray, encode_item_metadata, write_files
from prepcli.formats.orbax_chunks import WrittenChunk, unplaced_array, unravel_chunk_index
from prepcli.planning.arrays import Array

NOW_NS = 1_700_000_000_123_456_789


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return an array of random bits, with NaN and infinity of all kinds; booleans are 0 and 1.

    An int4 takes a byte, with its sign in the upper bits.
    """
    if dtype == "int4":
        return np.random.default_rng(seed).integers(-8, 8, shape).astype(ml_dtypes.int4)
    high = 2 if dtype == "bool" else 256
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.random.default_rng(seed).integers(
        0, high, math.prod(shape) * numpy_dtype.itemsize, np.uint8
    )
    return bits.view(numpy_dtype).reshape(shape)


def chunk_bytes(array: np.ndarray, chunk: tuple[int, ...], index: tuple[int, ...]) -> bytes:
    """Return the bytes of the chunk at `index`; padding beyond the array's edge has all bits set."""
    part = array[tuple(slice(i * extent, (i + 1) * extent) for i, extent in zip(index, chunk))]
    padded = (
        np.full(math.prod(chunk) * array.dtype.itemsize, 255, np.uint8)
        .view(array.dtype)
        .reshape(chunk)
    )
    padded[tuple(slice(extent) for extent in part.shape)] = part
    return padded.tobytes()


def write_data_files(
    folder: Path, arrays: Mapping[Array, np.ndarray], gap: int = 0
) -> tuple[list[WrittenChunk], list[str]]:
    """Write chunks in reversed order into two data files, with `gap` unused bytes before each."""
    names = ["d/" + "b" * 32, "d/" + "a" * 32]
    (folder / "d").mkdir(parents=True)
    data, chunks = [bytearray(), bytearray()], []
    for array_number, (meta, array) in enumerate(arrays.items()):
        for chunk_number in reversed(range(math.prod(meta.grid.chunk_counts))):
            file = data[(array_number + chunk_number) % 2]
            file += b"\xaa" * gap
            index = unravel_chunk_index(meta.grid.chunk_counts, chunk_number)
            file_number = (array_number + chunk_number) % 2
            chunks.append(
                WrittenChunk(array_number, index, file_number, len(file), meta.chunk_nbytes)
            )
            file += chunk_bytes(array, meta.chunk_shape, index)
    for name, file in zip(names, data):
        (folder / name).write_bytes(file)
    return chunks, names


def write_item(
    folder: Path,
    arrays: Mapping[Array, np.ndarray],
    gap: int = 0,
    non_arrays: Sequence[OrbaxNonArray] = (),
    node_nbytes: int = NODE_NBYTES,
) -> None:
    """Write an item of these arrays."""
    chunks, names = write_data_files(folder, arrays, gap)
    write_metadata(folder, list(arrays), chunks, names, non_arrays, node_nbytes)


def write_metadata(
    folder: Path,
    arrays: Sequence[Array],
    chunks: Sequence[WrittenChunk],
    names: Sequence[str],
    non_arrays: Sequence[OrbaxNonArray] = (),
    node_nbytes: int = NODE_NBYTES,
) -> None:
    """Write the metadata of an item over its data files."""
    files = encode_item_metadata(
        arrays, chunks, names, NOW_NS, non_arrays=non_arrays, node_nbytes=node_nbytes
    )
    write_files(folder, files)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files under `folder` by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write_ocdbt_index(
    folder: Path, entries: Iterable[OcdbtEntry], now_ns: int, node_nbytes: int = NODE_NBYTES
) -> None:
    """Write the index of a database into its folder."""
    write_files(folder, encode_ocdbt_index(entries, now_ns, node_nbytes))


def metadata_of(array: Array) -> Array:
    """Return the metadata of an array of an item, as it was given to the writer."""
    return unplaced_array(array.path, array.shape, array.dtype, array.chunk_shape)
