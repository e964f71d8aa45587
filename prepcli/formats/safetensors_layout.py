"""Lay out safetensors files: headers, file names and index. The functions are pure. The engine writes the payloads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from prepcli.core.errors import Command, PrepError, text
from prepcli.formats.safetensors import DTYPE_CODES, LENGTH_NBYTES, MAX_HEADER_NBYTES, METADATA_KEY
from prepcli.formats.shard_index import shard_name
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.tensors import array_bits

PAGE_NBYTES = 4096
ALIGN_NBYTES = 8

LayoutEntry: TypeAlias = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, nbytes
# File name, entries in layout order, page offset.
ShardContents: TypeAlias = tuple[str, Sequence[LayoutEntry], int | None]


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """Layout of a file to write: `header`, then tensors without gaps. `size` bytes in total."""

    name: str
    header: bytes
    tensors: tuple[Array, ...]
    size: int


def encode_header(tensors: Sequence[LayoutEntry], page_offset: int | None = 0) -> bytes:
    """Return the length and the JSON header that precede the payload, padded to align the payload.

    Args:
        tensors: Entries in layout order. Their payloads follow each other without gaps.
        page_offset: Offset of the payload in a page, modulo 4096. None, or an offset that is not a multiple of 8,
            aligns the payload to the next multiple of 8.

    Raises:
        ValueError: A name occurs twice.
        PrepError: The dtype or shape of a tensor does not match its size, its name is reserved for metadata, or the
            header is too large.
    """
    ends = list(accumulate((nbytes for *_, nbytes in tensors), initial=0))
    header_entries = {
        entry[0]: _describe_tensor(entry, start_offset, stop_offset)
        for entry, start_offset, stop_offset in zip(tensors, ends, ends[1:])
    }
    if len(header_entries) != len(tensors):
        raise ValueError("a tensor name occurs twice")
    if METADATA_KEY in header_entries:
        raise PrepError(
            f"no tensor of a safetensors file has the name {METADATA_KEY}",
            "the format reserves it for metadata",
            "rename the tensor in the source",
        )
    content = {METADATA_KEY: {"format": "pt"}, **header_entries}
    header = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    # A payload with the same page offset as its source can be copied by whole pages without the CPU.
    if page_offset is not None and page_offset % ALIGN_NBYTES == 0:
        alignment = PAGE_NBYTES
        target_offset = page_offset
    else:
        alignment = ALIGN_NBYTES
        target_offset = 0
    # Spaces after the JSON move the payload: to a multiple of 8, or to the page offset of the
    # source. e.g. page 4096, offset 64 in the page, header of 100: 100 + pad + 8 = 4160
    header += b" " * ((target_offset - LENGTH_NBYTES - len(header)) % alignment)
    if len(header) > MAX_HEADER_NBYTES:
        why = f"its header takes {len(header):,} bytes, the limit is {MAX_HEADER_NBYTES:,}"
        raise PrepError(
            f"{len(tensors):,} tensors are too many for one safetensors file",
            why,
            "write smaller files",
        )
    return len(header).to_bytes(LENGTH_NBYTES, "little") + header


def lay_out_files(files: Sequence[ShardContents]) -> tuple[SafetensorsLayout, ...]:
    """Return the layout of each file with the offsets of its tensors. Raises the errors of `encode_header`."""
    return tuple(
        _lay_out_file(file_number, *contents) for file_number, contents in enumerate(files)
    )


def split_into_shards(
    entries: Sequence[LayoutEntry],
    max_shard_nbytes: int,
    stem: str = "model",
    suffix: str = "safetensors",
) -> list[tuple[str, list[LayoutEntry]]]:
    """Split entries into files of at most `max_shard_nbytes` of payload. A larger tensor gets a separate file.

    Args:
        entries: Entries in layout order.
        max_shard_nbytes: Limit of a file's payload.
        stem: Start of the file names.
        suffix: Suffix of the file names, without the dot.

    Returns:
        File name and entries of each file, in order.
    """
    groups: list[list[LayoutEntry]] = [[]]
    group_nbytes = 0
    for entry in entries:
        nbytes = entry[3]
        if groups[-1] and group_nbytes + nbytes > max_shard_nbytes:
            groups.append([])
            group_nbytes = 0
        groups[-1].append(entry)
        group_nbytes += nbytes
    if len(groups) == 1:
        return [(f"{stem}.{suffix}", groups[0])]
    return [(shard_name(stem, i, len(groups), suffix), group) for i, group in enumerate(groups, 1)]


def encode_index(layouts: Sequence[SafetensorsLayout]) -> bytes:
    """Return the content of model.safetensors.index.json for these files."""
    weight_map: dict[str, str] = {}
    total_nbytes = 0
    for layout in layouts:
        for tensor in layout.tensors:
            weight_map[tensor.name] = layout.name
            total_nbytes += tensor.nbytes
    index = {
        "metadata": {"total_size": total_nbytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def _describe_tensor(entry: LayoutEntry, start: int, stop: int) -> dict[str, object]:
    name, dtype, shape, nbytes = entry
    if array_bits(dtype, shape) != 8 * nbytes:
        why = f"{dtype} {list(shape)} takes {array_bits(dtype, shape):,} bits, its entry has {nbytes:,} bytes"
        hint = "this is a bug in prep: nothing was written"
        raise PrepError(f"{name} cannot be stored as safetensors", why, hint)
    if dtype not in DTYPE_CODES:
        why = "safetensors has no such dtype"
        raise PrepError(f"{name} is {dtype}", why, text("{} keeps it", Command("reshard")))
    return {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [start, stop]}


def _lay_out_file(
    file_number: int, name: str, entries: Sequence[LayoutEntry], page_offset: int | None
) -> SafetensorsLayout:
    header = encode_header(entries, page_offset)
    offsets = list(accumulate((nbytes for *_, nbytes in entries), initial=len(header)))
    tensors = tuple(
        whole_array(tensor, dtype, shape, (file_number, offset))
        for (tensor, dtype, shape, _), offset in zip(entries, offsets)
    )
    return SafetensorsLayout(name, header, tensors, offsets[-1])
