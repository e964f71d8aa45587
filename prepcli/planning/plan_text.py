"""Encode a plan as text for its digest.

Manifests, notes and uploads record the digest of this text. Its class and field names are therefore part of the
formats on disk: they are fixed here and may differ from the names in code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from prepcli.algebra.axis_map import AxisMap, SizedAxis, TensorDim, TensorIndex
from prepcli.algebra.chunks import ArrayParts, ChunkTable, StridedChunks
from prepcli.algebra.grids import ChunkGrid
from prepcli.planning.arrays import Array, MappedArray
from prepcli.planning.item_storage import Compression
from prepcli.planning.layout_scales import LayoutScale
from prepcli.planning.plan import (
    DroppedTensor,
    EqualityCheck,
    Fill,
    LowRankUpdate,
    OutputFile,
    OutputLeaf,
    PlacedChunks,
    Plan,
    SmallFile,
    SourceFile,
    Stream,
)

# Class -> its name in the text, and the fields whose names in the text differ from those in code
NAMES: dict[type, tuple[str, dict[str, str]]] = {
    Plan: (
        "Plan",
        {"source_files": "sources", "display_names": "names", "compression": "zstd_level"},
    ),
    SourceFile: ("SourceFile", {}),
    LowRankUpdate: ("Update", {}),
    LayoutScale: ("RootScale", {}),
    Stream: ("Stream", {"reads": "left", "writes": "right", "cast_to": "cast"}),
    ChunkGrid: ("Grid", {"chunk_shape": "chunk"}),
    StridedChunks: ("Lattice", {}),
    AxisMap: ("AxisMap", {"leaf_dims": "leaf", "name_parts": "name", "source_dims": "source"}),
    SizedAxis: ("Factor", {"fixed": "held"}),
    TensorDim: ("TensorDim", {}),
    TensorIndex: ("Choice", {"listed_indices": "numbers"}),
    Fill: ("Fill", {}),
    OutputFile: ("OutFile", {"constant_ranges": "fixed"}),
    SmallFile: ("SmallFile", {}),
    OutputLeaf: ("Leaf", {"placed_chunks": "placed"}),
    PlacedChunks: ("Placed", {"chunks": "places"}),
    DroppedTensor: ("Dropped", {}),
    EqualityCheck: ("Same", {"duplicate_of": "other"}),
    Compression: ("Compression", {}),
}
# Classes with a text of their own. A tensor that is a whole array, a view or a part of an array has the name that its
# class had in the first release.
OWN_TEXTS = (Array, MappedArray, ChunkTable, ArrayParts)
# Fields added after the first release. Without a value they are left out of the text, so that digests of older plans on
# disk stay equal.
ADDED_FIELDS = {"update", "pieces", "columns", "scale", "starts", "item"}


# Name of each encoded field in code, and its name in the text with an equals sign, by class. They are computed once:
# a plan of a large model has 10^5 regions to encode.
_LABELS: dict[type, list[tuple[str, str]]] = {}
for _cls, (_, _names) in NAMES.items():
    _LABELS[_cls] = [(f.name, f"{_names.get(f.name, f.name)}=") for f in fields(_cls) if f.repr]


def iter_text(plan: Plan) -> Iterator[str]:
    """Yield the text of a plan in pieces. The whole text of 200,000 tensors takes hundreds of megabytes."""
    # One axis map serves all tensors of a leaf: its text is made once.
    axis_map_texts: dict[int, str] = {}
    separator = f"{NAMES[Plan][0]}("
    for name, label in _LABELS[Plan]:
        value = getattr(plan, name)
        yield separator + label
        separator = ", "
        if type(value) is not tuple:
            yield encode_text(value, axis_map_texts)
            continue
        yield "("
        for number, item in enumerate(value):
            yield (", " if number else "") + encode_text(item, axis_map_texts)
        yield ",)" if len(value) == 1 else ")"
    yield ")"


def encode_text(value: Any, axis_map_texts: dict[int, str] | None = None) -> str:
    """Return the text that encodes an object of a plan, or a tuple of objects.

    Args:
        value: The part.
        axis_map_texts: Texts of axis maps by `id`, to use and to extend.
    """
    if axis_map_texts is None:
        axis_map_texts = {}
    if type(value) is tuple:
        end = ",)" if len(value) == 1 else ")"
        return "(" + ", ".join([encode_text(item, axis_map_texts) for item in value]) + end
    if type(value) is Array:
        return _array_text(value)
    if type(value) is MappedArray:
        return _mapped_array_text(value, axis_map_texts)
    if type(value) not in NAMES:
        # Of other types, such as int and str, `repr` is stable between versions of Python.
        return repr(value)
    if type(value) is AxisMap and id(value) in axis_map_texts:
        return axis_map_texts[id(value)]
    if type(value) is Compression and value.codec_name == "zstd":
        # The only codec of the first release: its text is the level.
        return repr(value.level)
    field_texts: list[str] = []
    for name, label in _LABELS[type(value)]:
        field = getattr(value, name)
        if field is None and name in ADDED_FIELDS:
            continue
        # Most fields are numbers and need no call.
        if type(field) is tuple or type(field) in NAMES:
            field_texts.append(label + encode_text(field, axis_map_texts))
        else:
            field_texts.append(label + repr(field))
    text = f"{NAMES[type(value)][0]}({', '.join(field_texts)})"
    if type(value) is AxisMap:
        axis_map_texts[id(value)] = text
    return text


def _array_text(array: Array) -> str:
    """Return the text of a whole array or view. Its dtype and shape are in the text of the stream."""
    if isinstance(array.chunks, ArrayParts):
        return _parts_text(array.chunks)
    position = f"file={array.file}, offset={array.offset}"
    if array.strides is None:
        return f"Flat({position})"
    return f"Strided({position}, steps={array.strides})"


def _parts_text(chunks: ArrayParts) -> str:
    """Return the text of parts: (box, file, offset, strides) of each."""
    return f"Parts({', '.join(repr(tuple(part)) for part in chunks.parts)})"


def _mapped_array_text(tensor: MappedArray, axis_map_texts: dict[int, str]) -> str:
    """Return the text of a part of an array."""
    array = tensor.array
    chunks = array.chunks
    grid = array.grid
    if array.strides is not None and isinstance(chunks, StridedChunks):
        # Elements of a view may have gaps. In the text, each of them is a chunk.
        grid = ChunkGrid(array.shape, (1,) * len(array.shape))
        chunks = StridedChunks(chunks.file, chunks.offset, chunks.first, array.strides)
    if isinstance(chunks, ChunkTable):
        positions = {index: chunks.find(index) for index in chunks.indices()}
        places = f"Scatter(chunks={positions})"
    elif isinstance(chunks, ArrayParts):
        places = _parts_text(chunks)
    else:
        places = encode_text(chunks)
    fields = [
        f"row={encode_text(tensor.axis_map, axis_map_texts)}",
        f"at={encode_text(tensor.stacked_indices)}",
        f"grid={encode_text(grid)}",
        f"places={places}",
        f"itemsize={tensor.itemsize}",
    ]
    if tensor.starts is not None:
        fields.append(f"starts={tensor.starts}")
    return f"Region({', '.join(fields)})"
