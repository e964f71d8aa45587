"""Slices of a device mesh: groups of devices with a fast network, which a slower network connects. Pure, no jax.

A slice is a TPU slice, or a group of GPU hosts on one fast network. An axis of 8 devices over 2
slices has 4 devices in each slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from prepcli.core.errors import Key, text, usage_error
from prepcli.models.mesh import Mesh, parse_mesh

DCN_KEY = "cluster.dcn_mesh"
# Number of slices along each axis of a mesh. An axis without an entry is in one slice.
SliceCounts = Mapping[str, int]
ONE_SLICE: SliceCounts = {}


def parse_slice_counts(counts_text: str | None) -> SliceCounts:
    """Parse the number of slices per mesh axis, such as `dp:2` or `2,1,1`.

    Args:
        counts_text: Axes in the notation of a mesh, or None for one slice.

    Returns:
        The number of slices of each axis that has several.

    Raises:
        UsageError: The text is invalid, or a number is -1.
    """
    if counts_text is None:
        return ONE_SLICE
    grid = parse_mesh(counts_text, Key(DCN_KEY))
    if -1 in grid.sizes:
        what = text("{} has a size of -1", Key(DCN_KEY, counts_text))
        why = "a number of slices cannot be derived from the devices"
        hint = text("{}", Key(DCN_KEY, "dp:2", is_override=True))
        raise usage_error(what, why, hint)
    return {axis: size for axis, size in zip(grid.names, grid.sizes) if size > 1}


def check_slices(mesh: Mesh, slices: SliceCounts) -> None:
    """Raise UsageError if a number of slices does not divide its axis of the mesh. Sizes of -1 are not checked."""
    sizes = dict(zip(mesh.names, mesh.sizes))
    for axis, count in slices.items():
        size = sizes.get(axis, 1)
        if size != -1 and size % count:
            if size > 1:
                why = f"{axis} of mesh {mesh} has {size} devices"
            else:
                why = f"mesh {mesh} does not split over {axis}"
            what = f"`{DCN_KEY}` divides {axis} among {count} slices"
            raise usage_error(what, why, f"use a number of slices that divides {axis}")


def num_slices(slices: SliceCounts) -> int:
    """Return the number of slices."""
    return math.prod(slices.values())
