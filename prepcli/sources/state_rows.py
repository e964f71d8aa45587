"""Leaves beside the parameters with tensors of their own: partial slots of the optimizer, and scales of weights.

A slot of the optimizer state may lack parameters (frozen ones, or ones of another rule), and its leaves may be
statistics that have some axes of a parameter with extent 1. Tensors of the source cannot name such leaves: one tensor
may hold several parameters. Their tensors are named `SLOT//PATH`, one per layer, where PATH is the path of the leaf in
a tree with one leaf per layer. So the tensors do not depend on the stacking of layers.

An init of decoded weights keeps the scales and all other stored tensors except the codes: the quantised integers or
float8 values. An export copies both from the original model, and compares the scales with the kept ones. The kept
tensors are in the slot `quantization`, under their names in the quantised files. The name of their leaf is one key
below `quantization`, with stacked numbers as `*`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from prepcli.algebra.axis_map import AxisMap, SizedAxis, TensorDim, TensorIndex, bind_row
from prepcli.models.param_tree import counts_layers, find_param_path, reduced_axes, unstacked_path
from prepcli.models.parameters import parameter_rows
from prepcli.models.verbatim import TensorTypes, verbatim_family
from prepcli.planning.tensors import OPT_STATE, QUANTIZATION, SEPARATOR, Shapes

# Name and index of each stacked axis, e.g. (("layers", 3),).
StackedIndices = tuple[tuple[str, int], ...]
# Placeholder for the number of the layer in the path of a leaf.
LAYER_MARK = "\0"
QUANTIZATION_RULE = "scales of quantised weights"


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


def find_state_leaves(
    leaves: Shapes, parameters: Shapes, slots: Collection[str]
) -> Iterator[PathLeaf]:
    """Yield the leaves of the optimizer state that belong to a parameter and are in no complete slot."""
    for name, shape in leaves.items():
        if not name.startswith(f"{OPT_STATE}."):
            continue
        path = find_param_path(name, parameters)
        if path is None or reduced_axes(shape, parameters[path]) is None:
            continue
        slot = name.removesuffix(f".{path}")
        if slot not in slots:
            yield PathLeaf(name, slot, path)


def state_axis_map(path: str, parameter_map: AxisMap, shape: tuple[int, ...]) -> AxisMap:
    """Derive the axis map of an optimizer-state leaf from its parameter's axis map.

    The leaf has the shape of the parameter, or extent 1 in some axes.
    """
    # The parameter `layers embed mlp` with 12 layers, reduced in `mlp` to [12, 768, 1]: the tensors are
    # /layers.0.mlp.w to /layers.11.mlp.w, each [768, 1].
    axes = reduced_axes(shape, parameter_map.leaf_shape)
    assert axes is not None
    dims: list[tuple[SizedAxis, ...]] = []
    layer_indices: list[TensorIndex] = []
    source_dims: list[TensorDim] = []
    for axis, dim in enumerate(parameter_map.leaf_dims):
        kept_dim = () if axis in axes else dim
        dims.append(kept_dim)
        if counts_layers([factor.atom for factor in kept_dim]):
            layer_indices.append(TensorIndex(kept_dim))
        else:
            extent = 1
            for factor in kept_dim:
                extent *= factor.extent
            source_dims.append(TensorDim(extent, 0, kept_dim))
    name = SEPARATOR + path
    if layer_indices:
        name = SEPARATOR + unstacked_path(path, LAYER_MARK)
    before, _, after = name.partition(LAYER_MARK)
    return AxisMap(
        parameter_map.text, tuple(dims), (before, *layer_indices, after), tuple(source_dims)
    )


def index_state_tensors(
    axis_maps: Mapping[str, AxisMap],
) -> dict[str, tuple[str, AxisMap, StackedIndices]]:
    """Return the leaf of each tensor of `state_axis_map`: path, axis map of the parameter, indices of layers."""
    index: dict[str, tuple[str, AxisMap, StackedIndices]] = {}
    for pattern, parameter_map in axis_maps.items():
        for path in leaf_paths(pattern, parameter_map):
            for name, indices in state_axis_map(
                path, parameter_map, parameter_map.leaf_shape
            ).tensors():
                index[name] = (path, parameter_map, tuple(indices.items()))
    return index


def leaf_paths(path: str, parameter_map: AxisMap) -> list[str]:
    """Return the paths of the leaves of a parameter: one per layer, if the path has the placeholder of the layers."""
    if not parameter_map.unscanned_factors:
        return [path]
    layers = parameter_map.unscanned_factors[0]
    return [path.format(**{layers.atom: index}) for index in range(layers.extent)]


def shape_in_leaf(parameter_map: AxisMap, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the leaf of a tensor that `state_axis_map` names."""
    extents = iter(shape)
    leaf_shape: list[int] = []
    for dim, extent in zip(parameter_map.leaf_dims, parameter_map.leaf_shape, strict=True):
        if counts_layers([factor.atom for factor in dim]):
            leaf_shape.append(extent)
        else:
            leaf_shape.append(next(extents))
    return tuple(leaf_shape)


def quantization_leaves(
    types: TensorTypes,
) -> Iterator[tuple[str, str, AxisMap, StackedIndices]]:
    """Yield the name of each stored tensor with the name of its leaf, its axis map and its place in the leaf.

    A tensor without elements has no leaf.
    """
    family = verbatim_family(types)
    sizes = family.sizes({})
    for path, row in parameter_rows(family, {}).items():
        axis_map = bind_row(row, sizes)
        for name, indices in axis_map.tensors():
            leaf = f"{QUANTIZATION}.{path.format(**indices)}"
            yield name, leaf, axis_map, tuple(indices.items())
