"""Digests: of the bytes of tensors, of prep's own records and small files, and of checksum blocks.

`ALGORITHMS` has the digests of tensors: another algorithm is a row there. The digest of records is XXH3-128, and the
checksum of a block is XXH3-64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import xxhash

from prepcli.planning.tensors import DEFAULT_DIGEST

ZERO_BLOCK = bytes(1 << 16)
# Dtype of checksums in files.
CHECKSUM_DTYPE = "<u8"

# --- Digests of tensors


class _State(Protocol):
    """State of an algorithm, as in hashlib."""

    @property
    def digest_size(self) -> int: ...

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


# Algorithms of the digests of tensors, by their names in manifests and locks. A digest begins with the name of its
# algorithm, e.g. `sha256:9f86...`. Digests of the first algorithm have no name, as in the first release.
ALGORITHMS: dict[str, Callable[[], _State]] = {DEFAULT_DIGEST: xxhash.xxh3_128}


def algorithm_of(digest: str) -> str:
    """Return the algorithm of a recorded digest. With an unknown name it is the default, and no digest is equal."""
    name, _, _ = digest.rpartition(":")
    return name if name in ALGORITHMS else DEFAULT_DIGEST


def digest_pattern() -> str:
    """Return the regular expression of a valid digest."""
    patterns: list[str] = []
    for name, make_state in ALGORITHMS.items():
        patterns.append(f"^{_prefix(name)}[0-9a-f]{{{2 * make_state().digest_size}}}$")
    return "|".join(patterns)


def _prefix(algorithm: str) -> str:
    return "" if algorithm == DEFAULT_DIGEST else f"{algorithm}:"


class TensorDigest:
    """Digest of a tensor's bytes in C order, computed piece by piece.

    Example:
        >>> digest = TensorDigest(b"ab")
        >>> digest.update(b"cd")
        >>> digest.text() == TensorDigest(b"abcd").text()
        True
    """

    def __init__(self, data: bytes | memoryview = b"", algorithm: str = DEFAULT_DIGEST) -> None:
        """Start with the first bytes."""
        self._prefix = _prefix(algorithm)
        self._state = ALGORITHMS[algorithm]()
        self._state.update(data)

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._state.update(data)

    def text(self) -> str:
        """Return the digest of all bytes so far, as manifests record it."""
        return self._prefix + self._state.hexdigest()


def tensor_digest_of_zeros(nbytes: int, algorithm: str = DEFAULT_DIGEST) -> str:
    """Return the digest of a tensor of `nbytes` zero bytes."""
    digest = TensorDigest(algorithm=algorithm)
    for _ in range(nbytes // len(ZERO_BLOCK)):
        digest.update(ZERO_BLOCK)
    digest.update(ZERO_BLOCK[: nbytes % len(ZERO_BLOCK)])
    return digest.text()


# --- Digests of streams


@dataclass(frozen=True, slots=True)
class CastCounts:
    """Counts over changed values.

    Attributes:
        values: Number of values.
        changed: Values with another number after the change.
        overflowed: Finite values with an infinite result, or NaN by an update.
        underflowed: Nonzero values with the result 0.
        nan: Values that are NaN after the change. A cast keeps NaN, an update may add some.
        worst: Largest relative error over finite, nonzero values.
    """

    values: int = 0
    changed: int = 0
    overflowed: int = 0
    underflowed: int = 0
    nan: int = 0
    worst: float = 0.0

    def __add__(self, other: CastCounts) -> CastCounts:
        return CastCounts(
            self.values + other.values,
            self.changed + other.changed,
            self.overflowed + other.overflowed,
            self.underflowed + other.underflowed,
            self.nan + other.nan,
            max(self.worst, other.worst),
        )


@dataclass(frozen=True, slots=True)
class StreamDigest:
    """The digests of a completed stream.

    Attributes:
        read: Digest of the bytes read.
        written: Digest of the written bytes. It differs from `read` only after a change of values.
        counts: Counts of the changed values, or None if no value can change.
        unscaled: Digest of the values before a scale, or empty without one.
        lost: Number of values changed by a scale and its way back.
    """

    read: str
    written: str
    counts: CastCounts | None = None
    unscaled: str = ""
    lost: int = 0

    @classmethod
    def of_empty(cls, algorithm: str) -> StreamDigest:
        """Return the digest of a stream without bytes."""
        digest = TensorDigest(algorithm=algorithm).text()
        return cls(digest, digest)

    @property
    def recorded(self) -> str:
        """Digest of the tensor for the manifest. It does not depend on the scale of a layout."""
        return self.unscaled or self.written

    def encode(self) -> str:
        """Return the digests as one word, as notes of a run have them. Without a cast it is a single digest."""
        if self.counts is None:
            return self.read
        # The hexadecimal form of a float is exact, so that a resumed run reports the same error.
        *numbers, worst = dataclasses.astuple(self.counts)
        words = [self.read, self.written, *map(str, numbers), float(worst).hex()]
        if self.unscaled:
            words += [self.unscaled, str(self.lost)]
        return ":".join(words)

    @classmethod
    def decode(cls, text: str) -> StreamDigest:
        """Return the digests in the word of a note. Raise ValueError for another text."""
        words: list[str] = []
        for word in text.split(":"):
            if words and words[-1] in ALGORITHMS:
                # The name of an algorithm belongs to the digest after it.
                words[-1] += f":{word}"
            else:
                words.append(word)
        match words:
            case [read]:
                return cls(read, read)
            case [read, written, values, changed, overflowed, underflowed, nan, worst, *scaled]:
                numbers = map(int, (values, changed, overflowed, underflowed, nan))
                counts = CastCounts(*numbers, worst=float.fromhex(worst))
                unscaled, lost = scaled or ("", "0")
                return cls(read, written, counts, unscaled, int(lost))
        raise ValueError("it is not the digest of a stream")


# --- Digests of records, and checksums of blocks


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
