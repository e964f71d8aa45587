"""`prep-checksums.bin`: the XXH3-64 of every checksum block, so that readers of parts can check what they read.

The file is little-endian uint64 in the order of `planning.checksum_blocks`; the manifest records its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prepcli.engine.digest import CHECKSUM_DTYPE, checksum, digest
from prepcli.engine.no_follow import write_no_follow
from prepcli.errors import PrepError
from prepcli.formats.orbax import ArrayMeta
from prepcli.formats.untrusted import read_small_file
from prepcli.planning.checksum_blocks import BLOCK_NBYTES, LeafBlocks, number_blocks

CHECKSUMS_FILE = "prep-checksums.bin"
CHECKSUM_METHOD = "xxh3_64"
REBUILD_HINT = "make the checkpoint anew, or `--no-verify`"
MAX_CHECKSUMS_NBYTES = 1 << 30  # of the file: sums of 128 TiB in blocks of 1 MiB


@dataclass(frozen=True, slots=True, eq=False)
class BlockChecksums:
    """The recorded sums of a checkpoint's blocks."""

    leaves: Mapping[str, LeafBlocks]
    sums: npt.NDArray[np.uint64]

    def first_damaged_block(
        self, leaf_name: str, chunk_index: Sequence[int], start: int, data: npt.NDArray[np.uint8]
    ) -> tuple[int, int] | None:
        """Bytes of the first block that differs from its sum; None where all agree.

        Args:
            name: Leaf.
            index: Chunk of the leaf.
            start: Byte of the chunk where `data` begins, at the edge of a block.
            data: Whole blocks of the chunk.
        """
        blocks = self.leaves[leaf_name]
        first = blocks.first_in_chunk(chunk_index)
        for block in blocks.per_chunk.overlapping(start, start + data.size):
            if checksum(data[block.start - start : block.stop - start].data) != self.sums[first + block.number]:
                return block.start, block.stop
        return None


def write_checksums(folder: Path, sums: npt.NDArray[np.uint64]) -> dict[str, Any]:
    """Write the file; return what the manifest says of it."""
    data = sums.astype(CHECKSUM_DTYPE).tobytes()
    write_no_follow(folder / CHECKSUMS_FILE, data)
    return {"file": CHECKSUMS_FILE, "method": CHECKSUM_METHOD, "block": BLOCK_NBYTES, "digest": digest(data)}


def read_checksums(folder: Path, manifest: Mapping[str, Any], arrays: Sequence[ArrayMeta]) -> BlockChecksums | None:
    """Read the sums of an item's arrays; None where the manifest names none.

    Raises:
        PrepError: The file is missing, differs from its digest, or has a form that this version does not read.
    """
    data = read_checksum_bytes(folder, manifest)
    if data is None:
        return None
    leaves = _numbered(folder, manifest, arrays)
    wanted = np.dtype(CHECKSUM_DTYPE).itemsize * max((blocks.stop_number for blocks in leaves.values()), default=0)
    if len(data) != wanted:
        raise PrepError(
            f"{folder / CHECKSUMS_FILE} is broken", f"it has {len(data):,} bytes, not {wanted:,}", REBUILD_HINT
        )
    return BlockChecksums(leaves, np.frombuffer(data, CHECKSUM_DTYPE))


def read_checksum_bytes(folder: Path, manifest: Mapping[str, Any]) -> bytes | None:
    """Read the file that the manifest names, checked against its digest; None where it names none."""
    record = manifest.get("checksums")
    if record is None:
        return None
    path = folder / CHECKSUMS_FILE
    says = [record.get(key) for key in ("file", "method", "block")] if isinstance(record, dict) else record
    if says != [CHECKSUMS_FILE, CHECKSUM_METHOD, BLOCK_NBYTES]:
        why = f"the manifest says {says!r:.80}, this prep reads {CHECKSUM_METHOD} of {BLOCK_NBYTES:,} bytes"
        raise PrepError(f"{path} is of another format", why, "a later prep, or `--no-verify`")
    data = read_small_file(path, MAX_CHECKSUMS_NBYTES)
    if digest(data) != record.get("digest"):
        raise PrepError(
            f"{path} is damaged", "its bytes differ from the digest that the manifest records", REBUILD_HINT
        )
    return data


def _numbered(folder: Path, manifest: Mapping[str, Any], arrays: Sequence[ArrayMeta]) -> dict[str, LeafBlocks]:
    """The blocks of the arrays, in the order of the manifest's leaves."""
    metas, listed = {meta.name: meta for meta in arrays}, manifest.get("leaves")
    if not isinstance(listed, dict) or {*listed} != {*metas}:
        raise PrepError(f"{folder} is damaged", "its manifest lists other leaves than it holds", "make it anew")
    return number_blocks((name, metas[name].shape, metas[name].chunk_shape, metas[name].dtype) for name in listed)
