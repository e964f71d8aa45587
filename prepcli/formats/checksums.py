"""Read and write `prep-checksums.bin`, the XXH3-64 checksum of every checksum block.

A reader of part of a checkpoint checks only the blocks of that part. The file holds little-endian uint64 values in the
order of `planning.arrays`. The manifest records the digest of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.json_values import JsonObject
from prepcli.engine.digest import CHECKSUM_DTYPE, block_checksum, record_digest
from prepcli.planning.arrays import BLOCK_NBYTES, Array, LeafBlocks, assign_block_numbers
from prepcli.planning.manifest_fields import Manifest
from prepcli.stores.files import read_small_file
from prepcli.stores.paths import AnyPath

CHECKSUMS_FILE = "prep-checksums.bin"
CHECKSUM_METHOD = "xxh3_64"
REBUILD_HINT = text("create the checkpoint again, or pass {}", Option("verify", False))
# Size of the file: checksums of 128 TiB in blocks of 1 MiB.
MAX_CHECKSUMS_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class BlockChecksums:
    """Recorded checksums of a checkpoint's blocks."""

    leaves: Mapping[str, LeafBlocks]
    sums: npt.NDArray[np.uint64]

    def first_damaged_block(
        self, leaf_name: str, chunk_index: Sequence[int], start: int, data: npt.NDArray[np.uint8]
    ) -> tuple[int, int] | None:
        """Return the byte range in the chunk of the first block that differs from its checksum.

        Args:
            leaf_name: Name of the leaf.
            chunk_index: Index of the chunk in the leaf's grid.
            start: Offset of `data` in the chunk, a multiple of the block size.
            data: Whole blocks of the chunk.

        Returns:
            Start and stop offset of the block in the chunk. None if all blocks match.
        """
        blocks = self.leaves[leaf_name]
        first_number = blocks.first_in_chunk(chunk_index)
        for block in blocks.per_chunk.overlapping(start, start + data.size):
            if (
                block_checksum(data[block.start - start : block.stop - start].data)
                != self.sums[first_number + block.number]
            ):
                return block.start, block.stop
        return None


def encode_checksums(
    sums: npt.NDArray[np.uint64],
) -> tuple[bytes, dict[str, str | int]]:
    """Return the content of the checksum file, and its record for the manifest."""
    data = sums.astype(CHECKSUM_DTYPE).tobytes()
    record: dict[str, str | int] = {
        "file": CHECKSUMS_FILE,
        "method": CHECKSUM_METHOD,
        "block": BLOCK_NBYTES,
        "digest": record_digest(data),
    }
    return data, record


def read_checksums(
    folder: AnyPath, manifest: Manifest, arrays: Sequence[Array]
) -> BlockChecksums | None:
    """Read the block checksums of an Orbax item.

    Returns:
        The checksums. None if the manifest records no checksum file.
    """
    data = read_checksum_bytes(folder, manifest)
    if data is None:
        return None
    metas = {meta.name: meta for meta in arrays}
    if manifest.leaves is None or manifest.leaves.keys() != metas.keys():
        why = "its manifest lists other leaves than it holds"
        raise DamagedError(f"{folder} is damaged", why, GET_AGAIN_HINT)
    leaves = assign_block_numbers(
        (name, metas[name].shape, metas[name].chunk_shape, metas[name].dtype)
        for name in manifest.leaves
    )
    expected_nbytes = np.dtype(CHECKSUM_DTYPE).itemsize * max(
        (blocks.stop_number for blocks in leaves.values()), default=0
    )
    # Block numbers come from the shapes in the index, sums from this file: a length that differs
    # would compare blocks with the checksums of others.
    if len(data) != expected_nbytes:
        raise DamagedError(
            f"{folder / CHECKSUMS_FILE} is broken",
            f"it has {len(data):,} bytes, not {expected_nbytes:,}",
            REBUILD_HINT,
        )
    return BlockChecksums(leaves, np.frombuffer(data, CHECKSUM_DTYPE))


def read_checksum_bytes(folder: AnyPath, manifest: Manifest) -> bytes | None:
    """Return the bytes of the checksum file, checked against the manifest's digest. None if the manifest has none."""
    record = manifest.checksums
    if record is None:
        return None
    path = folder / CHECKSUMS_FILE
    fields: JsonObject = {}
    stored_format: object = record
    if isinstance(record, dict):
        fields = record
        stored_format = [fields.get(key) for key in ("file", "method", "block")]
    if stored_format != [CHECKSUMS_FILE, CHECKSUM_METHOD, BLOCK_NBYTES]:
        why = (
            f"the manifest records {stored_format!r:.80}, this version of prep reads {CHECKSUM_METHOD} of blocks of "
            f"{BLOCK_NBYTES:,} bytes"
        )
        hint = text("install a later version of prep, or pass {}", Option("verify", False))
        raise PrepError(f"{path} has an unsupported format", why, hint)
    data = read_small_file(path, MAX_CHECKSUMS_NBYTES)
    if record_digest(data) != fields.get("digest"):
        raise DamagedError(
            f"{path} is damaged",
            "its bytes differ from the digest that the manifest records",
            REBUILD_HINT,
        )
    return data
