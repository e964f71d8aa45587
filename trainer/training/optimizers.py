"""Optimizers: the tables of recipes as update rules, their state, and bfloat16 between steps."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import Array, lax

from prepcli.models.param_tree import (
    DecayRule,
    MatrixAxes,
    ParamLeaf,
    Tree,
    find_param_path,
    flatten_tree,
    is_layer_matrix,
    matrix_axes,
    unflatten_tree,
)
from prepcli.models.rules import path_without_layers
from trainer.nn.dropout import RandomStream, derive_key, random_bits, step_key, uint32
from trainer.recipe.lr_schedule import LRSchedule, build_lr_schedule
from trainer.recipe.optimizer_tables import (
    AdafactorTable,
    AdamWTable,
    AnyOptimizerTable,
    LionTable,
    MuonTable,
    OptimizerTable,
    PalmTable,
    SGDTable,
)
from trainer.training.factored_moments import by_matrix, scale_by_factored_moments

# Moments and parameters in bfloat16 between steps, rounded stochastically.
#
# A random number of 16 bits is added to the 16 low bits that bfloat16 cuts off, so that the expected
# value of a rounded number is the number. The random number depends on the seed, the step, the name
# of the leaf, the layer and the coordinates of the element. It does not depend on devices or on the
# stacking of layers, and a resumed run draws the same numbers as the uninterrupted one.

# Bits of float32 that bfloat16 does not have.
LOW_BITS = 16


class RoundingKey(NamedTuple):
    """The seed of a run and the number of a step, int32 []."""

    seed: int
    step: Array


def bfloat16_to_float32(tree: Any) -> Any:
    """Return a tree of arrays, such as an optimizer state, with float32 in place of bfloat16."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree
    )


def narrow_moments(
    state: Any, leaves: Mapping[str, ParamLeaf], dtype: str, key: RoundingKey | None
) -> Any:
    """Return an optimizer state with moments in a dtype.

    State that belongs to no parameter keeps its dtype.

    Args:
        state: The state with float32 moments.
        leaves: Parameters by path.
        dtype: Dtype of the moments.
        key: Seed and step of stochastic rounding. None for values that are exact in the dtype.
    """
    if dtype == "float32":
        return state

    def narrow(path: tuple[Any, ...], moment: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        param_path = find_param_path(name, leaves)
        if param_path is None or moment.dtype != jnp.float32:
            return moment
        if key is None:
            return moment.astype(dtype)
        bits = _rounding_bits(key, name, leaves[param_path], moment.shape)
        return round_stochastically(moment, bits)

    return jax.tree_util.tree_map_with_path(narrow, state)


def narrow_params(
    updated: Tree, before: Tree, *, leaves: Mapping[str, ParamLeaf], key: RoundingKey
) -> Tree:
    """Return updated parameters in the dtypes that they had before the step.

    Args:
        updated: The updated parameters in float32.
        before: The parameters before the step.
        leaves: Parameters by path.
        key: Seed and step of stochastic rounding.
    """
    dtypes = {path: leaf.dtype for path, leaf in flatten_tree(before).items()}

    def narrow(path: str, param: Array) -> Array:
        if param.dtype == dtypes[path]:
            return param
        return round_stochastically(
            param, _rounding_bits(key, f"params.{path}", leaves[path], param.shape)
        )

    return unflatten_tree(
        {path: narrow(path, param) for path, param in flatten_tree(updated).items()}
    )


def round_stochastically(x: Array, bits: Array) -> Array:
    """Round float32 to bfloat16, up with the probability of the fraction that is cut off.

    Args:
        x: Float32 values. Infinities and NaN stay.
        bits: Random uint32 of the same shape. The upper half is used.
    """
    # With low bits f, 2^16 random values are added and f of them carry into the kept part: it is
    # rounded up with probability f / 2^16.
    return _cut_low_bits(x, lax.bitcast_convert_type(x, jnp.uint32) + (bits >> LOW_BITS))


def round_to_nearest(x: Array) -> Array:
    """Round float32 to bfloat16, ties to even.

    The bits are rounded as integers: devices may flush subnormal values, and XLA may leave out a
    cast to bfloat16 and back.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    is_odd = (bits >> LOW_BITS) & 1
    # Adds 0x7FFF, or 0x8000 if the kept part is odd: low bits above 0x8000 carry into the kept
    # part, and exactly 0x8000 carries only into an odd one (ties to even).
    return _cut_low_bits(x, bits + uint32(2 ** (LOW_BITS - 1) - 1) + is_odd)


def _cut_low_bits(x: Array, wide: Array) -> Array:
    """Return the upper halves of uint32 bits as bfloat16, and the values of `x` that are not finite."""
    rounded = lax.bitcast_convert_type((wide >> LOW_BITS).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _rounding_bits(key: RoundingKey, name: str, leaf: ParamLeaf, shape: tuple[int, ...]) -> Array:
    """Return a random uint32 per element of a moment, or per element of the parameter."""
    rounding_key = step_key(RandomStream.ROUNDING, seed=key.seed, step=key.step)
    # The key depends on name and layer, not on the stacking: layer 3 of a stacked leaf draws the
    # same bits as the unstacked leaf of layer 3.
    leaf_key = derive_key(rounding_key, zlib.crc32(path_without_layers(name).encode()))
    axes = [axis for axis in range(len(shape)) if axis != leaf.stack_axis]
    layers = uint32(leaf.layer_index or 0)
    if leaf.stack_axis is not None:
        layers = _coordinates(shape, leaf.stack_axis)
    rows = uint32(0)
    if axes:
        rows = _coordinates(shape, axes[0])
    # Layer and row are in the key, the other coordinates in a 32-bit counter: a row would need
    # more than 2^32 elements to repeat a number.
    index = jnp.zeros((1,) * len(shape), jnp.uint32)
    for axis in axes[1:]:
        index = index * uint32(shape[axis]) + _coordinates(shape, axis)
    return jnp.broadcast_to(random_bits(derive_key(leaf_key, layers, rows), index), shape)


def _coordinates(shape: tuple[int, ...], axis: int) -> Array:
    """Return the coordinates along an axis, uint32, with extent 1 in all other axes."""
    extents = [1] * len(shape)
    extents[axis] = shape[axis]
    return lax.broadcasted_iota(jnp.uint32, extents, axis)


# An optimizer: the table of a recipe with its learning rate schedule, and its state.

# Entry of the optimizer state with the averages.
EMA = "ema"
OptState = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer with its learning rate schedule."""

    table: AnyOptimizerTable  # The recipe's `[optimizer]`
    lr_schedule: LRSchedule  # The learning rate

    def transformation(
        self, leaves: Mapping[str, ParamLeaf]
    ) -> optax.GradientTransformationExtraArgs:
        """Return the optax transformation from clipped gradients to updates. See `rules`.

        Args:
            leaves: Trained parameters by path.
        """
        return RULES[self.table.type](self.table, leaves)

    def init(self, params: Tree, leaves: Mapping[str, ParamLeaf]) -> OptState:
        """Return the state before the first step.

        Args:
            params: The trained parameters, in float32 or bfloat16.
            leaves: Their leaves.
        """
        wide_params = bfloat16_to_float32(params)
        state: Any = self.transformation(leaves).init(wide_params)
        moments = narrow_moments(state, leaves, self.table.moment_dtype, None)
        if not self.table.ema:
            return moments
        # A copy: the step donates both buffers, and a buffer can be donated once.
        return {**moments, EMA: jax.tree.map(lambda leaf: leaf.copy(), wide_params)}

    def update(
        self,
        gradients: Tree,
        opt_state: OptState,
        params: Tree,
        *,
        leaves: Mapping[str, ParamLeaf],
        learning_rate: Array,
        rounding: RoundingKey,
    ) -> tuple[Tree, OptState]:
        """Return the trained parameters and the state after a step.

        The update is computed in float32. Parameters in bfloat16 are rounded stochastically.
        Averages are float32, of the values before they are rounded.

        Args:
            gradients: Clipped gradients of the trained parameters, in float32.
            opt_state: The state before the step.
            params: The trained parameters before the step.
            leaves: Their leaves.
            learning_rate: The learning rate of the step, [].
            rounding: Seed and number of the step.
        """
        moments = {name: value for name, value in opt_state.items() if name != EMA}
        # A bfloat16 has 8 significant bits: near 1 its values are 1/128 apart, and updates of 1e-4
        # would be lost. Everything is computed in float32 and rounded once, at the end.
        wide_params = bfloat16_to_float32(params)
        updates, wide = self.transformation(leaves).update(
            gradients, bfloat16_to_float32(moments), wide_params, learning_rate=learning_rate
        )
        updated = jax.tree.map(lambda leaf, update: leaf - update, wide_params, updates)
        new_state: Any = narrow_moments(wide, leaves, self.table.moment_dtype, rounding)
        if ema := self.table.ema:
            # Exponential moving average of the parameters x: a <- d a + (1 - d) x. It starts at the
            # initial parameters, so it has no bias to correct. With d = 0.999 the last 1,000 steps
            # have 1 - 0.999^1000 = 63 % of the weight.
            averages = jax.tree.map(lambda a, b: ema * a + (1 - ema) * b, opt_state[EMA], updated)
            new_state = {**new_state, EMA: averages}
        return narrow_params(updated, params, leaves=leaves, key=rounding), new_state


def build_optimizer(table: AnyOptimizerTable, steps: int) -> Optimizer:
    """Return the optimizer of a run.

    Args:
        table: The recipe's `[optimizer]`.
        steps: Steps of the run.

    Raises:
        UsageError: The decay would end before the warm-up does.
    """
    return Optimizer(table, build_lr_schedule(table, steps))


# Update rules by `optimizer.type`: functions from the recipe's table to optax transformations.
#
# The training step computes `params - updates`. `optax.apply_updates` would add them. The `update` of a transformation
# takes the extra argument `learning_rate`, 1 by default. In the equations, a step has the gradient g, parameter x,
# learning rate l, weight decay w, and number t from 1.

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
    """Return Muon with the momentum of the original post, from gradients g and the decay rate b."""

    # The momentum is m = b * m + (1 - b) * g. With Nesterov's momentum, the update is b * m + (1 - b) * g.
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
