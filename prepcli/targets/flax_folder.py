"""Layout of a folder with a Flax or EasyLM checkpoint: the leaf of each tensor, and its location in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from prepcli.algebra.grids import run_parts
from prepcli.formats.msgpack import INDEX_FILE, STEM, STREAM_FILE, SUFFIX
from prepcli.formats.msgpack_layout import (
    MsgpackLayout,
    MsgpackLeaf,
    lay_out_flax,
    lay_out_stream,
    sort_paths,
)
from prepcli.formats.safetensors import LayoutEntry, split_into_shards
from prepcli.planning.arrays import Locations, MappedArray, parted_array, whole_array
from prepcli.planning.libraries import STREAM_FORMAT
from prepcli.planning.plan import OutputFile, SmallFile
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import SourceTensor
from prepcli.targets.layout_leaves import LayoutLeaf, find_layout_leaves
from prepcli.targets.planner import Draft, Placed


def place_flax(draft: Draft, tree: str, container: str, shard_nbytes: int) -> Placed:
    """Place the tensors of a draft in the leaves of a Flax folder.

    Args:
        draft: The draft.
        tree: Name of the tree.
        container: `stream` for one EasyLM stream, or any other name for msgpack files of transformers.
        shard_nbytes: Largest size of a file.

    Raises:
        PrepError: A tensor has no leaf in the tree, or a leaf has no tensor.
    """
    tensors = {tensor.name: tensor for tensor in draft.tensors}
    uses_by_tensor = find_layout_leaves(draft, tree)
    leaves: dict[tuple[str, ...], MsgpackLeaf] = {}
    for name, uses in uses_by_tensor.items():
        for path, row, _ in uses:
            keys = tuple(path.split("."))
            leaves[keys] = MsgpackLeaf(keys, tensors[name].dtype, row.leaf_shape)
    if container == STREAM_FORMAT:
        groups = [(STREAM_FILE, list(leaves))]
        lay_out = lay_out_stream
    else:
        groups = _split_into_files(leaves, shard_nbytes)
        lay_out = lay_out_flax
    layouts: list[MsgpackLayout] = []
    files: list[OutputFile] = []
    file_numbers: dict[tuple[str, ...], int] = {}
    for number, (name, paths) in enumerate(groups):
        file_layout = lay_out(leaves[path] for path in paths)
        layouts.append(file_layout)
        files.append(OutputFile(name, file_layout.size, constant_ranges=file_layout.fixed_bytes))
        file_numbers |= dict.fromkeys(file_layout.runs, number)
    locations: dict[str, Locations] = {}
    for name, uses in uses_by_tensor.items():
        parts = [_leaf_location(use, tensors[name], file_numbers, layouts) for use in uses]
        locations[name] = tuple(parts)
    return Placed(files=tuple(files), locations=locations, index=_index_file(groups, leaves))


def _split_into_files(
    leaves: Mapping[tuple[str, ...], MsgpackLeaf], limit_nbytes: int
) -> list[tuple[str, list[tuple[str, ...]]]]:
    entries: list[LayoutEntry] = []
    for path in sort_paths(leaves):
        leaf = leaves[path]
        # `split_into_shards` takes one text per tensor. The parts come from dotted names of the layout and
        # have no slash, so `split` below gives the same path.
        entries.append(("/".join(path), leaf.dtype, leaf.shape, leaf.nbytes))
    shards: list[tuple[str, list[tuple[str, ...]]]] = []
    for name, group in split_into_shards(entries, limit_nbytes, STEM, SUFFIX):
        shards.append((name, [tuple(path.split("/")) for path, *_ in group]))
    return shards


def _index_file(
    groups: Sequence[tuple[str, list[tuple[str, ...]]]],
    leaves: Mapping[tuple[str, ...], MsgpackLeaf],
) -> tuple[SmallFile, ...]:
    """Return flax_model.msgpack.index.json in the format of transformers, if there are several files."""
    if len(groups) == 1:
        return ()
    weight_map: dict[str, str] = {}
    for name, paths in groups:
        for path in paths:
            weight_map["/".join(path)] = name
    total = sum(leaf.nbytes for leaf in leaves.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True)
    return (SmallFile(INDEX_FILE, text.encode() + b"\n"),)


def _leaf_location(
    use: LayoutLeaf,
    tensor: SourceTensor,
    file_numbers: Mapping[tuple[str, ...], int],
    layouts: Sequence[MsgpackLayout],
) -> MappedArray:
    """Return the location of a tensor in a leaf of a file."""
    path, axis_map, indices = use
    keys = tuple(path.split("."))
    file = file_numbers[keys]
    runs = layouts[file].runs[keys]
    # Flax stores a large array as several runs, separated by msgpack headers.
    shape = axis_map.leaf_shape
    leaf = whole_array(path, tensor.dtype, shape, (file, runs[0][0]))
    if len(runs) > 1:
        parts = run_parts(shape, itemsize(tensor.dtype), runs, file)
        leaf = parted_array(path, tensor.dtype, shape, parts)
    return MappedArray(axis_map, indices, leaf)
