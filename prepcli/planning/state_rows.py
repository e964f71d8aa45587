"""Leaves of a training state that have the layers and dims of a parameter, but no tensors of its source. Pure.

A slot of the optimizer state may lack parameters (frozen ones, or ones of another rule), and its leaves may be
statistics that have some axes of a parameter with extent 1. Tensors of the source cannot name such leaves: one tensor
may hold several parameters. Their tensors are named `SLOT//PATH`, one per layer, where PATH is the path of the leaf in
a tree with one leaf per layer. So the tensors do not depend on the stacking of layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from prepcli.planning.state_names import OPT_STATE, SEPARATOR, Shapes
from trainer.models.axis_map import AxisMap, Factor, TensorDim, TensorIndex
from trainer.models.leaf_matrices import counts_layers, layer_number_path, reduced_axes
from trainer.models.param_tree import find_param_path

StackedIndices = tuple[tuple[str, int], ...]  # (atom, index) of each stacked dim
LAYER_MARK = "\0"  # stands for the number of a layer while a name is split


@dataclass(frozen=True, slots=True)
class PathLeaf:
    """A leaf of the optimizer state that belongs to a parameter.

    Attributes:
        name: Dotted name of the leaf.
        slot: The part of the name before the path of the parameter.
        path: Path of the parameter.
    """

    name: str
    slot: str
    path: str


def find_state_leaves(leaves: Shapes, parameters: Shapes, slots: Collection[str]) -> Iterator[PathLeaf]:
    """Yield the leaves of the optimizer state that belong to a parameter and are in no complete slot.

    Args:
        leaves: Shapes of all leaves of the state, by dotted name.
        parameters: Shapes of the parameters, by dotted path.
        slots: Names of the complete slots.
    """
    for name, shape in leaves.items():
        path = find_param_path(name, parameters) if name.startswith(f"{OPT_STATE}.") else None
        if path is None or reduced_axes(shape, parameters[path]) is None:
            continue
        slot = name.removesuffix(f".{path}")
        if slot not in slots:
            yield PathLeaf(name, slot, path)


def is_path_name(tensor: str) -> bool:
    """Return whether the name of a tensor in a slot is `/PATH`."""
    return tensor.startswith(SEPARATOR)


def state_axis_map(path: str, row: AxisMap, shape: tuple[int, ...]) -> AxisMap:
    """Return the axis map of a leaf with the layers and dims of a parameter.

    Args:
        path: Path of the parameter's leaf.
        row: The axis map of the parameter.
        shape: Shape of the leaf: that of the parameter, or with extent 1 in some axes.
    """
    axes = reduced_axes(shape, row.leaf_shape)
    assert axes is not None
    dims = tuple(() if axis in axes else dim for axis, dim in enumerate(row.leaf_dims))
    layer_dims = [axis for axis, dim in enumerate(dims) if counts_layers([factor.atom for factor in dim])]
    source_dims = tuple(_tensor_dim(dim) for axis, dim in enumerate(dims) if axis not in layer_dims)
    name = SEPARATOR + (layer_number_path(path, LAYER_MARK) if layer_dims else path)
    before, _, after = name.partition(LAYER_MARK)
    number = tuple(TensorIndex(dims[axis]) for axis in layer_dims)
    return AxisMap(row.text, dims, (before, *number, after), source_dims)


def _tensor_dim(factors: tuple[Factor, ...]) -> TensorDim:
    """Return a dim of a tensor with all elements of a dim of the leaf."""
    extent = 1
    for factor in factors:
        extent *= factor.extent
    return TensorDim(extent, 0, factors)


def index_state_tensors(rows: Mapping[str, AxisMap]) -> dict[str, tuple[str, AxisMap, StackedIndices]]:
    """Return the leaf of each tensor that `state_axis_map` names: path, axis map of the parameter, indices of layers.

    Args:
        rows: Axis map of each parameter, by its path, which may hold the placeholder of the layers.
    """
    index: dict[str, tuple[str, AxisMap, StackedIndices]] = {}
    for pattern, row in rows.items():
        for path in leaf_paths(pattern, row):
            for name, indices in state_axis_map(path, row, row.leaf_shape).tensors():
                index[name] = (path, row, tuple(indices.items()))
    return index


def leaf_paths(path: str, row: AxisMap) -> list[str]:
    """Return the paths of the leaves of a row: one per layer, if the path has the placeholder of the layers."""
    if not row.unscanned_factors:
        return [path]
    layers = row.unscanned_factors[0]
    return [path.format(**{layers.atom: index}) for index in range(layers.extent)]


def shape_in_leaf(row: AxisMap, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the leaf of a tensor that `state_axis_map` names.

    Args:
        row: The axis map of the parameter.
        shape: Shape of the tensor, which lacks the axis of stacked layers.
    """
    extents = iter(shape)
    atoms = ([factor.atom for factor in dim] for dim in row.leaf_dims)
    return tuple(
        extent if counts_layers(dim) else next(extents) for dim, extent in zip(atoms, row.leaf_shape, strict=True)
    )
