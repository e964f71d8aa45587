"""The growth of texts by a precompiled map of SentencePiece: a trie of keys, and the texts that replace them.

Maps are untrusted: the time is linear in the size of a map.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

import numpy as np

# Longest keys that are searched one by one. Longer keys count with the longest text of the map.
MAX_SEARCHED_NBYTES = 2
BLOCK_NBYTES = 1 << 20

# A unit of the trie (Darts-clone, double array) has 32 bits: label in 0-7, leaf flag in 8, wide flag in 9, offset from
# 10 on. The unit of a leaf holds its value in 0-30, with bit 31 set.
LABEL_MASK = np.uint32(1 << 31 | 0xFF)
VALUE_MASK = np.uint32((1 << 31) - 1)
LEAF_FLAG = np.uint32(1 << 8)
WIDE_FLAG = np.uint32(1 << 9)


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
        units = np.frombuffer(data, "<u4", count=trie_nbytes // 4, offset=4)
    except (struct.error, ValueError) as error:
        raise ValueError("its precompiled map is too short") from error
    texts = data[4 + trie_nbytes :]
    growth = max(1.0, _longest_text(texts) / (MAX_SEARCHED_NBYTES + 1))
    for key_nbytes, starts in _short_keys(units):
        growth = max(growth, _longest_text_from(texts, starts) / key_nbytes)
    return growth


def _longest_text(texts: bytes) -> int:
    """Return the most bytes between two NULs."""
    octets = np.frombuffer(texts, np.uint8)
    longest = 0
    last_stop = -1
    for first in range(0, octets.size, BLOCK_NBYTES):
        stops = first + np.flatnonzero(octets[first : first + BLOCK_NBYTES] == 0)
        if stops.size:
            longest = max(longest, int(np.diff(stops, prepend=last_stop).max()) - 1)
            last_stop = int(stops[-1])
    return max(longest, octets.size - last_stop - 1)


def _longest_text_from(texts: bytes, starts: np.ndarray) -> int:
    """Return the most bytes from one of the starts to the next NUL. The starts are sorted."""
    longest = 0
    stop = -1
    for start in starts.tolist():
        # A start before the last NUL found has the same one, so each byte is searched once.
        if start > stop:
            stop = texts.find(b"\0", start)
            if stop < 0:
                stop = len(texts)
        longest = max(longest, stop - start)
    return longest


def _short_keys(units: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each number of key bytes up to MAX_SEARCHED_NBYTES, and the starts of the texts of such keys, sorted."""
    if not units.size:
        return
    labels = units & LABEL_MASK
    # A step from a node by a key byte leads to the unit `node ^ byte`, which must have this byte as its label.
    positions = np.flatnonzero((labels >= 1) & (labels <= 0xFF)).astype(np.uint32)
    parents = positions ^ labels[positions]
    children = positions ^ _offsets(units[positions])
    has_leaf = (units[positions] & LEAF_FLAG != 0) & (children < units.size)
    nodes = _offsets(units[:1])
    for key_nbytes in range(1, MAX_SEARCHED_NBYTES + 1):
        is_reached = np.isin(parents, nodes)
        leaves = children[is_reached & has_leaf]
        yield key_nbytes, np.unique(units[leaves] & VALUE_MASK)
        nodes = children[is_reached]


def _offsets(units: np.ndarray) -> np.ndarray:
    """Return the offset of each unit. A wide one is in units of 256."""
    offsets = units >> np.uint32(10)
    return np.where(units & WIDE_FLAG, offsets << np.uint32(8), offsets)
