"""A folder with a Flax or EasyLM checkpoint as an output: which leaf has which tensor, and where in which file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.engine.blobs import Blob
from prepcli.errors import PrepError
from prepcli.formats.flax_folder import INDEX, STEM, STREAM
from prepcli.formats.msgpack import SUFFIX
from prepcli.formats.msgpack_layout import Layout, Leaf, flax_layout, sorted_paths, stream_layout
from prepcli.formats.safetensors_layout import shard
from prepcli.planning.gaps import Gapped, gaps_between
from prepcli.planning.grids import Grid, Lattice
from prepcli.planning.moves import Region
from prepcli.planning.plan import Flat, OutFile, Side, SmallFile, Strided
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import Source, SourceTensor
from trainer.models.axis_map import AxisMap, Row, bind
from trainer.models.parameters import layout_rows

STREAM_FORMAT = "stream"
SHOWN = 4

Taken = tuple[str, AxisMap, tuple[tuple[str, int], ...]]  # the path of a leaf, its row, which of the row's tensors


@dataclass(frozen=True, slots=True)
class FlaxFolder:
    """The files, where each tensor goes, the index of several files, and how many leaves there are."""

    files: tuple[OutFile, ...]
    sides: Mapping[str, Side]
    index: tuple[SmallFile, ...]
    nleaves: int


def lay_out(
    source: Source, kept: Sequence[SourceTensor], layout: str, container: str, vocab: int, shard_nbytes: int
) -> FlaxFolder:
    """The leaves of a layout made of tensors, with `vocab` rows of vocabulary. PrepError where one has no place, or a
    leaf nothing to be made of."""
    tensors = {tensor.name: tensor for tensor in kept}
    taken: dict[str, list[Taken]] = {}
    for name, use in _uses(source, layout, tensors, vocab):
        taken.setdefault(name, []).append(use)
    _check(source, layout, taken, tensors)
    leaves = {
        tuple(path.split(".")): Leaf(tuple(path.split(".")), tensors[name].dtype, row.leaf_shape)
        for name, uses in taken.items()
        for path, row, _ in uses
    }
    groups = [(STREAM, list(leaves))] if container == STREAM_FORMAT else _shards(leaves, shard_nbytes)
    make = stream_layout if container == STREAM_FORMAT else flax_layout
    layouts = [make(leaves[path] for path in paths) for _, paths in groups]
    holders = {path: number for number, found in enumerate(layouts) for path in found.runs}
    sides = {name: tuple(_side(use, tensors[name], holders, layouts) for use in uses) for name, uses in taken.items()}
    files = tuple(OutFile(name, found.size, fixed=found.fixed) for (name, _), found in zip(groups, layouts))
    return FlaxFolder(files, sides, _index(groups, leaves), len(leaves))


def _uses(source: Source, layout: str, tensors: Collection[str], vocab: int) -> Iterator[tuple[str, Taken]]:
    """Which tensor goes to which leaf, by its path with the base prefix if the source's names have it."""
    family, config = source.family, source.config
    sizes = family.sizes(config) | {"vocab": vocab}
    for path, row in _rows(source, layout, tensors).items():
        bound = bind(row, sizes)
        where = path if source.names.prefixed else path.removeprefix(family.prefix)
        for tensor, at in bound.tensors():
            yield tensor, (where.format(**at), bound, tuple(at.items()))


def _rows(source: Source, layout: str, tensors: Collection[str]) -> dict[str, Row]:
    """The rows of the layout, without that of a head which is the embedding."""
    family = source.family
    rows = layout_rows(family.layouts[layout], source.config)
    has_head = not family.tied(source.config) or family.tie.tensor in tensors
    return {path: row for path, row in rows.items() if has_head or row.name != (family.tie.tensor,)}


def _check(source: Source, layout: str, taken: Mapping[str, object], tensors: Mapping[str, SourceTensor]) -> None:
    for verb, names in (("has no place for", tensors.keys() - taken.keys()), ("needs", taken.keys() - tensors.keys())):
        if names:
            listed = ", ".join(source.names.full(name) for name in sorted(names)[:SHOWN])
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise PrepError(f"{source.name} is not to be had in the layout {layout}", f"it {verb} {listed}{more}")


def _shards(leaves: Mapping[tuple[str, ...], Leaf], limit_nbytes: int) -> list[tuple[str, list[tuple[str, ...]]]]:
    entries = [("/".join(p), leaves[p].dtype, leaves[p].shape, leaves[p].nbytes) for p in sorted_paths(leaves)]
    groups = shard(entries, limit_nbytes, STEM, SUFFIX)
    return [(name, [tuple(entry[0].split("/")) for entry in group]) for name, group in groups]


def _index(
    groups: Sequence[tuple[str, list[tuple[str, ...]]]], leaves: Mapping[tuple[str, ...], Leaf]
) -> tuple[SmallFile, ...]:
    """flax_model.msgpack.index.json, as transformers writes it."""
    if len(groups) == 1:
        return ()
    weight_map = {"/".join(path): name for name, paths in groups for path in paths}
    total = sum(leaf.nbytes for leaf in leaves.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
    return (SmallFile(INDEX, text.encode() + b"\n"),)


def _side(
    use: Taken, tensor: SourceTensor, holders: Mapping[tuple[str, ...], int], layouts: Sequence[Layout]
) -> Region | Gapped:
    path, row, at = use
    file = holders[tuple(path.split("."))]
    runs = layouts[file].runs[tuple(path.split("."))]
    zeros = (0,) * len(row.leaf_shape)
    place = Lattice(file, runs[0][0], zeros, zeros)
    region = Region(row, at, Grid(row.leaf_shape, row.leaf_shape), place, itemsize(tensor.dtype))
    return Gapped(region, gaps_between(runs)) if len(runs) > 1 else region


# A head that repeats the embedding


def with_head(source: Source) -> Source:
    """A source whose head is the embedding, with the head as a tensor too: the same bytes, read once more, from blobs
    that follow the source's own."""
    tie = source.family.tie
    if any(tensor.name == tie.tensor for tensor in source.tensors):
        return source
    embedding = next(tensor for tensor in source.tensors if tensor.name == tie.embedding)
    reads: tuple[Path | Blob, ...] = source.reads
    head = replace(embedding, name=tie.tensor, side=tuple(_shifted(part, len(reads)) for part in embedding.side))
    return replace(source, tensors=(*source.tensors, head), blobs=(*reads, *reads))


def _shifted(part: Flat | Strided | Region | Gapped, count: int) -> Flat | Strided | Region | Gapped:
    """The same part, in blobs that are numbered so much higher."""
    if isinstance(part, Gapped):
        return replace(part, region=_shifted(part.region, count))
    if not isinstance(part, Region):
        return replace(part, file=part.file + count)
    if isinstance(part.places, Lattice):
        return replace(part, places=replace(part.places, file=part.places.file + count))
    chunks = {index: (file + count, offset) for index, (file, offset) in part.places.chunks.items()}
    return replace(part, places=replace(part.places, chunks=chunks))
