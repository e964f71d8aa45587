"""The training step: accumulated gradients, a guard against non-finite values, clipping and the optimizer update.

Gradients are sums over all tokens of the batch, divided once by the summed token weights. In float16, `LossScale` keeps
them in range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import NamedSharding

from prepcli.models.layer_config import NO_DROPOUT, DropoutConfig
from prepcli.models.param_tree import (
    ParamLeaf,
    Tree,
    find_param_path,
    flatten_tree,
    reduced_axes,
    unflatten_tree,
)
from trainer.distributed.exact_reduction import ExactReduction, compiler_options
from trainer.distributed.sharding import ShardingContext
from trainer.nn import transformer
from trainer.nn.dropout import Dropout, step_dropout
from trainer.nn.lm_head import NO_LOSS_TERMS, LossTerms, TokenMetrics
from trainer.nn.model_spec import ForwardConfig, ModelSpec
from trainer.training.feed import STOP, TokenBatch
from trainer.training.optimizers import Optimizer, RoundingKey, bfloat16_to_float32

# Positive float16 values reach from 2^-24 to 65504, just below 2^16. The gradients of a mean over
# tokens are often below 2^-24 and become 0. Scales are powers of two, which change no other bit.
# Halving after an overflow and doubling after 2,000 steps without one follow Micikevicius et al.,
# "Mixed Precision Training" (arXiv:1710.03740, section 3.2) and torch.amp.GradScaler, which begins
# at 2^16 and doubles as often.
INITIAL_SCALE = 2.0**15
# The limit of NVIDIA apex too. Without one, a model with tiny gradients would double the scale until
# it overflows float32.
MAX_SCALE = 2.0**24
GROWTH_STEPS = 2000


class ScaleState(TypedDict, total=False):
    """The entries of the training state for a dynamic loss scale. A static scale has none."""

    loss_scale: Array  # The scale, float32 []
    loss_scale_steps: Array  # Steps since the last overflow or doubling, int32 []


@dataclass(frozen=True, slots=True)
class LossScale:
    """A loss scale."""

    initial: float = INITIAL_SCALE  # The scale of the first step
    # Whether an overflow halves it, and GROWTH_STEPS steps without one double it
    is_dynamic: bool = True

    def init(self) -> ScaleState:
        """Return the entries before the first step."""
        if not self.is_dynamic:
            return {}
        return {"loss_scale": jnp.float32(self.initial), "loss_scale_steps": jnp.int32(0)}

    def factor(self, state: ScaleState, num_tokens: int) -> Array:
        """Return the factor of the summed loss, float32 [].

        Args:
            state: The training state.
            num_tokens: Tokens of the batch, including tokens without weight.
        """
        scale = state.get("loss_scale", jnp.float32(self.initial))
        # The largest power of two up to num_tokens: 1000 tokens have 10 bits, so the divisor is 2^9
        # = 512. Division by a power of two changes only the exponent, without rounding.
        return scale / (1 << (num_tokens.bit_length() - 1))

    def next_state(self, state: ScaleState, is_finite: Array) -> ScaleState:
        """Return the entries after a training step.

        Args:
            state: The training state before the step.
            is_finite: Whether all gradients were finite.
        """
        if not self.is_dynamic:
            return {}
        assert "loss_scale" in state
        assert "loss_scale_steps" in state
        scale = state["loss_scale"]
        steps = state["loss_scale_steps"] + 1
        grows = steps == GROWTH_STEPS
        grown = jnp.where(grows, jnp.minimum(2 * scale, MAX_SCALE), scale)
        return {
            # The floor of 1 keeps a series of overflows from scaling the loss to 0.
            "loss_scale": jnp.where(is_finite, grown, jnp.maximum(scale / 2, 1.0)),
            "loss_scale_steps": jnp.where(is_finite & ~grows, steps, 0),
        }


# Entry of a batch with dropout: the index of each row in the step's batch, uint32 [batch]
ROW_IDS = "row_ids"
# Replaces a weight or norm of 0. It is far below the weight of one token.
MIN_DIVISOR = 1e-9


class TrainState(ScaleState, total=True):
    """The values that change from step to step. Checkpoints contain all of them.

    The names of the entries are the first parts of the names of saved leaves, e.g. `params.embed.tokens`.
    """

    params: Tree  # Parameters, of which `StepSetup.trained_params` are the changed ones
    opt_state: Tree  # Moments and averages of the optimizer
    step: Array  # Number of the last step, int32 []. 0 at the start.
    skipped: Array  # Number of skipped steps, int32 []
    # Number of skipped steps since the last one that was not skipped, int32 []
    skipped_in_row: Array


@dataclass(frozen=True, slots=True)
class StepSetup:
    """The static parts of a training step."""

    model: ModelSpec
    forward_config: ForwardConfig  # Execution options of the forward pass
    optimizer: Optimizer
    accumulate: int = 1  # Number of micro-batches per batch
    # Terms of the loss other than the cross entropy. Evaluation has none.
    loss_terms: LossTerms = NO_LOSS_TERMS
    # Rates of dropout and forgetful causal masking. Evaluation has none.
    dropout: DropoutConfig = NO_DROPOUT
    seed: int = 0  # Seed of the random masks, from 0 to 2^32 - 1
    loss_scale: LossScale | None = None  # Factor of the loss in float16. None in other dtypes.
    # Computes values of each token in evaluation by name. None without metrics.
    metric_fn: TokenMetrics | None = None
    # Logical shards of a batch, for gradients that are summed in a fixed order. 0 sums gradients in the order
    # that is fastest on the mesh.
    reduction_shards: int = 0
    # Dtype of the saved parameters in the state, "float32" or "bfloat16"
    param_dtype: str = "float32"
    # Dtype of each parameter of the base of adapters, by path. The default is float32.
    base_dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def exact_reduction(self) -> ExactReduction | None:
        """The sums in a fixed order, or None for sums in the fastest order."""
        if not self.reduction_shards:
            return None
        return ExactReduction(self.reduction_shards, self.sharding, self.trained_leaves)

    @property
    def sharding(self) -> ShardingContext:
        """The device mesh and its rules."""
        return self.forward_config.sharding

    @property
    def trained_leaves(self) -> dict[str, ParamLeaf]:
        """Parameters changed by training, by path: all saved parameters that `optimizer.freeze` does not match."""
        return self.optimizer.table.trained_leaves(self.model.saved_leaves)

    def param_dtype_of(self, path: str) -> str:
        """Return the dtype of a parameter in the state."""
        if path in self.model.saved_leaves:
            return self.param_dtype
        return self.base_dtypes.get(path, "float32")

    def trained_params(self, params: Tree) -> Tree:
        """Return the parameters changed by training."""
        leaves = flatten_tree(params)
        return unflatten_tree({path: leaves[path] for path in self.trained_leaves})

    def with_trained_params(self, params: Tree, trained: Tree) -> Tree:
        """Return all parameters, with new values of the trained ones."""
        return unflatten_tree({**flatten_tree(params), **flatten_tree(trained)})


def init_train_state(params: Tree, setup: StepSetup) -> TrainState:
    """Return the state before the first step."""
    opt_state = setup.optimizer.init(setup.trained_params(params), setup.trained_leaves)
    scale_state: ScaleState = {}
    if setup.loss_scale:
        scale_state = setup.loss_scale.init()
    return {
        "params": params,
        "opt_state": opt_state,
        "step": jnp.zeros((), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
        "skipped_in_row": jnp.zeros((), jnp.int32),
        **scale_state,
    }


def state_shapes(setup: StepSetup) -> TrainState:
    """Return the state with a `jax.ShapeDtypeStruct` with a sharding in the place of each array.

    Moments are sharded like their parameters. A statistic over some axes of a parameter is split
    along its other axes.
    """
    leaves = setup.model.leaves
    sharding = setup.sharding
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for path, leaf in leaves.items():
        dtype = jnp.dtype(setup.param_dtype_of(path))
        shapes[path] = jax.ShapeDtypeStruct(
            leaf.shape, dtype, sharding=sharding.param_sharding(leaf)
        )
    params = unflatten_tree(shapes)
    unsharded = jax.eval_shape(partial(init_train_state, setup=setup), params)

    def with_sharding(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        param_path = find_param_path(leaf_name(path), leaves)
        leaf_sharding = _state_sharding(leaf.shape, leaves.get(param_path or ""), sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding)

    return jax.tree_util.tree_map_with_path(with_sharding, unsharded)


def leaf_names(setup: StepSetup) -> set[str]:
    """Return the dotted names of all leaves of the state."""
    return {leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state_shapes(setup))}


def state_nbytes_per_device(setup: StepSetup) -> int:
    """Compute the bytes of parameters and optimizer state on one device."""
    nbytes = 0
    for leaf in jax.tree.leaves(state_shapes(setup)):
        shape = leaf.shape
        if leaf.sharding:
            shape = leaf.sharding.shard_shape(shape)
        nbytes += leaf.dtype.itemsize * math.prod(shape)
    return nbytes


def has_optimizer_state(setup: StepSetup) -> bool:
    """Return whether the optimizer keeps state between steps. Gradient descent without momentum keeps none."""
    return bool(jax.tree.leaves(state_shapes(setup)["opt_state"]))


def _state_sharding(
    shape: tuple[int, ...], param: ParamLeaf | None, sharding: ShardingContext
) -> NamedSharding | None:
    """Return the sharding of a leaf of the state. `param` is its parameter, or None if it has none."""
    if param is None:
        return sharding.replicated_sharding()
    axes = reduced_axes(shape, param.shape)
    if axes is None:
        return sharding.replicated_sharding()
    return sharding.statistic_sharding(param, axes)


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return a leaf's path in the state as a dotted name, such as `opt_state.adam.mu.embed.tokens`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def jit_train_step(setup: StepSetup) -> Any:
    """Return the jitted training step, which donates the state and keeps its shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(setup))
    options: dict[str, Any] | None = None
    if setup.reduction_shards:
        options = compiler_options()
    return jax.jit(
        partial(train_step, setup=setup),
        donate_argnums=0,
        out_shardings=(shardings, None),
        compiler_options=options,
    )


def train_step(
    state: TrainState, batch: TokenBatch, setup: StepSetup
) -> tuple[TrainState, dict[str, Array]]:
    """Compute gradients on a batch and apply the optimizer.

    If the loss or the gradient norm is not finite, or if no token has a weight, the step is
    skipped: only the counters and a dynamic loss scale change.

    Args:
        state: The state before the step.
        batch: Input of `transformer.training_sums`. Arrays are [batch, T], and those of a source [batch, S].
            With several processes also `STOP`, see `StopSignals`.
        setup: The static parts of the step.

    Returns:
        The new state, and the metrics of the step as arrays []: `loss`, `weight` and `correct`
        (sums over tokens), `z_loss` if the loss has this term, `grad_norm`, `lr`, the counters
        `skipped` and `in_row` of skipped steps, in total and in a row, and `STOP` if the batch has it.
    """
    params = state["params"]
    rows = {name: array for name, array in batch.items() if name != STOP}
    if setup.dropout.is_active:
        # A row's masks depend on its index in the step's batch. The index stays with the row when
        # the batch is split into micro-batches and over devices.
        rows[ROW_IDS] = jnp.arange(len(rows["tokens"]), dtype=jnp.uint32)
    factor: Array | None = None
    if setup.loss_scale:
        factor = setup.loss_scale.factor(state, rows["tokens"].size)
    gradients, sums, norm = _sum_gradients(params, rows, state["step"], setup=setup, factor=factor)
    # The loss of a batch is L = sum_t w_t l_t / W with W = sum_t w_t. `gradients` belong to the
    # sum alone. Micro-batches and devices see only a part of W: dividing once, here, makes the
    # result independent of them.
    weight = jnp.maximum(sums["weight"], MIN_DIVISOR)
    if norm is None:
        norm = optax.tree.norm(gradients)
    grad_norm = norm / weight
    is_valid = _is_valid(sums, grad_norm)
    gradients = _mean_gradients(
        gradients,
        weight,
        grad_norm,
        is_valid=is_valid,
        clip_norm=setup.optimizer.table.clip_norm,
    )
    # The schedule counts the steps that changed the parameters.
    learning_rate = setup.optimizer.lr_schedule.learning_rate(state["step"] - state["skipped"])
    new_state = _next_state(
        state, gradients, learning_rate, grad_norm=grad_norm, is_valid=is_valid, setup=setup
    )
    metrics = {
        **sums,
        "grad_norm": grad_norm,
        "lr": learning_rate,
        "skipped": new_state["skipped"],
        "in_row": new_state["skipped_in_row"],
    }
    if STOP in batch:
        # The maximum over the processes: if one must stop, all stop after this step.
        metrics[STOP] = jnp.max(batch[STOP])
    return new_state, metrics


def _is_valid(sums: Mapping[str, Array], grad_norm: Array) -> Array:
    """Return whether a step may change the parameters: its numbers are finite, and a token has a weight."""
    is_valid = jnp.isfinite(grad_norm) & jnp.isfinite(sums["loss"]) & (sums["weight"] > 0)
    if "z_loss" in sums:
        is_valid &= jnp.isfinite(sums["z_loss"])
    return is_valid


def _mean_gradients(
    gradients: Tree, weight: Array, grad_norm: Array, *, is_valid: Array, clip_norm: float
) -> Tree:
    """Divide summed gradients by the weight of the batch, and clip them. They are 0 if the step is not valid."""
    scale = 1.0 / weight
    if clip_norm:
        # Clipping by the global norm, g * min(1, c / |g|): Pascanu et al. 2013,
        # https://arxiv.org/abs/1211.5063
        clip = clip_norm / jnp.maximum(grad_norm, MIN_DIVISOR)
        scale = jnp.minimum(1.0, clip) / weight
    # A skipped step selects with `where`: a product with 0 would keep a nan.
    return jax.tree.map(lambda gradient: jnp.where(is_valid, gradient * scale, 0.0), gradients)


def _next_state(
    state: TrainState,
    gradients: Tree,
    learning_rate: Array,
    *,
    grad_norm: Array,
    is_valid: Array,
    setup: StepSetup,
) -> TrainState:
    """Apply the optimizer. Keep parameters and optimizer state if the step is not valid."""
    params = state["params"]
    trained = setup.trained_params(params)
    updated, opt_state = setup.optimizer.update(
        gradients,
        state["opt_state"],
        trained,
        leaves=setup.trained_leaves,
        learning_rate=learning_rate,
        rounding=RoundingKey(setup.seed, state["step"]),
    )
    is_skipped = (~is_valid).astype(jnp.int32)
    scale_state: ScaleState = {}
    if setup.loss_scale:
        scale_state = setup.loss_scale.next_state(state, jnp.isfinite(grad_norm))
    return {
        "params": setup.with_trained_params(params, _select_tree(is_valid, updated, trained)),
        "opt_state": _select_tree(is_valid, opt_state, state["opt_state"]),
        "step": state["step"] + 1,
        "skipped": state["skipped"] + is_skipped,
        # A step that is not skipped resets the counter to 0. The loop stops the run when it
        # reaches `train.max_skipped`.
        "skipped_in_row": (state["skipped_in_row"] + 1) * is_skipped,
        **scale_state,
    }


def _select_tree(condition: Array, if_true: Any, if_false: Any) -> Any:
    """Select one of two trees by a scalar condition."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def _sum_gradients(
    params: Tree, batch: TokenBatch, step: Array, *, setup: StepSetup, factor: Array | None
) -> tuple[Tree, dict[str, Array], Array | None]:
    """Compute the float32 sums of gradients and of loss, weights and correct tokens."""
    # The gradients are computed of factor * loss, and divided by the factor. An exact reduction also returns the norm
    # of the gradients.
    norm: Array | None = None
    exact = setup.exact_reduction
    if exact is not None:
        # Each logical shard is computed as on one device: a sharded program would choose the order
        # of the sums itself.
        forward_config = replace(setup.forward_config, sharding=ShardingContext())
        on_device = replace(setup, forward_config=forward_config)
        value_and_grad = _value_and_grad(step, on_device, factor)
        gradients, sums, norm = exact.sum_gradients(
            lambda params, rows: value_and_grad(
                bfloat16_to_float32(setup.trained_params(params)), params, rows
            ),
            params,
            batch,
        )
    else:
        value_and_grad = _value_and_grad(step, setup, factor)
        gradients, sums = _accumulate_gradients(params, batch, value_and_grad, setup=setup)
    if factor is None:
        return gradients, sums, norm
    # The gradients are float32 here, so the division cannot underflow as it would in float16.
    gradients = jax.tree.map(lambda leaf: leaf / factor, gradients)
    if norm is not None:
        norm = norm / factor
    return gradients, sums, norm


def _value_and_grad(
    step: Array, setup: StepSetup, factor: Array | None
) -> Callable[[Tree, Tree, TokenBatch], Any]:
    """Return a function that computes ((loss, loss sums), gradients)."""

    # Its arguments are the trained parameters, widened so that their gradients are float32, all parameters, and rows.
    # With a factor, the loss and its gradients are multiplied by it, and the loss sums are not.
    def summed_loss(
        trained: Tree, params: Tree, rows: TokenBatch
    ) -> tuple[Array, dict[str, Array]]:
        params = setup.with_trained_params(params, trained)
        dropout: Dropout | None = None
        if setup.dropout.is_active:
            # Rows keep their masks however the batch is divided.
            dropout = step_dropout(setup.dropout, seed=setup.seed, step=step, row_ids=rows[ROW_IDS])
        sums = transformer.training_sums(
            params, rows, setup.model, setup.forward_config, setup.loss_terms, dropout=dropout
        )
        total = sums.total
        if factor is not None:
            total = total * factor
        return total, sums.by_name()

    return jax.value_and_grad(summed_loss, has_aux=True)


def _accumulate_gradients(
    params: Tree,
    batch: TokenBatch,
    value_and_grad: Callable[[Tree, Tree, TokenBatch], Any],
    *,
    setup: StepSetup,
) -> tuple[Tree, dict[str, Array]]:
    """Sum gradients and metrics over all micro-batches, in the order that is fastest on the mesh."""
    trained = setup.trained_params(params)
    if setup.accumulate == 1:
        (_, sums), gradients = value_and_grad(bfloat16_to_float32(trained), params, batch)
        return _shard_like_params(gradients, setup), sums

    def add_micro_batch(
        totals: tuple[Tree, dict[str, Array]], micro_batch: TokenBatch
    ) -> tuple[tuple[Tree, dict[str, Array]], None]:
        (_, sums), gradients = value_and_grad(bfloat16_to_float32(trained), params, micro_batch)
        total_gradients, total_sums = jax.tree.map(jnp.add, totals, (gradients, sums))
        return (_shard_like_params(total_gradients, setup), total_sums), None

    # The loss of a micro-batch m is a sum over its tokens, L_m = sum_t w_t l_t, not a mean. So
    # sum_m L_m and sum_m grad L_m belong to the whole batch, however many tokens a micro-batch has.
    # A mean of the means of [3, 1] tokens would give the single token the weight of the other three.
    # The sums are float32 and only their order, so their rounding, depends on `accumulate`.
    zero_gradients = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
    zero_sums = {name: jnp.float32(0) for name in setup.loss_terms.sum_names}
    zeros = (_shard_like_params(zero_gradients, setup), zero_sums)
    # A scan holds the activations of one micro-batch at a time, and compiles its body once.
    return lax.scan(add_micro_batch, zeros, _split_micro_batches(batch, setup))[0]


def _shard_like_params(gradients: Tree, setup: StepSetup) -> Tree:
    """Constrain gradients to the shardings of their parameters, so that they are reduced to these shards."""
    sharding = setup.sharding
    if sharding.device_mesh is None:
        return gradients
    # Without the constraint XLA may all-reduce whole gradients. With it, a reduce-scatter leaves
    # each device its shard.
    constrained: dict[str, Array] = {}
    for path, gradient in flatten_tree(gradients).items():
        param_sharding = sharding.param_sharding(setup.model.leaves[path])
        constrained[path] = lax.with_sharding_constraint(gradient, param_sharding)
    return unflatten_tree(constrained)


def _split_micro_batches(batch: TokenBatch, setup: StepSetup) -> dict[str, Array]:
    """Reshape [batch, ...] to [accumulate, micro-batch, ...]. Each device keeps its rows of every micro-batch."""
    num_micro_batches = setup.accumulate

    def split(array: Array) -> Array:
        # Row r goes to micro-batch r % n. With n = 2, the rows [0 1 | 2 3] of two devices become
        # the micro-batches [0 | 2] and [1 | 3]. Contiguous halves would move rows between devices.
        micro_batch_size = array.shape[0] // num_micro_batches
        interleaved = array.reshape(micro_batch_size, num_micro_batches, *array.shape[1:])
        stacked = interleaved.swapaxes(0, 1)
        axes = ("part", "batch", "seq")[: stacked.ndim]
        sharding = setup.sharding.activation_sharding(stacked.shape, *axes)
        if sharding is None:
            return stacked
        return lax.with_sharding_constraint(stacked, sharding)

    return {name: split(array) for name, array in batch.items()}
