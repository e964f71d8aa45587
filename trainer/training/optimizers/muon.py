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

from trainer.models.leaf_matrices import MatrixAxes, is_layer_matrix, matrix_axes
from trainer.models.param_tree import ParamLeaf, Tree, unflatten_tree
from trainer.recipe.optimizer_tables import MuonTable
from trainer.training.optimizers.scaling import scale_by_rate
from trainer.training.optimizers.weight_decay import WeightDecay


@dataclass(frozen=True, slots=True)
class Muon:
    """Orthogonalized momentum for each matrix of each layer.

    The momentum is corrected for its bias as in `optax.contrib.muon`: with Nesterov's momentum, the first steps differ
    from the original post (https://kellerjordan.github.io/posts/muon/), which has no correction. Embeddings, the head,
    norms and biases have Adam. The Newton-Schulz iterations are in float32.

    Attributes:
        momentum: Decay rate of the momentum.
        nesterov: Whether to use Nesterov's momentum.
        bias_correction: Whether to correct the bias of the momentum.
        newton_schulz_steps: Iterations of the orthogonalization.
        update_rms: Root mean square of the updates (arXiv:2502.16982); 0 to scale them by sqrt(max(1, rows / columns)).
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
        """Return the chain of Muon, Adam, weight decay and learning rate; see `UpdateRule`."""
        axes = {path: matrix_axes(leaf) if is_layer_matrix(leaf) else None for path, leaf in leaves.items()}
        is_matrix = unflatten_tree({path: value is not None for path, value in axes.items()})
        is_other = jax.tree.map(lambda value: not value, is_matrix)
        factors = {path: self._factor(leaves[path], value) if value else 1.0 for path, value in axes.items()}
        return optax.named_chain(
            ("muon", optax.masked(self._scale_by_muon(axes), is_matrix)),
            ("scale", _scale_leaves(unflatten_tree(factors))),
            ("adam", optax.masked(optax.scale_by_adam(self.b1, self.b2, self.eps), is_other)),
            ("decay", decay.transformation(leaves)),
            ("rate", scale_by_rate()),
        )

    def _scale_by_muon(self, axes: Mapping[str, MatrixAxes | None]) -> optax.GradientTransformation:
        """Return Muon for the leaves with matrix axes; the others are masked."""
        dimension_numbers = {
            path: optax.contrib.MuonDimensionNumbers(value.columns, value.rows) if value else optax.MaskedNode()
            for path, value in axes.items()
        }
        scale = partial(
            optax.contrib.scale_by_muon,
            ns_steps=self.newton_schulz_steps,
            eps=self.eps,
            weight_dimension_numbers=lambda _: unflatten_tree(dimension_numbers),
        )
        if self.bias_correction:
            return scale(beta=self.momentum, nesterov=self.nesterov)
        # Without a momentum of its own, optax corrects nothing, and only orthogonalizes.
        return self._with_plain_momentum(scale(beta=0.0, nesterov=False))

    def _with_plain_momentum(self, orthogonalize: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return Muon with the momentum of the original post, from gradients g and the decay rate b.

        The momentum is m = b * m + (1 - b) * g. With Nesterov's momentum, the update is b * m + (1 - b) * g.
        """

        def average(momentum: Array, gradient: Array) -> Array:
            return self.momentum * momentum + (1 - self.momentum) * gradient

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            momentum = jax.tree.map(average, state.mu, updates)
            averaged = jax.tree.map(average, momentum, updates) if self.nesterov else momentum
            result: Any = orthogonalize.update(averaged, state, params)
            orthogonal, new_state = result
            return orthogonal, new_state._replace(mu=momentum)

        return optax.GradientTransformation(orthogonalize.init, update)

    def _factor(self, leaf: ParamLeaf, axes: MatrixAxes) -> float:
        """Return the factor of the orthogonal updates of a leaf."""
        rows, columns = (math.prod(leaf.shape[axis] for axis in group) for group in (axes.rows, axes.columns))
        return math.sqrt(max(rows, columns)) * self.update_rms if self.update_rms else math.sqrt(max(1, rows / columns))


def _scale_leaves(factors: Tree) -> optax.GradientTransformation:
    """Return the transformation that multiplies each leaf by its factor."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scale(factor: float, leaf: Array) -> Array:
            return leaf * factor

        return jax.tree.map(scale, factors, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def build_muon(table: MuonTable) -> Muon:
    """Build Muon from its recipe table."""
    names = ("momentum", "nesterov", "bias_correction", "newton_schulz_steps", "update_rms", "b1", "b2", "eps")
    return Muon(**{name: getattr(table, name) for name in names})
