"""Layout of several Orbax items in one step, e.g. the parameters and the optimizer state of Tunix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prepcli.planning.arrays import MappedArray
from prepcli.planning.plan import OutputFile, OutputLeaf, PlacedChunks
from prepcli.targets.orbax_item import OrbaxItemLayout


def join_items(items: Mapping[str, OrbaxItemLayout]) -> OrbaxItemLayout:
    """Return the layout of several items as one, by the name of the item. No tensor is in two items."""
    leaves: list[OutputLeaf] = []
    files: list[OutputFile] = []
    regions: dict[str, tuple[MappedArray, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, item in items.items():
        first_file = len(files)
        for leaf in item.leaves:
            boxes: list[PlacedChunks] = []
            for box in leaf.placed_chunks:
                boxes.append(replace(box, chunks=box.chunks.moved(first_file)))
            leaves.append(replace(leaf, placed_chunks=tuple(boxes), item=name))
        for tensor, locations in item.regions.items():
            regions[tensor] = tuple(each.moved(first_file) for each in locations)
        files += [replace(file, path=f"{name}/{file.path}") for file in item.files]
        dtypes |= item.dtypes
    return OrbaxItemLayout(tuple(leaves), tuple(files), regions, {}, dtypes)
