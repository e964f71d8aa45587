"""Layout of a folder with a Flax or EasyLM checkpoint: the leaf of each tensor, and its location in a file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.engine.blobs import Blob
from prepcli.errors import PrepError
from prepcli.formats.flax_folder import INDEX_FILE, STEM, STREAM_FILE
from prepcli.formats.msgpack import SUFFIX
from prepcli.formats.msgpack_layout import MsgpackLayout, MsgpackLeaf, lay_out_flax, lay_out_stream, sort_paths
from prepcli.formats.safetensors_layout import split_into_shards
from prepcli.planning.gapped_regions import GappedRegion, gaps_between
from prepcli.planning.grids import ChunkGrid, StridedPlacement
from prepcli.planning.plan import Contiguous, Locations, OutputFile, SmallFile, Strided
from prepcli.planning.strided_copies import Region
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import Source, SourceTensor
from trainer.models.axis_map import AxisMap, Row, bind_row
from trainer.models.parameters import layout_rows

STREAM_FORMAT = "stream"
MAX_NAMES = 4

LeafUse = tuple[str, AxisMap, tuple[tuple[str, int], ...]]  # path of the leaf, its axis map, stacked indices


@dataclass(frozen=True, slots=True)
class FlaxFolder:
    """Layout of a Flax folder.

    Attributes:
        files: The data files.
        sides: Locations of each tensor, by name.
        index: The index of several files, otherwise empty.
        num_leaves: Number of leaves.
    """

    files: tuple[OutputFile, ...]
    sides: Mapping[str, Locations]
    index: tuple[SmallFile, ...]
    num_leaves: int


def lay_out_flax_folder(
    source: Source,
    kept_tensors: Sequence[SourceTensor],
    *,
    layout: str,
    container: str,
    vocab_size: int,
    shard_nbytes: int,
) -> FlaxFolder:
    """Lay out the tensors of a source as a Flax folder.

    Args:
        source: The opened source.
        kept_tensors: The tensors to write.
        layout: Name of the layout.
        container: `stream` for one EasyLM stream; otherwise msgpack files as transformers writes them.
        vocab_size: Vocabulary rows in the output.
        shard_nbytes: Largest size of a file.

    Returns:
        The files and the locations of the tensors.

    Raises:
        PrepError: A tensor has no leaf in the layout, or a leaf has no tensor.
    """
    tensors = {tensor.name: tensor for tensor in kept_tensors}
    uses_by_tensor: dict[str, list[LeafUse]] = {}
    for name, use in _leaf_uses(source, layout, tensors, vocab_size):
        uses_by_tensor.setdefault(name, []).append(use)
    _check_layout_complete(source, layout, uses_by_tensor, tensors)
    leaves = {
        tuple(path.split(".")): MsgpackLeaf(tuple(path.split(".")), tensors[name].dtype, row.leaf_shape)
        for name, uses in uses_by_tensor.items()
        for path, row, _ in uses
    }
    groups = [(STREAM_FILE, list(leaves))] if container == STREAM_FORMAT else _shards(leaves, shard_nbytes)
    lay_out = lay_out_stream if container == STREAM_FORMAT else lay_out_flax
    layouts = [lay_out(leaves[path] for path in paths) for _, paths in groups]
    file_numbers = {path: number for number, file_layout in enumerate(layouts) for path in file_layout.runs}
    sides = {
        name: tuple(_locate(use, tensors[name], file_numbers, layouts) for use in uses)
        for name, uses in uses_by_tensor.items()
    }
    files = tuple(
        OutputFile(name, file_layout.size, constant_ranges=file_layout.fixed_bytes)
        for (name, _), file_layout in zip(groups, layouts)
    )
    return FlaxFolder(files, sides, _index_file(groups, leaves), len(leaves))


def _leaf_uses(source: Source, layout: str, tensors: Collection[str], vocab_size: int) -> Iterator[tuple[str, LeafUse]]:
    """Yield each tensor with its leaf; paths have the base prefix if the source's names have it."""
    family, config = source.family, source.config
    sizes = family.sizes(config) | {"vocab": vocab_size}
    for path, row in _layout_rows(source, layout, tensors).items():
        axis_map = bind_row(row, sizes)
        path_template = path if source.names.is_prefixed else path.removeprefix(family.prefix)
        for tensor, stacked_indices in axis_map.tensors():
            yield tensor, (path_template.format(**stacked_indices), axis_map, tuple(stacked_indices.items()))


def _layout_rows(source: Source, layout: str, tensors: Collection[str]) -> dict[str, Row]:
    """Return the axis-map rows of the layout, without the row of a tied head."""
    family = source.family
    rows = layout_rows(family.layouts[layout], source.config)
    has_head = not family.is_tied(source.config) or family.tying.head_tensor in tensors
    return {path: row for path, row in rows.items() if has_head or row.name_parts != (family.tying.head_tensor,)}


def _check_layout_complete(
    source: Source, layout: str, uses_by_tensor: Mapping[str, object], tensors: Mapping[str, SourceTensor]
) -> None:
    """Raise PrepError unless tensors and leaves of the layout match one to one."""
    for verb, names in (
        ("has no place for", tensors.keys() - uses_by_tensor.keys()),
        ("needs", uses_by_tensor.keys() - tensors.keys()),
    ):
        if names:
            listed = ", ".join(source.names.full_name(name) for name in sorted(names)[:MAX_NAMES])
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            raise PrepError(
                f"{source.display_name} cannot be written in the layout {layout}", f"the layout {verb} {listed}{more}"
            )


def _shards(
    leaves: Mapping[tuple[str, ...], MsgpackLeaf], limit_nbytes: int
) -> list[tuple[str, list[tuple[str, ...]]]]:
    entries = [("/".join(p), leaves[p].dtype, leaves[p].shape, leaves[p].nbytes) for p in sort_paths(leaves)]
    groups = split_into_shards(entries, limit_nbytes, STEM, SUFFIX)
    return [(name, [tuple(entry[0].split("/")) for entry in group]) for name, group in groups]


def _index_file(
    groups: Sequence[tuple[str, list[tuple[str, ...]]]], leaves: Mapping[tuple[str, ...], MsgpackLeaf]
) -> tuple[SmallFile, ...]:
    """Return flax_model.msgpack.index.json in the format of transformers, if there are several files."""
    if len(groups) == 1:
        return ()
    weight_map = {"/".join(path): name for name, paths in groups for path in paths}
    total = sum(leaf.nbytes for leaf in leaves.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
    return (SmallFile(INDEX_FILE, text.encode() + b"\n"),)


def _locate(
    use: LeafUse, tensor: SourceTensor, file_numbers: Mapping[tuple[str, ...], int], layouts: Sequence[MsgpackLayout]
) -> Region | GappedRegion:
    path, axis_map, stacked_indices = use
    file = file_numbers[tuple(path.split("."))]
    runs = layouts[file].runs[tuple(path.split("."))]
    zeros = (0,) * len(axis_map.leaf_shape)
    placement = StridedPlacement(file, runs[0][0], zeros, zeros)
    region = Region(
        axis_map,
        stacked_indices,
        ChunkGrid(axis_map.leaf_shape, axis_map.leaf_shape),
        placement,
        itemsize(tensor.dtype),
    )
    return GappedRegion(region, gaps_between(runs)) if len(runs) > 1 else region


# A head that is tied to the embedding


def with_tied_head(source: Source) -> Source:
    """Return the source with the head as a tensor of its own, if the head is tied to the embedding.

    The head reads the bytes of the embedding a second time, from blobs that follow the source's own.
    """
    tie = source.family.tying
    if any(tensor.name == tie.head_tensor for tensor in source.tensors):
        return source
    embedding = next(tensor for tensor in source.tensors if tensor.name == tie.embedding_tensor)
    reads: tuple[Path | Blob, ...] = source.byte_sources
    head = replace(
        embedding,
        name=tie.head_tensor,
        placement=tuple(_shift_blob_numbers(part, len(reads)) for part in embedding.placement),
    )
    return replace(source, tensors=(*source.tensors, head), blobs=(*reads, *reads))


def _shift_blob_numbers(
    part: Contiguous | Strided | Region | GappedRegion, count: int
) -> Contiguous | Strided | Region | GappedRegion:
    """Return the same location with blob numbers increased by `count`."""
    if isinstance(part, GappedRegion):
        return replace(part, region=_shift_blob_numbers(part.region, count))
    if not isinstance(part, Region):
        return replace(part, file=part.file + count)
    if isinstance(part.placement, StridedPlacement):
        return replace(part, placement=replace(part.placement, file=part.placement.file + count))
    chunks = {index: (file + count, offset) for index, (file, offset) in part.placement.chunks.items()}
    return replace(part, placement=replace(part.placement, chunks=chunks))
