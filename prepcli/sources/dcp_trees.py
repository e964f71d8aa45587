"""State dicts in torch distributed checkpoints under other names than those of Hugging Face, e.g. of torchtitan."""

from __future__ import annotations

import itertools
from functools import partial

from prepcli.algebra.grids import ExplicitPlacement
from prepcli.core.errors import PrepError
from prepcli.core.json_types import HFConfig
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.torch_dcp import DcpFolder, DcpTensor
from prepcli.models.parameters import Family
from prepcli.planning.chunk_placement import LeafPiece, chunk_group
from prepcli.planning.libraries import Library
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.foreign_trees import ForeignTree, match_foreign_tree
from prepcli.sources.tree_tensors import StoredLeaf

# Chunk index -> file, offset of its first element.
_ChunkOffsets = dict[tuple[int, ...], tuple[int, int]]


def match_dcp_tree(
    folder: DcpFolder,
    family: Family,
    config: HFConfig,
    display_name: str,
    manifest: Manifest = NO_MANIFEST,
    *,
    library: Library,
) -> ForeignTree:
    """Match the tensors of a checkpoint with the state dict of a library.

    Args:
        folder: The checkpoint.
        family: Model family.
        config: The model's config.json.
        display_name: Name of the checkpoint in messages.
        manifest: Manifest of a checkpoint written by prep.
        library: Entry of the library, with one layout.

    Raises:
        PrepError: The family has no such layout, a tensor has the wrong shape, or its boxes form no grid.
    """
    (layout,) = library.layouts
    if layout not in family.layouts:
        why = f"its tensors have the names of {layout}, and prep has no layout of it for {family.name}"
        hint = f"save it with the names of Hugging Face, {library.hub_names_hint}"
        raise PrepError(f"{display_name} is not supported", why, hint)
    leaves = {tensor.name: _stored_leaf(tensor) for tensor in folder.tensors}
    return match_foreign_tree(
        leaves,
        family,
        config,
        display_name,
        roots=("",),
        layout=layout,
        manifest=manifest,
    )


def _stored_leaf(tensor: DcpTensor) -> StoredLeaf:
    """Return a tensor as a leaf. Its boxes are the chunks."""
    chunk_shape = _chunk_shape(tensor)
    offsets: _ChunkOffsets = {}
    for box in tensor.boxes:
        index = tuple(start // length for start, length in zip(box.start, chunk_shape))
        offsets[index] = box.file, box.offset
    return StoredLeaf(tensor.shape, tensor.dtype, chunk_shape, partial(_chunk_places, offsets))


def _chunk_shape(tensor: DcpTensor) -> tuple[int, ...]:
    """Return the shape of the box at the origin.

    Raises:
        PrepError: The boxes are not the chunks of a grid. Only the last boxes along the first dim may be shorter.
    """
    zeros = (0,) * len(tensor.shape)
    chunk_shape = next((box.shape for box in tensor.boxes if box.start == zeros), tensor.shape)
    # A chunk has at least one element in each dim, also in an empty tensor.
    chunk_shape = tuple(max(1, length) for length in chunk_shape)
    for box in tensor.boxes:
        is_aligned = not any(start % length for start, length in zip(box.start, chunk_shape))
        # A box with fewer columns has other strides than its neighbours.
        has_equal_rows = box.shape[1:] == chunk_shape[1:]
        # A box of two chunks would leave the second one without a location.
        is_too_long = box.shape[:1] > chunk_shape[:1]
        if not is_aligned or not has_equal_rows or is_too_long or box.byte_strides is not None:
            why = f"its box at {list(box.start)} has the shape {list(box.shape)} instead of {list(chunk_shape)}"
            hint = "save the checkpoint again with equal shards, e.g. on one process"
            raise PrepError(f"{tensor.name} is not supported", why, hint)
    return chunk_shape


def _chunk_places(offsets: _ChunkOffsets, piece: LeafPiece) -> ExplicitPlacement:
    """Return the placement of a piece's chunks."""
    first, stop = chunk_group(piece)
    places: _ChunkOffsets = {}
    for index in itertools.product(*(range(low, high) for low, high in zip(first, stop))):
        places[index] = offsets[index]
    return ExplicitPlacement(places)
