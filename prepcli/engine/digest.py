"""Digests: of the bytes of tensors, of prep's own records and small files, and of checksum blocks.

`TensorDigest` alone names and computes the digest of tensors: another algorithm is a change of this class. The digest
of records is XXH3-128, and the checksum of a block is XXH3-64.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

ZERO_BLOCK = bytes(1 << 16)
# Dtype of checksums in files.
CHECKSUM_DTYPE = "<u8"
# Algorithm of the tensors of a manifest that names none.
UNNAMED_ALGORITHM = "xxh3-128"


class TensorDigest:
    """Digest of a tensor's bytes in C order, computed piece by piece.

    Attributes:
        algorithm: Name of the algorithm in manifests and locks.

    Example:
        >>> digest = TensorDigest(b"ab")
        >>> digest.update(b"cd")
        >>> digest.hexdigest() == TensorDigest(b"abcd").hexdigest()
        True
    """

    algorithm = "xxh3-128"

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._state = xxhash.xxh3_128(data)

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._state.update(data)

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far, as lower-case hexadecimal digits."""
        return self._state.hexdigest()


# The digest of a tensor without elements.
EMPTY_TENSOR_DIGEST = TensorDigest().hexdigest()


def tensor_digest_of_zeros(nbytes: int) -> str:
    """Return the digest of a tensor of `nbytes` zero bytes."""
    digest = TensorDigest()
    for _ in range(nbytes // len(ZERO_BLOCK)):
        digest.update(ZERO_BLOCK)
    digest.update(ZERO_BLOCK[: nbytes % len(ZERO_BLOCK)])
    return digest.hexdigest()


def record_digest(data: bytes | memoryview) -> str:
    """Return the XXH3-128 of a record, a header or a small file as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def record_digest_of_pieces(pieces: Iterable[bytes]) -> str:
    """Return the `record_digest` of the concatenation of pieces."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def block_checksum(data: memoryview) -> int:
    """Return the XXH3-64 of a checksum block. 0 becomes 1, because 0 means an unknown checksum."""
    return xxhash.xxh3_64_intdigest(data) or 1
