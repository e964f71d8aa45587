"""Parameters as matrices, layer by layer, and optimizer state without some axes of a parameter.

Optimizers treat the weight of each layer as one matrix, whatever the dims of its leaf:
`layers heads head_dim embed` is one matrix of heads * head_dim rows and embed columns per layer.
Rows are output dims, as in PyTorch.

A statistic over some axes of a parameter keeps these axes with extent 1. Its other axes, its shards
and its layers are therefore the same as for the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from prepcli.algebra.axis_map import GROUP_ATOMS, LAYER_ATOMS, LAYERS, dim_name
from prepcli.models.param_tree import ParamLeaf

# Adjacent axes of these names form one matrix dim.
HEAD_DIMS = frozenset(
    {
        *("heads", "kv_heads", "head_dim", "kv_dim", "value_dim"),
        *("full_kv_heads", "full_head_dim"),
        *("mixer_groups", "group_heads", "mixer_head_dim", "mixer_state", "mixer_fused"),
    }
)
EXPERTS = "experts"
# A parameter of a layer has one of these parts in its path.
LAYER_PARTS = frozenset({LAYERS, *GROUP_ATOMS})
# Decay rates of recurrent mixers. Mamba has one per channel and state, and multiplies no vector by them.
DECAY_RATES = "mixer.a_log.weight"


@dataclass(frozen=True, slots=True)
class MatrixAxes:
    """The axes of a leaf that form a matrix.

    Attributes:
        batch: Axes that count matrices: layers and experts.
        rows: Axes of the output dims.
        columns: Axes of the input dims.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def matrix_axes(leaf: ParamLeaf) -> MatrixAxes | None:
    """Return the axes of the matrices of a leaf, or None if it has a vector per layer, or more than two dims."""
    # layers heads head_dim embed -> batch (0), groups (1, 2) and (3): rows and columns.
    # layers experts mlp embed -> experts count matrices too, and join the batch.
    batch = [leaf.stack_axis] if leaf.stack_axis is not None else []
    groups = _dim_groups(leaf, batch)
    if len(groups) == 3 and leaf.dims[groups[0][0]][:1] == (EXPERTS,):
        batch = [*batch, *groups[0]]
        groups = groups[1:]
    if len(groups) != 2:
        return None
    return MatrixAxes(tuple(batch), tuple(groups[0]), tuple(groups[1]))


def _dim_groups(leaf: ParamLeaf, excluded: Collection[int]) -> list[list[int]]:
    """Return the axes of each matrix dim: neighbouring dims of attention heads are together."""
    groups: list[list[int]] = []
    for axis, dim in enumerate(leaf.dims):
        if axis in excluded:
            continue
        is_head = dim_name(dim) in HEAD_DIMS
        if groups and is_head and dim_name(leaf.dims[groups[-1][-1]]) in HEAD_DIMS:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def is_layer_matrix(leaf: ParamLeaf) -> bool:
    """Return whether a leaf is the weight matrix of a layer: no embedding, head, norm or bias."""
    is_in_layer = not LAYER_PARTS.isdisjoint(leaf.path.split("."))
    if not is_in_layer or leaf.path.endswith(DECAY_RATES):
        return False
    return leaf.role == "matrix" and matrix_axes(leaf) is not None


@dataclass(frozen=True, slots=True)
class FactoredAxes:
    """The axes over which the two statistics of a factored second moment are means.

    Attributes:
        row_mean: Axes of the larger dim of the matrix. `v_row` has a value per index of the other.
        col_mean: Axes of the smaller dim.
    """

    row_mean: tuple[int, ...]
    col_mean: tuple[int, ...]


def factored_axes(leaf: ParamLeaf, min_dim_size: int) -> FactoredAxes | None:
    """Return the axes of the statistics of a leaf's matrices, or None if they are not factored.

    Args:
        leaf: The parameter.
        min_dim_size: Smallest dim of a matrix that is factored.
    """
    axes = matrix_axes(leaf)
    if axes is None:
        return None
    rows = _product_of_extents(leaf, axes.rows)
    columns = _product_of_extents(leaf, axes.columns)
    if min(rows, columns) < min_dim_size:
        return None
    # The second moment is approximated by v_ij = r_i * c_j / mean(r), for means r over the columns and
    # c over the rows (Adafactor, arXiv:1804.04235, section 3). Example: the leaf [12, 16, 64, 1024] of
    # layers, heads, head_dim and embed has matrices [1024, 1024]. `v_row` is a mean over axis 3, of
    # shape [12, 16, 64, 1], and `v_col` a mean over the axes 1 and 2, of shape [12, 1, 1, 1024].
    # `v_row` is a mean over the larger dim, as in optax: it has as many values as the smaller one.
    if columns >= rows:
        return FactoredAxes(axes.columns, axes.rows)
    return FactoredAxes(axes.rows, axes.columns)


def _product_of_extents(leaf: ParamLeaf, axes: Sequence[int]) -> int:
    """Return the product of the leaf's extents on some axes."""
    extent = 1
    for axis in axes:
        extent *= leaf.shape[axis]
    return extent


def reduce_leaf(leaf: ParamLeaf, axes: Collection[int]) -> ParamLeaf:
    """Return the leaf of a statistic over some axes of a parameter. Its other dims keep their names."""
    shape = tuple(1 if axis in axes else extent for axis, extent in enumerate(leaf.shape))
    dims = tuple(() if axis in axes else dim for axis, dim in enumerate(leaf.dims))
    return replace(leaf, shape=shape, dims=dims)


def reduced_axes(shape: Sequence[int], param_shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axes that an optimizer statistic, such as a mean, reduces to extent 1.

    >>> reduced_axes([12, 1, 64], [12, 32, 64])
    (1,)

    Args:
        shape: Shape of the statistic.
        param_shape: Shape of its parameter.

    Returns:
        The reduced axes, none of them if the shapes are equal. None if an axis has another extent, e.g. 2 of 32: the
        leaf is not a statistic of the parameter.
    """
    if len(shape) != len(param_shape):
        return None
    differing = tuple(axis for axis, extent in enumerate(shape) if extent != param_shape[axis])
    if all(shape[axis] == 1 for axis in differing):
        return differing
    return None


def unstacked_path(path: str, layer: str) -> str:
    """Return the path of one layer in a tree without stacking, e.g. `layers.3.attn.q.weight`."""
    return path.replace("layers.", f"layers.{layer}.", 1)


def counts_layers(dim: Sequence[str]) -> bool:
    """Return whether a dim of a leaf stacks layers."""
    return len(dim) == 1 and dim[0] in LAYER_ATOMS
