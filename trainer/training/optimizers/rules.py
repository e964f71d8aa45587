"""Update rules by `optimizer.type`: functions from the recipe's table to optax transformations.

The training step computes `params - updates`. `optax.apply_updates` would add them. The `update` of a transformation
takes the extra argument `learning_rate`, 1 by default. In the equations, a step has the gradient g, parameter x,
learning rate l, weight decay w, and number t from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import optax
import optax.contrib
from jax import Array

from prepcli.models.param_tree import (
    DecayRule,
    MatrixAxes,
    ParamLeaf,
    Tree,
    is_layer_matrix,
    matrix_axes,
    unflatten_tree,
)
from trainer.recipe.optimizer_tables import (
    AdafactorTable,
    AdamWTable,
    LionTable,
    MuonTable,
    OptimizerTable,
    PalmTable,
    SGDTable,
)
from trainer.training.optimizers.factored_moments import by_matrix, scale_by_factored_moments

# Trained parameters by path.
Leaves = Mapping[str, ParamLeaf]
Transformation = optax.GradientTransformationExtraArgs
# PaLM decays a parameter x by lr^2 x (arXiv:2204.02311, section 5). Here it is
# rate / PALM_REFERENCE_DECAY * lr^2 x, so a rate of 1e-4 gives the decay of the paper.
PALM_REFERENCE_DECAY = 1e-4


def adamw(table: AdamWTable, leaves: Leaves) -> Transformation:
    """Return Adam with decoupled weight decay (arXiv:1711.05101, algorithm 2)."""
    # Moments m and v:
    #     m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
    #     u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    #     x <- x - l (u + w x)
    # The decay comes after the moments: in Adam with L2 regularization, w x would be divided by
    # sqrt(v) too, and parameters with large gradients would hardly decay.
    return optax.named_chain(
        ("adam", optax.scale_by_adam(table.b1, table.b2, table.eps)),
        ("decay", _decay(table, leaves)),
        ("rate", _scale_by_rate()),
    )


def lion(table: LionTable, leaves: Leaves) -> Transformation:
    """Return the sign of an interpolation between momentum and gradient (arXiv:2302.06675, algorithm 2)."""
    # Momentum m:
    #     u = sign(b1 m + (1 - b1) g)
    #     m <- b2 m + (1 - b2) g
    #     x <- x - l (u + w x)
    # Every element of u is -1, 0 or 1. The paper chooses l 3 to 10 times smaller than for Adam.
    return optax.named_chain(
        ("lion", optax.scale_by_lion(table.b1, table.b2)),
        ("decay", _decay(table, leaves)),
        ("rate", _scale_by_rate()),
    )


def sgd(table: SGDTable, leaves: Leaves) -> Transformation:
    """Return gradient descent with momentum."""
    # Momentum m:
    #     m <- b m + g
    #     u = m, or g + b m with Nesterov's momentum
    #     x <- x - l (u + w x)
    # The sum has no factor 1 - b, as in torch.optim.SGD: constant gradients are scaled by
    # 1 / (1 - b), a factor of 10 for b = 0.9.
    momentum = optax.identity()
    if table.momentum:
        momentum = optax.trace(table.momentum, table.nesterov)
    return optax.named_chain(
        ("momentum", momentum),
        ("decay", _decay(table, leaves)),
        ("rate", _scale_by_rate()),
    )


def adafactor(table: AdafactorTable | PalmTable, leaves: Leaves) -> Transformation:
    """Return Adafactor (arXiv:1804.04235) in the order of `optax.adafactor`, or as PaLM used it.

    Root mean squares are of the matrices of each layer, or with `scale_by = "stacked"` of whole leaves, as in optax: a
    leaf of stacked layers then has one scale for all layers. The momentum averages updates that are scaled by the
    learning rates of their steps.
    """
    # Parameter x [R, C], decay d = 1 - t^-r (section 7.2):
    #     v <- d v + (1 - d) (g^2 + 1e-30)      factored, see `scale_by_factored_moments`
    #     u = g / sqrt(v)
    #     u <- u / max(1, rms(u) / clip_threshold)
    #     x <- x - lr max(1e-3, rms(x)) u       without `scale_by_parameter`: x - lr u
    # The first step has d = 0, so the moments need no correction of their start at 0.
    clip = scale = momentum = optax.identity()
    min_factored_size = 0
    decay_rate, decay_power = table.weight_decay, 1
    if isinstance(table, PalmTable):
        # "Adafactor without factorization": whole second moments, updates scaled by rms(x) and not clipped by their
        # own size.
        decay_rate, decay_power = table.weight_decay / PALM_REFERENCE_DECAY, 2
    else:
        min_factored_size = table.min_factored_size if table.factored else 0
        if table.clip_threshold:
            # u / max(1, rms(u) / d), section 6
            clip = optax.clip_by_block_rms(table.clip_threshold)
    if isinstance(table, PalmTable) or table.scale_by_parameter:
        # u * max(1e-3, rms(x)), section 8
        scale = optax.scale_by_param_block_rms()
    if table.momentum:
        momentum = optax.ema(table.momentum, debias=False)
    if table.scale_by == "layer":
        clip = by_matrix(clip, leaves)
        scale = by_matrix(scale, leaves)
    return optax.named_chain(
        ("rms", scale_by_factored_moments(leaves, table.decay_rate, min_factored_size)),
        ("clip", clip),
        ("rate", _scale_by_rate()),
        ("scale", scale),
        ("momentum", momentum),
        ("decay", _add_scaled_decay(decay_rate, decay_mask(table, leaves), decay_power)),
    )


def muon(table: MuonTable, leaves: Leaves) -> Transformation:
    """Return orthogonalized momentum for each matrix of each layer, with Adam for all other parameters.

    The momentum is corrected for its bias as in `optax.contrib.muon`: with Nesterov's momentum, the first steps differ
    from the original post (https://kellerjordan.github.io/posts/muon/), which has no correction. Embeddings, the head,
    norms and biases have Adam. The Newton-Schulz iterations are in float32.
    """
    # Momentum m, parameter x [R, C]:
    #     m <- b m + (1 - b) g
    #     u = U V^T, where m = U S V^T is the singular value decomposition
    #     x <- x - l (factor u + w x)
    # Newton-Schulz iterations approximate U V^T by matrix products alone: all singular values
    # of m become about 1.
    axes: dict[str, MatrixAxes | None] = {}
    factors: dict[str, float] = {}
    for path, leaf in leaves.items():
        leaf_axes = matrix_axes(leaf) if is_layer_matrix(leaf) else None
        axes[path] = leaf_axes
        factors[path] = _muon_factor(table, leaf, leaf_axes) if leaf_axes else 1.0
    is_matrix = unflatten_tree({path: value is not None for path, value in axes.items()})
    is_other = jax.tree.map(lambda value: not value, is_matrix)
    return optax.named_chain(
        ("muon", optax.masked(_scale_by_muon(table, axes), is_matrix)),
        ("scale", _scale_leaves(unflatten_tree(factors))),
        ("adam", optax.masked(optax.scale_by_adam(table.b1, table.b2, table.eps), is_other)),
        ("decay", _decay(table, leaves)),
        ("rate", _scale_by_rate()),
    )


# `optimizer.type` -> rule
RULES: Mapping[str, Callable[[Any, Leaves], Transformation]] = {
    "adamw": adamw,
    "adafactor": adafactor,
    "lion": lion,
    "muon": muon,
    "sgd": sgd,
    "palm": adafactor,
}


def decay_mask(table: OptimizerTable, leaves: Leaves) -> Tree:
    """Return for each leaf whether it has weight decay. See `DecayRule`."""
    rule = DecayRule(
        table.decay_embeddings, exclude=table.decay_exclude, include=table.decay_include
    )
    return unflatten_tree({path: rule.decays(leaf) for path, leaf in leaves.items()})


def _decay(table: OptimizerTable, leaves: Leaves) -> optax.GradientTransformation:
    """Return decoupled weight decay, before it is scaled by the learning rate (arXiv:1711.05101)."""
    return optax.add_decayed_weights(table.weight_decay, decay_mask(table, leaves))


def _scale_by_rate() -> Transformation:
    """Return the transformation that multiplies updates by the learning rate."""

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Array | float = 1.0,
        **_: Any,
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda leaf: learning_rate * leaf, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _add_scaled_decay(rate: float, mask: Any, power: int) -> Transformation:
    """Return the transformation that adds rate * learning_rate^power * parameter to updates of masked leaves."""

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Array | float = 1.0,
        **_: Any,
    ) -> tuple[Any, Any]:
        factor = rate * learning_rate**power

        def add(update: Array, param: Array, decays: bool) -> Array:
            return update + factor * param if decays else update

        return jax.tree.map(add, updates, params, mask), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _scale_by_muon(
    table: MuonTable, axes: Mapping[str, MatrixAxes | None]
) -> optax.GradientTransformation:
    """Return Muon for the leaves with matrix axes. Other leaves are masked."""
    dimension_numbers: dict[str, Any] = {}
    for path, value in axes.items():
        dimension_numbers[path] = optax.MaskedNode()
        if value:
            # Reduction axes, then output axes: a matrix [R, C] maps C inputs to R outputs.
            dimension_numbers[path] = optax.contrib.MuonDimensionNumbers(value.columns, value.rows)
    scale = partial(
        optax.contrib.scale_by_muon,
        ns_steps=table.newton_schulz_steps,
        eps=table.eps,
        weight_dimension_numbers=lambda _: unflatten_tree(dimension_numbers),
    )
    if table.bias_correction:
        return scale(beta=table.momentum, nesterov=table.nesterov)
    # With beta=0 optax applies no momentum and no correction. It only orthogonalizes.
    return _with_plain_momentum(table, scale(beta=0.0, nesterov=False))


def _with_plain_momentum(
    table: MuonTable, orthogonalize: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return Muon with the momentum of the original post, from gradients g and the decay rate b.

    The momentum is m = b * m + (1 - b) * g. With Nesterov's momentum, the update is b * m + (1 - b) * g.
    """

    def average(momentum: Array, gradient: Array) -> Array:
        return table.momentum * momentum + (1 - table.momentum) * gradient

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        momentum = jax.tree.map(average, state.mu, updates)
        averaged = momentum
        if table.nesterov:
            averaged = jax.tree.map(average, momentum, updates)
        result: Any = orthogonalize.update(averaged, state, params)
        orthogonal, new_state = result
        return orthogonal, new_state._replace(mu=momentum)

    return optax.GradientTransformation(orthogonalize.init, update)


def _muon_factor(table: MuonTable, leaf: ParamLeaf, axes: MatrixAxes) -> float:
    """Return the factor of the orthogonal updates of a leaf."""
    rows = math.prod(leaf.shape[axis] for axis in axes.rows)
    columns = math.prod(leaf.shape[axis] for axis in axes.columns)
    if not table.update_rms:
        return math.sqrt(max(1, rows / columns))
    # An orthogonal [R, C] matrix has min(R, C) singular values of 1, so its root mean square is
    # sqrt(min(R, C) / (R C)) = 1 / sqrt(max(R, C)) (arXiv:2502.16982, lemma 1).
    return math.sqrt(max(rows, columns)) * table.update_rms


def _scale_leaves(factors: Tree) -> optax.GradientTransformation:
    """Return the transformation that multiplies each leaf by its factor."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scale(factor: float, leaf: Array) -> Array:
            return leaf * factor

        return jax.tree.map(scale, factors, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)
