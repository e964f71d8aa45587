"""The parameter tree of a model: path, shape, logical dims and role of each leaf, and selections of leaves. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from prepcli.algebra.axis_map import (
    GROUP_ATOMS,
    LAYER_ATOMS,
    LAYERS,
    AxisMap,
    SizedAxis,
    bind_row,
    dim_name,
    stack_axis,
)
from prepcli.core.errors import Command, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.models.parameters import EMBEDDING_PATH_PARTS, Family, HFConfig, parameter_rows
from prepcli.models.rules import LEAF_PREFIX, path_without_layers

T = TypeVar("T")
# Nested dicts. Every other value is a leaf.
Tree = dict[str, Any]
# Dims of the elements of a head. A model may have wider heads in layers with full attention.
HEAD_WIDTH_DIMS = ("head_dim", "full_head_dim")
# Dims of the key and value heads, likewise.
KV_HEAD_DIMS = ("kv_heads", "full_kv_heads")
Role = Literal["embedding", "matrix", "scale", "bias"]


@dataclass(frozen=True, slots=True)
class ParamLeaf:
    """A leaf of the parameter tree."""

    path: str  # Dotted path in the tree.
    # The path with a placeholder in place of the layer index, if the leaf belongs to one layer.
    path_pattern: str
    shape: tuple[int, ...]  # Shape of the leaf.
    # Named axes (atoms) of each dim. `dim_name` gives the logical name of a dim.
    dims: tuple[tuple[str, ...], ...]
    # Index of the leaf's layer, or None if it stacks the layers or belongs to no layer.
    layer_index: int | None = None

    @property
    def role(self) -> Role:
        """Role of the leaf. It decides the initial values and whether weight decay applies."""
        if not EMBEDDING_PATH_PARTS.isdisjoint(self.path.split(".")):
            return "embedding"
        last = self.path.rpartition(".")[2]
        if last == "scale":
            return "scale"
        if last == "bias":
            return "bias"
        return "matrix"

    @property
    def stack_axis(self) -> int | None:
        """Axis that stacks the layers, or None."""
        return stack_axis(self.dims)

    def extent(self, name: str) -> int:
        """Return the extent of a logical dim, or 1 if the leaf does not have it."""
        return math.prod(
            extent for dim, extent in zip(self.dims, self.shape) if dim_name(dim) == name
        )


def dim_extent(leaves: Mapping[str, ParamLeaf], name: str) -> int:
    """Return the extent of a logical dim in the first leaf that has it, or 0 if no leaf has it."""
    for leaf in leaves.values():
        if any(dim_name(dim) == name for dim in leaf.dims):
            return leaf.extent(name)
    return 0


def widest_head(leaves: Mapping[str, ParamLeaf]) -> int:
    """Return the number of elements of the widest attention head, or 0 without attention."""
    return max(dim_extent(leaves, dim) for dim in HEAD_WIDTH_DIMS)


def param_leaves(
    family: Family, config: HFConfig, tied: bool, *, scan: bool = True, scan_axis: int = 0
) -> dict[str, ParamLeaf]:
    """Return the leaves of a model's parameter tree.

    They are in the order of the family's parameters. If the head is the token embedding (`tied`), it has no leaf.
    With `scan`, a leaf stacks all layers on `scan_axis`.
    """
    leaves: dict[str, ParamLeaf] = {}
    sizes = family.sizes(config)
    for path, row in parameter_rows(family, config, scan, scan_axis).items():
        if path == family.tying.head_leaf and tied:
            continue
        leaves |= {leaf.path: leaf for leaf in _leaves_of_row(path, bind_row(row, sizes))}
    return leaves


def _dim_atoms(dim: Iterable[SizedAxis]) -> tuple[str, ...]:
    return tuple(axis.atom for axis in dim)


def _leaves_of_row(path: str, row: AxisMap) -> Iterable[ParamLeaf]:
    """Return the leaves of one row of an axis map."""
    dims = tuple(_dim_atoms(dim) for dim in row.leaf_dims)
    if not row.unscanned_factors:
        return [ParamLeaf(path.format(), path, shape=row.leaf_shape, dims=dims)]
    # Only a layer atom can lack a dim of the leaf, so it is the atom of the path's placeholder.
    layers = row.unscanned_factors[0]
    return [
        ParamLeaf(
            path.format(**{layers.atom: i}), path, shape=row.leaf_shape, dims=dims, layer_index=i
        )
        for i in range(layers.extent)
    ]


def find_param_path(name: str, param_paths: Mapping[str, object]) -> str | None:
    """Return the longest parameter path at the end of the name of a state's leaf, or None if there is none."""
    parts = name.split(".")
    # The first part is never in a path, e.g. opt_state.adam.mu.embed.tokens -> embed.tokens.
    # Longest first, so that a path wins over another path that equals its end.
    suffixes = (".".join(parts[i:]) for i in range(1, len(parts)))
    return next((suffix for suffix in suffixes if suffix in param_paths), None)


def unflatten_tree(flat: Mapping[str, T]) -> Tree:
    """Return nested dicts from a dict with dotted paths."""
    tree: Tree = {}
    for path, value in flat.items():
        *parts, last = path.split(".")
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def flatten_tree(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Return a dict with dotted paths, each after `prefix`, from nested dicts."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flatten_tree(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


# Patterns of leaves in a recipe: a path, or `re:` and a regular expression.
#
# A path selects the leaf and all leaves below it. Paths have no layer numbers, so that
# patterns do not depend on whether layers are stacked.

# Keys of the recipe's `[optimizer]`.
PATTERN_KEYS = ("freeze", "decay_exclude", "decay_include")
FREEZE_KEY = "optimizer.freeze"


def matches_any(patterns: Iterable[str], path: str) -> bool:
    """Return whether one of the patterns matches the dotted path of a leaf."""
    return any(_pattern_matches(pattern, path_without_layers(path)) for pattern in patterns)


def _pattern_matches(pattern: str, path: str) -> bool:
    """Return whether a pattern is the path or the start of it, or an expression for it."""
    if pattern.startswith(LEAF_PREFIX):
        return re.search(pattern.removeprefix(LEAF_PREFIX), path) is not None
    return path == pattern or path.startswith(f"{pattern}.")


def check_regular_expressions(patterns: Iterable[str], key: str) -> None:
    """Check the regular expressions of patterns.

    `key` is their recipe key, for messages.

    Raises:
        UsageError: An expression is invalid.
    """
    for pattern in patterns:
        if pattern.startswith(LEAF_PREFIX):
            try:
                re.compile(pattern.removeprefix(LEAF_PREFIX))
            except re.error as error:
                hint = (
                    f"`{LEAF_PREFIX}` and a regular expression, or a path without `{LEAF_PREFIX}`"
                )
                raise usage_error(
                    f"`{key}` has the invalid pattern `{pattern}`", str(error), hint
                ) from error


def check_used(patterns: Iterable[str], paths: Mapping[str, object], key: str) -> None:
    """Check that each pattern matches a leaf.

    `key` is their recipe key, for messages.

    Raises:
        UsageError: A pattern matches no leaf.
    """
    known = list(dict.fromkeys(map(path_without_layers, paths)))
    for pattern in patterns:
        if not any(_pattern_matches(pattern, path) for path in known):
            hint = did_you_mean(pattern.removeprefix(LEAF_PREFIX), known) or text(
                "{} lists the leaves", Command("inspect", "CHECKPOINT")
            )
            raise usage_error(
                f"`{pattern}` of `{key}` matches no leaf", f"the first leaf is {known[0]}", hint
            )


# Part of the path of relative position biases. They look like embeddings, but are added to attention scores.
POSITION_BIASES = "relative_positions"
# Logits of attention sinks. transformers' Trainer decays every parameter that is neither a norm nor a bias by its name.
SINKS = "sinks"


@dataclass(frozen=True, slots=True)
class DecayRule:
    """Rule for the leaves with weight decay."""

    includes_embeddings: bool = True  # Whether embeddings decay.
    exclude: tuple[str, ...] = ()  # Patterns of leaves without decay.
    # Patterns of leaves with decay, whatever their role. `exclude` has priority.
    include: tuple[str, ...] = ()

    def decays(self, leaf: ParamLeaf) -> bool:
        """Return whether weight decay applies to a leaf."""
        if matches_any(self.exclude, leaf.path):
            return False
        if matches_any(self.include, leaf.path):
            return True
        parts = leaf.path.split(".")
        if POSITION_BIASES in parts:
            return False
        if SINKS in parts:
            return True
        return leaf.role == "matrix" or (leaf.role == "embedding" and self.includes_embeddings)


# Parameters as matrices, layer by layer, and optimizer state without some axes of a parameter.
#
# Optimizers treat the weight of each layer as one matrix, whatever the dims of its leaf:
# `layers heads head_dim embed` is one matrix of heads * head_dim rows and embed columns per layer.
# Rows are output dims, as in PyTorch.
#
# A statistic over some axes of a parameter keeps these axes with extent 1. Its other axes, its shards
# and its layers are therefore the same as for the parameter.

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
    """The axes of a leaf that form a matrix."""

    batch: tuple[int, ...]  # Axes that count matrices: layers and experts.
    rows: tuple[int, ...]  # Axes of the output dims.
    columns: tuple[int, ...]  # Axes of the input dims.


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
    """The axes over which the two statistics of a factored second moment are means."""

    # Axes of the larger dim of the matrix. `v_row` has a value per index of the other.
    row_mean: tuple[int, ...]
    col_mean: tuple[int, ...]  # Axes of the smaller dim.


def factored_axes(leaf: ParamLeaf, min_dim_size: int) -> FactoredAxes | None:
    """Return the axes of the statistics of a leaf's matrices, or None if they are not factored.

    Matrices with a dim below `min_dim_size` are not factored.
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
