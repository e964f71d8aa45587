"""safetensors, laid out: headers, file names and index of files that the engine then fills. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from prepcli.errors import PrepError
from prepcli.formats.safetensors import DTYPE_CODES, LENGTH_NBYTES, MAX_HEADER_NBYTES, METADATA_KEY
from prepcli.formats.shard_index import shard_name
from prepcli.planning.tensors import FileTensor, array_bits

PAGE_NBYTES = 4096
ALIGN_NBYTES = 8

LayoutEntry: TypeAlias = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, nbytes
ShardContents: TypeAlias = tuple[str, Sequence[LayoutEntry], int | None]  # file name, entries in layout order, lead


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """A file to be written: `header` from its first byte, tensors gapless after it, `size` bytes in all."""

    name: str
    header: bytes
    tensors: tuple[FileTensor, ...]
    size: int


def encode_header(tensors: Sequence[LayoutEntry], page_offset: int | None = 0) -> bytes:
    """The length and the JSON that precede the payload, padded so that it begins `lead` bytes (mod 4096) into a page.

    Without a lead, or with one that is no multiple of 8 and would leave every tensor unaligned for its readers, the
    payload begins at the next multiple of 8. Tensors follow one another without gaps, in the given order.
    Raises ValueError for a name that is twice there, PrepError for what the format cannot hold.
    """
    ends = list(accumulate((nbytes for *_, nbytes in tensors), initial=0))
    described = {entry[0]: _described(entry, low, high) for entry, low, high in zip(tensors, ends, ends[1:])}
    if len(described) != len(tensors) or METADATA_KEY in described:
        raise ValueError("a tensor is twice there, or has the name that is kept for metadata")
    content = {METADATA_KEY: {"format": "pt"}, **described}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    # Bytes that lie as deep in a page here as in their source can be moved by whole pages, and no CPU touches them.
    unit, start = (
        (PAGE_NBYTES, page_offset) if page_offset is not None and page_offset % ALIGN_NBYTES == 0 else (ALIGN_NBYTES, 0)
    )
    text += b" " * ((start - LENGTH_NBYTES - len(text)) % unit)
    if len(text) > MAX_HEADER_NBYTES:
        why = f"its header takes {len(text):,} bytes, allowed are {MAX_HEADER_NBYTES:,}"
        raise PrepError(f"{len(tensors):,} tensors are too many for one safetensors file", why, "write smaller files")
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text


def lay_out_files(groups: Sequence[ShardContents]) -> tuple[SafetensorsLayout, ...]:
    """Files as they will be, tensors with their offsets; `file` counts the groups. Errors as of `header_bytes`."""
    return tuple(_file_layout(file, *group) for file, group in enumerate(groups))


def split_into_shards(
    entries: Sequence[LayoutEntry], max_shard_nbytes: int, stem: str = "model", suffix: str = "safetensors"
) -> list[tuple[str, list[LayoutEntry]]]:
    """Files of at most `limit_bytes` of payload, in the given order; a larger tensor has a file to itself."""
    groups: list[list[LayoutEntry]] = [[]]
    filled = 0
    for entry in entries:
        nbytes = entry[3]
        if groups[-1] and filled + nbytes > max_shard_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += nbytes
    if len(groups) == 1:
        return [(f"{stem}.{suffix}", groups[0])]
    return [(shard_name(stem, i, len(groups), suffix), group) for i, group in enumerate(groups, 1)]


def encode_index(layouts: Sequence[SafetensorsLayout]) -> bytes:
    """The content of model.safetensors.index.json for these files."""
    weight_map = {tensor.name: layout.name for layout in layouts for tensor in layout.tensors}
    total = sum(tensor.nbytes for layout in layouts for tensor in layout.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def _described(entry: LayoutEntry, low: int, high: int) -> dict[str, object]:
    name, dtype, shape, nbytes = entry
    if array_bits(dtype, shape) != 8 * nbytes:
        why = f"{dtype} {list(shape)} takes {array_bits(dtype, shape):,} bits, {nbytes:,} bytes are given to it"
        raise PrepError(f"{name} cannot be stored as safetensors", why)
    return {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [low, high]}


def _file_layout(file: int, name: str, entries: Sequence[LayoutEntry], lead: int | None) -> SafetensorsLayout:
    header = encode_header(entries, lead)
    offsets = list(accumulate((nbytes for *_, nbytes in entries), initial=len(header)))
    tensors = tuple(
        FileTensor(tensor, dtype, shape, file, offset, nbytes)
        for (tensor, dtype, shape, nbytes), offset in zip(entries, offsets)
    )
    return SafetensorsLayout(name, header, tensors, offsets[-1])
