"""Muon for the matrices of layers, with Adam for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
import optax.contrib
from jax import Array

from prepcli.models.leaf_matrices import MatrixAxes, is_layer_matrix, matrix_axes
from prepcli.models.param_tree import ParamLeaf, Tree, unflatten_tree
from trainer.recipe.optimizer_tables import MuonTable
from trainer.training.optimizers.scaling import scale_by_rate
from trainer.training.optimizers.weight_decay import WeightDecay


@dataclass(frozen=True, slots=True)
class Muon:
    """Orthogonalized momentum for each matrix of each layer.

    The momentum is corrected for its bias as in `optax.contrib.muon`: with Nesterov's momentum, the
    first steps differ from the original post (https://kellerjordan.github.io/posts/muon/), which
    has no correction. Embeddings, the head, norms and biases have Adam. The Newton-Schulz
    iterations are in float32.

    Attributes:
        momentum: Decay rate of the momentum.
        nesterov: Whether to use Nesterov's momentum.
        bias_correction: Whether to correct the bias of the momentum.
        newton_schulz_steps: Iterations of the orthogonalization.
        update_rms: Root mean square of the updates (arXiv:2502.16982). 0 scales them by
            sqrt(max(1, rows / columns)) instead.
        b1: Decay rate of Adam's first moment.
        b2: Decay rate of Adam's second moment.
        eps: Added to Adam's denominator, and to the norm of a matrix.
    """

    momentum: float = 0.95
    nesterov: bool = True
    bias_correction: bool = True
    newton_schulz_steps: int = 5
    update_rms: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    def transformation(
        self, leaves: Mapping[str, ParamLeaf], decay: WeightDecay
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain of Muon, Adam, weight decay and learning rate.

        See `UpdateRule`.
        """
        # Gradient g, momentum m, parameter x [R, C], learning rate l, weight decay w:
        #     m <- b m + (1 - b) g
        #     u = U V^T, where m = U S V^T is the singular value decomposition
        #     x <- x - l (factor u + w x)
        # Newton-Schulz iterations approximate U V^T by matrix products alone: all singular values
        # of m become about 1.
        axes: dict[str, MatrixAxes | None] = {}
        factors: dict[str, float] = {}
        for path, leaf in leaves.items():
            leaf_axes = None
            factor = 1.0
            if is_layer_matrix(leaf):
                leaf_axes = matrix_axes(leaf)
            if leaf_axes:
                factor = self._update_factor(leaf, leaf_axes)
            axes[path] = leaf_axes
            factors[path] = factor
        is_matrix = unflatten_tree({path: value is not None for path, value in axes.items()})
        is_other = jax.tree.map(lambda value: not value, is_matrix)
        return optax.named_chain(
            ("muon", optax.masked(self._scale_by_muon(axes), is_matrix)),
            ("scale", _scale_leaves(unflatten_tree(factors))),
            ("adam", optax.masked(optax.scale_by_adam(self.b1, self.b2, self.eps), is_other)),
            ("decay", decay.transformation(leaves)),
            ("rate", scale_by_rate()),
        )

    def _scale_by_muon(self, axes: Mapping[str, MatrixAxes | None]) -> optax.GradientTransformation:
        """Return Muon for the leaves with matrix axes.

        Other leaves are masked.
        """
        dimension_numbers: dict[str, Any] = {}
        for path, value in axes.items():
            dimension_numbers[path] = optax.MaskedNode()
            if value:
                # Reduction axes, then output axes: a matrix [R, C] maps C inputs to R outputs.
                dimension_numbers[path] = optax.contrib.MuonDimensionNumbers(
                    value.columns, value.rows
                )
        scale = partial(
            optax.contrib.scale_by_muon,
            ns_steps=self.newton_schulz_steps,
            eps=self.eps,
            weight_dimension_numbers=lambda _: unflatten_tree(dimension_numbers),
        )
        if self.bias_correction:
            return scale(beta=self.momentum, nesterov=self.nesterov)
        # With beta=0 optax applies no momentum and no correction. It only orthogonalizes.
        return self._with_plain_momentum(scale(beta=0.0, nesterov=False))

    def _with_plain_momentum(
        self, orthogonalize: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        """Return Muon with the momentum of the original post, from gradients g and the decay rate b.

        The momentum is m = b * m + (1 - b) * g. With Nesterov's momentum, the update is b * m + (1 - b) * g.
        """

        def average(momentum: Array, gradient: Array) -> Array:
            return self.momentum * momentum + (1 - self.momentum) * gradient

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            momentum = jax.tree.map(average, state.mu, updates)
            averaged = momentum
            if self.nesterov:
                averaged = jax.tree.map(average, momentum, updates)
            result: Any = orthogonalize.update(averaged, state, params)
            orthogonal, new_state = result
            return orthogonal, new_state._replace(mu=momentum)

        return optax.GradientTransformation(orthogonalize.init, update)

    def _update_factor(self, leaf: ParamLeaf, axes: MatrixAxes) -> float:
        """Return the factor of the orthogonal updates of a leaf."""
        rows = math.prod(leaf.shape[axis] for axis in axes.rows)
        columns = math.prod(leaf.shape[axis] for axis in axes.columns)
        if not self.update_rms:
            return math.sqrt(max(1, rows / columns))
        # An orthogonal [R, C] matrix has min(R, C) singular values of 1, so its root mean square is
        # sqrt(min(R, C) / (R C)) = 1 / sqrt(max(R, C)) (arXiv:2502.16982, lemma 1).
        return math.sqrt(max(rows, columns)) * self.update_rms


def _scale_leaves(factors: Tree) -> optax.GradientTransformation:
    """Return the transformation that multiplies each leaf by its factor."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scale(factor: float, leaf: Array) -> Array:
            return leaf * factor

        return jax.tree.map(scale, factors, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def build_muon(table: MuonTable) -> Muon:
    """Build Muon from its recipe table."""
    names = (
        "momentum",
        "nesterov",
        "bias_correction",
        "newton_schulz_steps",
        "update_rms",
        "b1",
        "b2",
        "eps",
    )
    return Muon(**{name: getattr(table, name) for name in names})
