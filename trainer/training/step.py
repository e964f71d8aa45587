"""The training step: accumulated gradients, a guard against non-finite values, clipping and the optimizer update.

Gradients are sums over all tokens of the batch, divided once by the summed token weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from trainer.distributed.sharding import ShardingContext
from trainer.models.dropout_config import NO_DROPOUT, DropoutConfig
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.nn import transformer
from trainer.nn.dropout import Dropout, step_dropout
from trainer.nn.lm_head import NO_LOSS_TERMS, LossTerms
from trainer.nn.model_spec import ForwardConfig, ModelSpec
from trainer.training.exact_reduction import ExactReduction
from trainer.training.feed import TokenBatch
from trainer.training.optimizers.optimizer import Optimizer

TrainState = dict[str, Any]  # params, opt_state, and int32 []: step, skipped, skipped_in_row
LOSS_SUM_NAMES = ("loss", "weight", "correct")
ROW_IDS = "row_ids"  # entry of a batch with dropout: the index of each row in the step's batch, uint32 [batch]


@dataclass(frozen=True, slots=True)
class StepSetup:
    """The static parts of a training step.

    Attributes:
        model: The model.
        forward_config: Execution options of the forward pass.
        optimizer: The optimizer.
        accumulate: Number of micro-batches per batch.
        loss_terms: Terms of the loss besides the cross entropy; evaluation has none.
        dropout: Rates of dropout and forgetful causal masking; evaluation has none.
        seed: Seed of the random masks, from 0 to 2^32 - 1.
        reduction_shards: Logical shards of a batch whose gradients are summed in a fixed order; 0 to sum gradients
            in the order that is fastest on the mesh.
        frozen_dtypes: Dtype of each frozen parameter, by path; float32 for those that are absent.
    """

    model: ModelSpec
    forward_config: ForwardConfig
    optimizer: Optimizer
    accumulate: int = 1
    loss_terms: LossTerms = NO_LOSS_TERMS
    dropout: DropoutConfig = NO_DROPOUT
    seed: int = 0
    reduction_shards: int = 0
    frozen_dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def exact_reduction(self) -> ExactReduction | None:
        """The sums in a fixed order; None if they are in the fastest order."""
        if not self.reduction_shards:
            return None
        return ExactReduction(self.reduction_shards, self.sharding, self.model.trained_leaves)

    @property
    def sharding(self) -> ShardingContext:
        """The device mesh and its rules."""
        return self.forward_config.sharding

    @property
    def transformation(self) -> optax.GradientTransformation:
        """The optimizer as an optax transformation."""
        return self.optimizer.transformation(self.model.trained_leaves)

    def trained(self, params: Tree) -> Tree:
        """Return the parameters that training changes."""
        leaves = flatten_tree(params)
        return unflatten_tree({path: leaves[path] for path in self.model.trained_leaves})

    def with_trained(self, params: Tree, trained: Tree) -> Tree:
        """Return all parameters, with other values of those that training changes."""
        return unflatten_tree({**flatten_tree(params), **flatten_tree(trained)})


def init_train_state(params: Tree, setup: StepSetup) -> TrainState:
    """Return the state before the first step."""
    return {"params": params, "opt_state": setup.transformation.init(setup.trained(params)), **_zero_counters()}


def _zero_counters() -> dict[str, Array]:
    """Return the step counters of the state, all 0."""
    return {name: jnp.zeros((), jnp.int32) for name in ("step", "skipped", "skipped_in_row")}


def state_shapes(setup: StepSetup) -> TrainState:
    """Return shape, dtype and sharding of each leaf of the state; moments are sharded like their parameters."""
    leaves, sharding = setup.model.leaves, setup.sharding
    param_shardings = {path: sharding.param_sharding(leaf) for path, leaf in leaves.items()}
    params = unflatten_tree(
        {
            path: jax.ShapeDtypeStruct(
                leaf.shape, jnp.dtype(setup.frozen_dtypes.get(path, "float32")), sharding=param_shardings[path]
            )
            for path, leaf in leaves.items()
        }
    )
    unsharded = jax.eval_shape(partial(init_train_state, setup=setup), params)

    def with_sharding(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        param_path = find_param_path(leaf_name(path), param_shardings)
        leaf_sharding = param_shardings[param_path] if param_path else sharding.replicated_sharding()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding)

    return jax.tree_util.tree_map_with_path(with_sharding, unsharded)


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return a leaf's path in the state as a dotted name, such as `opt_state.adam.mu.embed.tokens`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def find_param_path(name: str, param_paths: Mapping[str, object]) -> str | None:
    """Return the longest parameter path at the end of the name of a state's leaf; None if there is none."""
    parts = name.split(".")
    suffixes = (".".join(parts[i:]) for i in range(1, len(parts)))
    return next((suffix for suffix in suffixes if suffix in param_paths), None)


def train_step(state: TrainState, batch: TokenBatch, setup: StepSetup) -> tuple[TrainState, dict[str, Array]]:
    """Compute gradients on a batch and apply the optimizer.

    If the loss or the gradient norm is not finite, or if no token has a weight, the step is skipped: only the counters
    of the state change.

    Args:
        state: The state before the step.
        batch: Input of `loss_sums`; arrays are [batch, T].
        setup: The static parts of the step.

    Returns:
        The new state, and the metrics of the step as arrays []: `loss`, `weight` and `correct` (sums over tokens),
        `grad_norm`, `lr`, and the counters `skipped` and `in_row` of skipped steps, in total and in a row.
    """
    params = state["params"]
    trained = setup.trained(params)
    if setup.dropout.is_active:
        batch = {**batch, ROW_IDS: jnp.arange(len(batch["tokens"]), dtype=jnp.uint32)}
    gradients, sums, norm = _sum_gradients(params, batch, state["step"], setup)
    weight = jnp.maximum(sums["weight"], 1e-9)
    grad_norm = (optax.tree.norm(gradients) if norm is None else norm) / weight
    is_valid = jnp.isfinite(grad_norm) & jnp.isfinite(sums["loss"]) & (sums["weight"] > 0)
    clip_norm = setup.optimizer.clip_norm
    scale = (jnp.minimum(1.0, clip_norm / jnp.maximum(grad_norm, 1e-9)) if clip_norm else 1.0) / weight
    # select with `where`: 0 * nan is nan
    gradients = jax.tree.map(lambda gradient: jnp.where(is_valid, gradient * scale, 0.0), gradients)
    updates, opt_state = setup.transformation.update(gradients, state["opt_state"], trained)
    learning_rate = setup.optimizer.lr_schedule.learning_rate(state["step"] - state["skipped"])
    updated = jax.tree.map(lambda leaf, update: leaf - learning_rate * update, trained, updates)
    is_skipped = (~is_valid).astype(jnp.int32)
    new_state = {
        "params": setup.with_trained(params, _select(is_valid, updated, trained)),
        "opt_state": _select(is_valid, opt_state, state["opt_state"]),
        "step": state["step"] + 1,
        "skipped": state["skipped"] + is_skipped,
        "skipped_in_row": (state["skipped_in_row"] + 1) * is_skipped,
    }
    return new_state, {
        **sums,
        "grad_norm": grad_norm,
        "lr": learning_rate,
        "skipped": new_state["skipped"],
        "in_row": new_state["skipped_in_row"],
    }


def _select(condition: Array, if_true: Any, if_false: Any) -> Any:
    """Select one of two trees by a scalar condition."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def _sum_gradients(
    params: Tree, batch: TokenBatch, step: Array, setup: StepSetup
) -> tuple[Tree, dict[str, Array], Array | None]:
    """Compute the float32 sums of gradients and of loss, weights and correct tokens.

    An exact reduction also returns the norm of the gradients.
    """
    if (exact := setup.exact_reduction) is not None:
        on_device = replace(setup, forward_config=replace(setup.forward_config, sharding=ShardingContext()))
        return exact.sum_gradients(_value_and_grad(step, on_device), params, batch)
    gradients, sums = _accumulate_gradients(params, batch, step, setup)
    return gradients, sums, None


def _value_and_grad(step: Array, setup: StepSetup) -> Callable[[Tree, TokenBatch], Any]:
    """Return a function that computes ((loss, loss sums), gradients of the trained parameters) of rows of a batch."""

    def summed_loss(trained: Tree, params: Tree, rows: TokenBatch) -> tuple[Array, dict[str, Array]]:
        params, dropout = setup.with_trained(params, trained), _dropout(rows, step, setup)
        sums = transformer.loss_sums(params, rows, setup.model, setup.forward_config, setup.loss_terms, dropout=dropout)
        return sums.loss, sums._asdict()

    value_and_grad = jax.value_and_grad(summed_loss, has_aux=True)
    return lambda params, rows: value_and_grad(setup.trained(params), params, rows)


def _accumulate_gradients(
    params: Tree, batch: TokenBatch, step: Array, setup: StepSetup
) -> tuple[Tree, dict[str, Array]]:
    """Compute the sums over all micro-batches in the order that is fastest on the mesh."""
    value_and_grad = _value_and_grad(step, setup)
    if setup.accumulate == 1:
        (_, sums), gradients = value_and_grad(params, batch)
        return _shard_like_params(gradients, setup), sums

    def add_micro_batch(
        totals: tuple[Tree, dict[str, Array]], micro_batch: TokenBatch
    ) -> tuple[tuple[Tree, dict[str, Array]], None]:
        (_, sums), gradients = value_and_grad(params, micro_batch)
        total_gradients, total_sums = jax.tree.map(jnp.add, totals, (gradients, sums))
        return (_shard_like_params(total_gradients, setup), total_sums), None

    zero_gradients = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), setup.trained(params))
    zero_sums = {name: jnp.float32(0) for name in LOSS_SUM_NAMES}
    zeros = (_shard_like_params(zero_gradients, setup), zero_sums)
    return lax.scan(add_micro_batch, zeros, _split_micro_batches(batch, setup))[0]


def _dropout(micro_batch: TokenBatch, step: Array, setup: StepSetup) -> Dropout | None:
    """Return the random masks of a micro-batch; its rows keep their masks however the batch is divided."""
    if not setup.dropout.is_active:
        return None
    return step_dropout(setup.dropout, seed=setup.seed, step=step, row_ids=micro_batch[ROW_IDS])


def _shard_like_params(gradients: Tree, setup: StepSetup) -> Tree:
    """Constrain gradients to the shardings of their parameters, so that they are reduced to these shards."""
    leaves, sharding = setup.model.leaves, setup.sharding
    if sharding.device_mesh is None:
        return gradients
    return unflatten_tree(
        {
            path: lax.with_sharding_constraint(gradient, sharding.param_sharding(leaves[path]))
            for path, gradient in flatten_tree(gradients).items()
        }
    )


def _split_micro_batches(batch: TokenBatch, setup: StepSetup) -> dict[str, Array]:
    """Reshape [batch, ...] to [accumulate, micro-batch, ...]; each device keeps its rows of every micro-batch."""
    num_micro_batches = setup.accumulate

    def split(array: Array) -> Array:
        micro_batch_size = array.shape[0] // num_micro_batches
        stacked = array.reshape(micro_batch_size, num_micro_batches, *array.shape[1:]).swapaxes(0, 1)
        sharding = setup.sharding.activation_sharding(stacked.shape, *("part", "batch", "seq")[: stacked.ndim])
        return stacked if sharding is None else lax.with_sharding_constraint(stacked, sharding)

    return {name: split(array) for name, array in batch.items()}
