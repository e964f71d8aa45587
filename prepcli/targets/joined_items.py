"""Layout of several Orbax items in one step, e.g. the parameters and the optimizer state of Tunix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prepcli.algebra.grids import ExplicitPlacement, StridedPlacement
from prepcli.algebra.strided_copies import ChunkedLocation
from prepcli.planning.plan import OutputFile, OutputLeaf, PlacedChunks
from prepcli.targets.orbax_item import OrbaxItemLayout


def join_items(items: Mapping[str, OrbaxItemLayout]) -> OrbaxItemLayout:
    """Return the layout of several items as one, by the name of the item. No tensor is in two items."""
    leaves: list[OutputLeaf] = []
    files: list[OutputFile] = []
    regions: dict[str, tuple[ChunkedLocation, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, item in items.items():
        first_file = len(files)
        for leaf in item.leaves:
            placed_chunks = tuple(_move_chunks(box, first_file) for box in leaf.placed_chunks)
            leaves.append(replace(leaf, placed_chunks=placed_chunks, item=name))
        for tensor, locations in item.regions.items():
            regions[tensor] = tuple(_move_location(each, first_file) for each in locations)
        files += [replace(file, path=f"{name}/{file.path}") for file in item.files]
        dtypes |= item.dtypes
    return OrbaxItemLayout(tuple(leaves), tuple(files), regions, {}, dtypes)


def _move_chunks(box: PlacedChunks, first_file: int) -> PlacedChunks:
    """Return chunks in files with numbers from `first_file` on."""
    placement = replace(box.placement, file=box.placement.file + first_file)
    return replace(box, placement=placement)


def _move_location(location: ChunkedLocation, first_file: int) -> ChunkedLocation:
    """Return a location in files with numbers from `first_file` on."""
    placement = location.placement
    if isinstance(placement, StridedPlacement):
        moved = replace(placement, file=placement.file + first_file)
        return replace(location, placement=moved)
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    for index, (file, offset) in placement.chunks.items():
        places[index] = (file + first_file, offset)
    return replace(location, placement=ExplicitPlacement(places))
