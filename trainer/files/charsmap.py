"""The growth of texts by a precompiled map of SentencePiece: a trie of keys, and the texts that replace them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

# Longest keys that are searched one by one. Longer keys count with the longest text of the map.
MAX_SEARCHED_NBYTES = 2

# A unit of the trie (Darts-clone, double array) has 32 bits: label in 0-7, leaf flag in 8, wide flag in 9, offset from
# 10 on. The unit of a leaf holds its value in 0-30, with bit 31 set.
LABEL_MASK = 1 << 31 | 0xFF
VALUE_MASK = (1 << 31) - 1


def charsmap_growth(encoded: str) -> float:
    """Return an upper bound of the bytes that a map makes of one byte.

    For example, the map of T5 replaces the 3 bytes of U+FDFA by 33 bytes: its growth is 11.

    Args:
        encoded: The map in base64: the bytes of the trie as uint32, the trie, and texts that end with NUL.

    Raises:
        ValueError: It is malformed.
    """
    data = base64.b64decode(encoded)
    try:
        (trie_nbytes,) = struct.unpack_from("<I", data)
        units = struct.unpack_from(f"<{trie_nbytes // 4}I", data, 4)
    except struct.error as error:
        raise ValueError("its precompiled map is too short") from error
    texts = data[4 + trie_nbytes :]
    longest = max(map(len, texts.split(b"\0")))
    growth = max(1.0, longest / (MAX_SEARCHED_NBYTES + 1))
    for key_nbytes, start in _short_keys(units):
        stop = texts.find(b"\0", start)
        if stop < 0:
            stop = len(texts)
        growth = max(growth, (stop - start) / key_nbytes)
    return growth


def _short_keys(units: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the length of each key of at most MAX_SEARCHED_NBYTES bytes, and the start of its text."""
    if not units:
        return
    nodes = [_offset(units[0])]
    for key_nbytes in range(1, MAX_SEARCHED_NBYTES + 1):
        children: list[int] = []
        for node in nodes:
            for label in range(1, 256):
                position = node ^ label
                if position >= len(units) or units[position] & LABEL_MASK != label:
                    continue
                child = position ^ _offset(units[position])
                children.append(child)
                has_leaf = units[position] >> 8 & 1
                if has_leaf and child < len(units):
                    yield key_nbytes, units[child] & VALUE_MASK
        nodes = children


def _offset(unit: int) -> int:
    """Return the offset of a unit. A wide one is in units of 256."""
    return unit >> 10 << ((unit & 1 << 9) >> 6)
