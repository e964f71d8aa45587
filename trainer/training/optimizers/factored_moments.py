"""Transformations of the matrices of each layer: factored second moments, and rules for single matrices.

Axes: B matrices of a leaf (layers and experts), R rows, C columns. A leaf of vectors has one column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from trainer.models.leaf_matrices import FactoredAxes, factored_axes, matrix_axes, reduce_leaf
from trainer.models.param_tree import ParamLeaf, Tree, flatten_tree, unflatten_tree


class FactoredMoments(NamedTuple):
    """Second moments: `v_row` and `v_col` of factored leaves, `v` of all others.

    The leaves of `v_row` and `v_col` keep the axes that they are means over, with extent 1.
    """

    count: Any  # int32 []; a tuple has a method of this name
    v_row: Tree
    v_col: Tree
    v: Tree


@dataclass(frozen=True, slots=True)
class MatrixView:
    """A leaf as matrices [B, R, C]."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @staticmethod
    def of(leaf: ParamLeaf) -> MatrixView:
        """Return the view of a leaf; a leaf that has no matrices has one vector per layer."""
        if axes := matrix_axes(leaf):
            return MatrixView(axes.batch, axes.rows, axes.columns)
        batch = () if leaf.stack_axis is None else (leaf.stack_axis,)
        return MatrixView(batch, tuple(axis for axis in range(len(leaf.dims)) if axis not in batch), ())

    def flatten(self, x: Array) -> Array:
        """Return a leaf, or a statistic with axes of extent 1, as [B, R, C]."""
        groups = (self.batch, self.rows, self.columns)
        return x.transpose(self._order).reshape([math.prod(x.shape[axis] for axis in group) for group in groups])

    def restore(self, x: Array, shape: Sequence[int]) -> Array:
        """Return [B, R, C] as a leaf of this shape."""
        order = self._order
        transposed = x.reshape([shape[axis] for axis in order])
        return transposed.transpose([order.index(axis) for axis in range(len(order))])

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.batch, *self.rows, *self.columns)


def by_matrix(
    transformation: optax.GradientTransformation, leaves: Mapping[str, ParamLeaf]
) -> optax.GradientTransformation:
    """Return a transformation without state that treats each matrix of each layer as a leaf."""
    views = unflatten_tree({path: MatrixView.of(leaf) for path, leaf in leaves.items()})

    def apply(update: Array, param: Array) -> Array:
        return transformation.update(update, optax.EmptyState(), param)[0]  # pyright: ignore[reportReturnType]

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def update_leaf(view: MatrixView, update: Array, param: Array) -> Array:
            return view.restore(jax.vmap(apply)(view.flatten(update), view.flatten(param)), update.shape)

        return jax.tree.map(update_leaf, views, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def scale_by_factored_moments(
    leaves: Mapping[str, ParamLeaf], decay_rate: float, min_factored_size: int
) -> optax.GradientTransformation:
    """Return `optax.scale_by_factored_rms` of the matrices of each layer.

    Args:
        leaves: Parameters by path.
        decay_rate: Power r of the decay rate 1 - step^-r.
        min_factored_size: Smallest dim of a factored matrix; 0 for no factors.
    """
    factored = {path: factored_axes(leaf, min_factored_size) for path, leaf in leaves.items() if min_factored_size}

    def init(params: Any) -> FactoredMoments:
        means = {path: axes for path, axes in factored.items() if axes}
        v_row = {path: _zeros(reduce_leaf(leaves[path], axes.row_mean)) for path, axes in means.items()}
        v_col = {path: _zeros(reduce_leaf(leaves[path], axes.col_mean)) for path, axes in means.items()}
        v = {path: jnp.zeros_like(leaf) for path, leaf in flatten_tree(params).items() if path not in means}
        return FactoredMoments(jnp.zeros((), jnp.int32), *map(unflatten_tree, (v_row, v_col, v)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, FactoredMoments]:
        moment_trees = {name: flatten_tree(getattr(state, name)) for name in ("v_row", "v_col", "v")}
        flat_params = flatten_tree(params)
        new_updates: dict[str, Array] = {}
        new_moments: dict[str, dict[str, Array]] = {name: {} for name in moment_trees}
        for path, gradient in flatten_tree(updates).items():
            rule = _LeafRule(MatrixView.of(leaves[path]), factored.get(path), decay_rate)
            moments = {name: values[path] for name, values in moment_trees.items() if path in values}
            new_updates[path], moments = rule.update(gradient, moments, flat_params[path], count=state.count)
            for name, value in moments.items():
                new_moments[name][path] = value
        count: Any = optax.safe_increment(state.count)
        return unflatten_tree(new_updates), FactoredMoments(count, *map(unflatten_tree, new_moments.values()))

    return optax.GradientTransformation(init, update)


def _zeros(leaf: ParamLeaf) -> Array:
    return jnp.zeros(leaf.shape, jnp.float32)


@dataclass(frozen=True, slots=True)
class _LeafRule:
    """The factored or whole second moments of one leaf."""

    view: MatrixView
    factored: FactoredAxes | None
    decay_rate: float

    def update(
        self, gradient: Array, moments: Mapping[str, Array], param: Array, *, count: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Return the update, and the new moments by name, in the shapes of the old ones."""
        names = tuple(moments)
        matrices = [self.view.flatten(x) for x in (gradient, param, *moments.values())]
        results = jax.vmap(self._update_matrix(names, count))(*matrices)
        shapes = [gradient.shape, *(moment.shape for moment in moments.values())]
        update, *new = (self.view.restore(x, shape) for x, shape in zip(results, shapes, strict=True))
        return update, dict(zip(names, new, strict=True))

    def _update_matrix(self, names: Sequence[str], count: Array) -> Callable[..., tuple[Array, ...]]:
        rms = optax.scale_by_factored_rms(self.factored is not None, self.decay_rate, min_dim_size_to_factor=1)
        placeholder = jnp.zeros((1,), jnp.float32)

        def update(gradient: Array, param: Array, *moments: Array) -> tuple[Array, ...]:
            """Update one matrix [R, C] with its moments; those of factors have an extent of 1."""
            flat = {name: x.reshape(-1) if name != "v" else x for name, x in zip(names, moments, strict=True)}
            fields = {"v_row": placeholder, "v_col": placeholder, "v": placeholder} | flat
            scaled, state = rms.update(gradient, optax.FactoredState(count, **fields), param)
            new = (getattr(state, name).reshape(x.shape) for name, x in zip(names, moments, strict=True))
            return scaled, *new  # pyright: ignore[reportReturnType]

        return update
