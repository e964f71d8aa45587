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

from prepcli.models.param_tree import (
    FactoredAxes,
    ParamLeaf,
    Tree,
    factored_axes,
    flatten_tree,
    matrix_axes,
    reduce_leaf,
    unflatten_tree,
)


class FactoredMoments(NamedTuple):
    """Second moments: `v_row` and `v_col` of factored leaves, `v` of all other leaves.

    The leaves of `v_row` and `v_col` keep the axes that they are means over, with extent 1.
    """

    # int32 []. `Any`, since a tuple has a method of this name.
    count: Any
    v_row: Tree
    v_col: Tree
    v: Tree


@dataclass(frozen=True, slots=True)
class MatrixView:
    """The way to reshape a leaf to matrices [B, R, C] and back."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @staticmethod
    def of(leaf: ParamLeaf) -> MatrixView:
        """Return the view of a leaf. A leaf without matrices has one vector per layer."""
        if axes := matrix_axes(leaf):
            return MatrixView(axes.batch, axes.rows, axes.columns)
        batch: tuple[int, ...] = ()
        if leaf.stack_axis is not None:
            batch = (leaf.stack_axis,)
        rows = tuple(axis for axis in range(len(leaf.dims)) if axis not in batch)
        return MatrixView(batch, rows, ())

    def flatten(self, x: Array) -> Array:
        """Return a leaf, or a statistic with axes of extent 1, as [B, R, C].

        For example, attention queries [layers, embed, heads, head_dim] become [layers, embed, heads * head_dim].
        """
        extents: list[int] = []
        for group in (self.batch, self.rows, self.columns):
            extents.append(math.prod(x.shape[axis] for axis in group))
        return x.transpose(self._order).reshape(extents)

    def restore(self, x: Array, shape: Sequence[int]) -> Array:
        """Return [B, R, C] as a leaf of this shape."""
        order = self._order
        transposed = x.reshape([shape[axis] for axis in order])
        # The inverse permutation: order (2, 0, 1) is undone by (1, 2, 0).
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
            # [B, R, C] -> B calls on [R, C]: each layer of a stacked leaf is a matrix, as without
            # stacking.
            matrices = jax.vmap(apply)(view.flatten(update), view.flatten(param))
            return view.restore(matrices, update.shape)

        return jax.tree.map(update_leaf, views, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def scale_by_factored_moments(
    leaves: Mapping[str, ParamLeaf], decay_rate: float, min_factored_size: int
) -> optax.GradientTransformation:
    """Return `optax.scale_by_factored_rms` of the matrices of each layer.

    A factored second moment V [R, C] is estimated from its row means r [R] and column means c [C]:
    V = r c^T / mean(r) (Adafactor, arXiv:1804.04235, algorithm 4). It takes R + C values instead of
    R * C.

    Args:
        leaves: Parameters by path.
        decay_rate: Power r of the decay rate 1 - step^-r.
        min_factored_size: Smallest dim of a factored matrix. 0 means no factors.
    """
    # E.g. V = [[1, 2], [3, 6]] has r = [1.5, 4.5], c = [2, 4] and mean(r) = 3, so that
    # r c^T / 3 = [[1, 2], [3, 6]]: a V of rank 1 is exact. Among all V of rank 1, this one has the
    # least generalized Kullback-Leibler divergence from the true moments (section 3).
    factored: dict[str, FactoredAxes] = {}
    if min_factored_size:
        for path, leaf in leaves.items():
            axes = factored_axes(leaf, min_factored_size)
            if axes:
                factored[path] = axes

    def init(params: Any) -> FactoredMoments:
        v_row: dict[str, Array] = {}
        v_col: dict[str, Array] = {}
        v: dict[str, Array] = {}
        for path, axes in factored.items():
            v_row[path] = _zeros(reduce_leaf(leaves[path], axes.row_mean))
            v_col[path] = _zeros(reduce_leaf(leaves[path], axes.col_mean))
        for path, param in flatten_tree(params).items():
            if path not in factored:
                v[path] = jnp.zeros_like(param)
        return FactoredMoments(
            jnp.zeros((), jnp.int32),
            v_row=unflatten_tree(v_row),
            v_col=unflatten_tree(v_col),
            v=unflatten_tree(v),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, FactoredMoments]:
        names = ("v_row", "v_col", "v")
        old_moments = {name: flatten_tree(getattr(state, name)) for name in names}
        new_moments: dict[str, dict[str, Array]] = {name: {} for name in names}
        flat_params = flatten_tree(params)
        new_updates: dict[str, Array] = {}
        for path, gradient in flatten_tree(updates).items():
            rule = _LeafRule(MatrixView.of(leaves[path]), factored.get(path), decay_rate)
            # A factored leaf has `v_row` and `v_col`, another leaf has `v`.
            moments: dict[str, Array] = {}
            for name in names:
                if path in old_moments[name]:
                    moments[name] = old_moments[name][path]
            new_updates[path], moments = rule.update(
                gradient, moments, flat_params[path], count=state.count
            )
            for name, value in moments.items():
                new_moments[name][path] = value
        count: Any = optax.safe_increment(state.count)
        new_state = FactoredMoments(count, *map(unflatten_tree, new_moments.values()))
        return unflatten_tree(new_updates), new_state

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
        new_update, *new_values = jax.vmap(self._update_matrix(names, count))(*matrices)
        new_moments: dict[str, Array] = {}
        for name, value in zip(names, new_values, strict=True):
            new_moments[name] = self.view.restore(value, moments[name].shape)
        return self.view.restore(new_update, gradient.shape), new_moments

    def _update_matrix(
        self, names: Sequence[str], count: Array
    ) -> Callable[..., tuple[Array, ...]]:
        rms = optax.scale_by_factored_rms(
            self.factored is not None, self.decay_rate, min_dim_size_to_factor=1
        )
        placeholder = jnp.zeros((1,), jnp.float32)

        def update(gradient: Array, param: Array, *moments: Array) -> tuple[Array, ...]:
            """Update one matrix [R, C]. Factored moments have the shapes [R, 1] and [1, C]."""
            # optax keeps factors as vectors, and an array of one element for each absent moment.
            fields = {"v_row": placeholder, "v_col": placeholder, "v": placeholder}
            for name, moment in zip(names, moments, strict=True):
                if name != "v":
                    moment = moment.reshape(-1)
                fields[name] = moment
            # `min_dim_size_to_factor=1` lets optax factor every matrix here: `factored_axes` has
            # chosen the leaves already.
            scaled, state = rms.update(gradient, optax.FactoredState(count, **fields), param)
            new: list[Array] = []
            for name, moment in zip(names, moments, strict=True):
                new.append(getattr(state, name).reshape(moment.shape))
            return scaled, *new  # pyright: ignore[reportReturnType]

        return update
