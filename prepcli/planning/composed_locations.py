"""Locations of the targets of a map, in the parts of stored tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prepcli.algebra.axis_map import AxisMap, SizedAxis, TensorDim
from prepcli.planning.arrays import Location, MappedArray
from prepcli.planning.map_rows import MapRow

AxisFactors = tuple[SizedAxis, ...]
# Prefix of the axes of the stored leaf that are no dims of the stored tensor, e.g. its layers.
STORED_AXIS = "stored "


def compose_location(
    row: MapRow, indices: Mapping[str, int], stored: Location
) -> MappedArray | None:
    """Return where a target of a map is stored, given the location of one of its sources.

    A target [ffn, embed] from a source `embed (half=1 ffn)` is a leaf of the dims of the source. Its axes have the
    order of the source, and `half` is fixed.

    Args:
        row: The row of the map.
        indices: Index of each atom in the name of the target or of the source.
        stored: Location of the whole source.

    Returns:
        The location. None if the source is stored in several parts.
    """
    dims = [_stored_factors(dim) for dim in row.source.source_dims]
    starts = [dim.start for dim in row.source.source_dims]
    fixed = _fixed_indices(row.source)
    if stored.axis_map is not None:
        order = _dims_of_leaf(stored)
        if order is None:
            return None
        dims = [dims[dim] if isinstance(dim, int) else dim for dim in order]
        starts = [starts[dim] if isinstance(dim, int) else 0 for dim in order]
        for atom, index in stored.stacked_indices:
            fixed[STORED_AXIS + atom] = index
    axis_map = AxisMap(row.target.text, tuple(dims), (row.target.text,), _target_dims(row, indices))
    return MappedArray(
        axis_map,
        (*indices.items(), *fixed.items()),
        stored.array,
        tuple(starts) if any(starts) else None,
    )


def _dims_of_leaf(stored: MappedArray) -> list[int | AxisFactors] | None:
    """Return the dim of the tensor for each dim of its leaf, or the stacked axes of the leaf dim.

    None if a dim of the tensor is only a part of the leaf dim, or several of them.
    """
    if stored.starts is not None:
        return None
    positions: dict[str, int] = {}
    for position, dim in enumerate(stored.axis_map.source_dims):
        if len(dim.factors) != 1 or dim.start or dim.factors[0].extent != dim.extent:
            return None
        positions[dim.factors[0].atom] = position
    order: list[int | AxisFactors] = []
    for axes in stored.axis_map.leaf_dims:
        if any(axis.atom in positions for axis in axes):
            if len(axes) != 1:
                return None
            order.append(positions[axes[0].atom])
        else:
            order.append(tuple(replace(axis, atom=STORED_AXIS + axis.atom) for axis in axes))
    return order


def _stored_factors(dim: TensorDim) -> AxisFactors:
    """Return the axes of a source's dim. A fixed axis gets a name of its own: its index is known."""
    factors: list[SizedAxis] = []
    for factor in dim.factors:
        factors.append(SizedAxis(_axis_name(factor), factor.extent))
    return tuple(factors)


def _fixed_indices(source: AxisMap) -> dict[str, int]:
    """Return the index of each fixed axis in the dims of a source."""
    indices: dict[str, int] = {}
    for dim in source.source_dims:
        for factor in dim.factors:
            if factor.fixed is not None:
                indices[_axis_name(factor)] = factor.fixed
    return indices


def _axis_name(factor: SizedAxis) -> str:
    if factor.fixed is None:
        return factor.atom
    return f"{factor.atom}={factor.fixed}"


def _target_dims(row: MapRow, indices: Mapping[str, int]) -> tuple[TensorDim, ...]:
    """Return the dims of a target. Axes in the name of the source are fixed: one source has one index of them."""
    return tuple(
        replace(dim, factors=_with_fixed(dim.factors, indices)) for dim in row.target.source_dims
    )


def _with_fixed(factors: Sequence[SizedAxis], indices: Mapping[str, int]) -> AxisFactors:
    fixed: list[SizedAxis] = []
    for factor in factors:
        if factor.fixed is None and factor.atom in indices:
            factor = replace(factor, fixed=indices[factor.atom])
        fixed.append(factor)
    return tuple(fixed)
