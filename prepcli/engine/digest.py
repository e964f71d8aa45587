"""Digests: XXH3-128 of a tensor's bytes as its file holds them, which is what any tool computes; XXH3-64 of parts."""

from __future__ import annotations

import xxhash

ZERO_BLOCK = bytes(1 << 16)
CHECKSUM_DTYPE = "<u8"  # of checksums in a file


def digest(data: bytes | memoryview) -> str:
    """XXH3-128, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum(data: memoryview) -> int:
    """XXH3-64 of a checksum block; 1 in place of 0, which stands for unknown."""
    return xxhash.xxh3_64_intdigest(data) or 1


def digest_of_zeros(nbytes: int) -> str:
    """The digest of so many zero bytes."""
    state = xxhash.xxh3_128()
    for _ in range(nbytes // len(ZERO_BLOCK)):
        state.update(ZERO_BLOCK)
    state.update(ZERO_BLOCK[: nbytes % len(ZERO_BLOCK)])
    return state.hexdigest()
