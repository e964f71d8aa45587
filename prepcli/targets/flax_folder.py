"""A folder with a Flax or EasyLM checkpoint as an output: which leaf has which tensor, and where in which file."""

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

LeafUse = tuple[str, AxisMap, tuple[tuple[str, int], ...]]  # the path of a leaf, its row, which of the row's tensors


@dataclass(frozen=True, slots=True)
class FlaxFolder:
    """The files, where each tensor goes, the index of several files, and how many leaves there are."""

    files: tuple[OutputFile, ...]
    sides: Mapping[str, Locations]
    index: tuple[SmallFile, ...]
    num_leaves: int


def lay_out_flax_folder(
    source: Source,
    kept_tensors: Sequence[SourceTensor],
    layout: str,
    container: str,
    vocab_size: int,
    shard_nbytes: int,
) -> FlaxFolder:
    """The leaves of a layout made of tensors, with `vocab` rows of vocabulary. PrepError where one has no place, or a
    leaf nothing to be made of."""
    tensors = {tensor.name: tensor for tensor in kept_tensors}
    taken: dict[str, list[LeafUse]] = {}
    for name, use in _leaf_uses(source, layout, tensors, vocab_size):
        taken.setdefault(name, []).append(use)
    _check_layout_complete(source, layout, taken, tensors)
    leaves = {
        tuple(path.split(".")): MsgpackLeaf(tuple(path.split(".")), tensors[name].dtype, row.leaf_shape)
        for name, uses in taken.items()
        for path, row, _ in uses
    }
    groups = [(STREAM_FILE, list(leaves))] if container == STREAM_FORMAT else _shards(leaves, shard_nbytes)
    make = lay_out_stream if container == STREAM_FORMAT else lay_out_flax
    layouts = [make(leaves[path] for path in paths) for _, paths in groups]
    holders = {path: number for number, found in enumerate(layouts) for path in found.runs}
    sides = {name: tuple(_side(use, tensors[name], holders, layouts) for use in uses) for name, uses in taken.items()}
    files = tuple(
        OutputFile(name, found.size, constant_ranges=found.fixed_bytes) for (name, _), found in zip(groups, layouts)
    )
    return FlaxFolder(files, sides, _index_file(groups, leaves), len(leaves))


def _leaf_uses(source: Source, layout: str, tensors: Collection[str], vocab_size: int) -> Iterator[tuple[str, LeafUse]]:
    """Which tensor goes to which leaf, by its path with the base prefix if the source's names have it."""
    family, config = source.family, source.config
    sizes = family.sizes(config) | {"vocab": vocab_size}
    for path, row in _layout_rows(source, layout, tensors).items():
        bound = bind_row(row, sizes)
        where = path if source.names.is_prefixed else path.removeprefix(family.prefix)
        for tensor, at in bound.tensors():
            yield tensor, (where.format(**at), bound, tuple(at.items()))


def _layout_rows(source: Source, layout: str, tensors: Collection[str]) -> dict[str, Row]:
    """The rows of the layout, without that of a head which is the embedding."""
    family = source.family
    rows = layout_rows(family.layouts[layout], source.config)
    has_head = not family.is_tied(source.config) or family.tying.head_tensor in tensors
    return {path: row for path, row in rows.items() if has_head or row.name_parts != (family.tying.head_tensor,)}


def _check_layout_complete(
    source: Source, layout: str, taken: Mapping[str, object], tensors: Mapping[str, SourceTensor]
) -> None:
    for verb, names in (("has no place for", tensors.keys() - taken.keys()), ("needs", taken.keys() - tensors.keys())):
        if names:
            listed = ", ".join(source.names.full_name(name) for name in sorted(names)[:MAX_NAMES])
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            raise PrepError(
                f"{source.display_name} is not to be had in the layout {layout}", f"it {verb} {listed}{more}"
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
    """flax_model.msgpack.index.json, as transformers writes it."""
    if len(groups) == 1:
        return ()
    weight_map = {"/".join(path): name for name, paths in groups for path in paths}
    total = sum(leaf.nbytes for leaf in leaves.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
    return (SmallFile(INDEX_FILE, text.encode() + b"\n"),)


def _side(
    use: LeafUse, tensor: SourceTensor, holders: Mapping[tuple[str, ...], int], layouts: Sequence[MsgpackLayout]
) -> Region | GappedRegion:
    path, row, at = use
    file = holders[tuple(path.split("."))]
    runs = layouts[file].runs[tuple(path.split("."))]
    zeros = (0,) * len(row.leaf_shape)
    place = StridedPlacement(file, runs[0][0], zeros, zeros)
    region = Region(row, at, ChunkGrid(row.leaf_shape, row.leaf_shape), place, itemsize(tensor.dtype))
    return GappedRegion(region, gaps_between(runs)) if len(runs) > 1 else region


# A head that repeats the embedding


def with_tied_head(source: Source) -> Source:
    """A source whose head is the embedding, with the head as a tensor too: the same bytes, read once more, from blobs
    that follow the source's own."""
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
    """The same part, in blobs that are numbered so much higher."""
    if isinstance(part, GappedRegion):
        return replace(part, region=_shift_blob_numbers(part.region, count))
    if not isinstance(part, Region):
        return replace(part, file=part.file + count)
    if isinstance(part.placement, StridedPlacement):
        return replace(part, placement=replace(part.placement, file=part.placement.file + count))
    chunks = {index: (file + count, offset) for index, (file, offset) in part.placement.chunks.items()}
    return replace(part, placement=replace(part.placement, chunks=chunks))
