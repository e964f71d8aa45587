"""Changes of single bits in the files of checkpoints, as damaged disks make them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path


def flip_bit(path: Path, offset: int, bit: int = 0) -> Path:
    """Flip a bit of the byte at an offset, and return the path."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
    return path


def flip_used_bit(path: Path) -> Path:
    """Flip a bit in the second half of a file, but not in the zeros between two tensors."""
    data = path.read_bytes()
    return flip_bit(path, next(n for n in range(len(data) // 2, len(data)) if data[n]))


def largest_file(folder: Path) -> Path:
    """Return the file of a folder with the most bytes."""
    return max(
        (path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size
    )


def tensor_byte_ranges(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name and byte range of every tensor of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            yield name, 8 + size + low, 8 + size + high


def tensor_place(folder: Path, name: str) -> tuple[Path, int, int]:
    """Return the file of a tensor in a folder of safetensors files, and its byte range."""
    for path in sorted(folder.glob("*.safetensors")):
        for tensor, low, high in tensor_byte_ranges(path):
            if tensor == name:
                return path, low, high
    raise AssertionError(f"{folder} has no {name}")
