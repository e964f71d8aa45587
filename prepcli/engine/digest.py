"""Digests: XXH3-128 of a tensor's bytes in C order, and XXH3-64 of checksum blocks."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

ZERO_BLOCK = bytes(1 << 16)
# Dtype of checksums in files.
CHECKSUM_DTYPE = "<u8"


def digest(data: bytes | memoryview) -> str:
    """Return the XXH3-128 of bytes as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_pieces(pieces: Iterable[bytes]) -> str:
    """Return the digest of the concatenation of pieces."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def checksum(data: memoryview) -> int:
    """Return the XXH3-64 of a checksum block. 0 becomes 1, because 0 means an unknown checksum."""
    return xxhash.xxh3_64_intdigest(data) or 1


def digest_of_zeros(nbytes: int) -> str:
    """Return the digest of `nbytes` zero bytes."""
    state = xxhash.xxh3_128()
    for _ in range(nbytes // len(ZERO_BLOCK)):
        state.update(ZERO_BLOCK)
    state.update(ZERO_BLOCK[: nbytes % len(ZERO_BLOCK)])
    return state.hexdigest()
