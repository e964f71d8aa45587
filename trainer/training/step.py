"""One training step: gradients of a sum over all tokens of the batch, divided once, guarded, clipped, applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import NamedSharding

from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.nn import transformer as core
from trainer.nn.transformer import ForwardConfig, ModelSpec
from trainer.training.optimizers import AdamW

TrainState = dict[str, Any]  # params, opt_state, and 0-d int32: step, skipped, skipped_in_row
TokenBatch = Mapping[str, Array]
LOSS_SUM_NAMES = ("loss", "weight", "correct")


@dataclass(frozen=True, slots=True)
class StepSetup:
    """What a step is made of. `accumulate`: a batch goes through the model in so many parts."""

    model: ModelSpec
    forward_config: ForwardConfig
    optimizer: AdamW
    accumulate: int = 1

    @property
    def transformation(self) -> optax.GradientTransformation:
        return self.optimizer.transformation(self.model.leaves)


def init_train_state(params: Tree, setup: StepSetup) -> TrainState:
    """The state before the first step."""
    return {"params": params, "opt_state": setup.transformation.init(params), **_zero_counters()}


def _zero_counters() -> dict[str, Array]:
    return {name: jnp.zeros((), jnp.int32) for name in ("step", "skipped", "skipped_in_row")}


def state_shapes(setup: StepSetup) -> TrainState:
    """Shapes and dtypes of the state, with the sharding of each leaf; moments lie as their parameters."""
    model, shards = setup.model, setup.forward_config.sharding
    params = unflatten_tree(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=shards.param_sharding(leaf))
            for path, leaf in model.leaves.items()
        }
    )
    bare = jax.eval_shape(partial(init_train_state, setup=setup), params)
    where = {path: shards.param_sharding(leaf) for path, leaf in model.leaves.items()}

    def placed(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        own = find_param_path(leaf_name(path), where)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where[own] if own else shards.replicated_sharding()
        )

    return jax.tree_util.tree_map_with_path(placed, bare)


def leaf_name(path: tuple[Any, ...]) -> str:
    """A leaf's path in the state as one name: `opt_state.adam.mu.embed.tokens`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def find_param_path(name: str, param_paths: Mapping[str, object]) -> str | None:
    """The parameter that a leaf of the state belongs to: the longest path that its name ends with."""
    parts = name.split(".")
    ends = (".".join(parts[i:]) for i in range(1, len(parts)))
    return next((end for end in ends if end in param_paths), None)


def batch_sharding(setup: StepSetup, batch_size: int, seq_length: int) -> NamedSharding | None:
    """Where a batch of `size` sequences lies; a usage PrepError where the mesh does not divide it."""
    return setup.forward_config.sharding.activation_sharding((batch_size, seq_length), "batch", "seq")


def train_step(state: TrainState, batch: TokenBatch, setup: StepSetup) -> tuple[TrainState, dict[str, Array]]:
    """The state after a batch of `tokens`, `targets` and `weights` [size, T], and what the step measured (0-d).

    Where loss or gradients are not finite, or no token counts, nothing but `step` and `skipped` changes.
    """
    params = state["params"]
    gradients, sums = _accumulate_gradients(params, batch, setup)
    weight = jnp.maximum(sums["weight"], 1e-9)
    norm = optax.tree.norm(gradients) / weight
    ok = jnp.isfinite(norm) & jnp.isfinite(sums["loss"]) & (sums["weight"] > 0)
    clip = setup.optimizer.clip_norm
    scale = (jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-9)) if clip else 1.0) / weight
    gradients = jax.tree.map(lambda each: jnp.where(ok, each * scale, 0.0), gradients)  # not `*`: 0 x nan is nan
    updates, opt_state = setup.transformation.update(gradients, state["opt_state"], params)
    rate = setup.optimizer.lr_schedule.learning_rate(state["step"] - state["skipped"])
    moved = jax.tree.map(lambda leaf, update: leaf - rate * update, params, updates)
    bad = (~ok).astype(jnp.int32)
    after = {
        "params": _select(ok, moved, params),
        "opt_state": _select(ok, opt_state, state["opt_state"]),
        "step": state["step"] + 1,
        "skipped": state["skipped"] + bad,
        "skipped_in_row": (state["skipped_in_row"] + 1) * bad,
    }
    return after, {
        **sums,
        "grad_norm": norm,
        "lr": rate,
        "skipped": after["skipped"],
        "in_row": after["skipped_in_row"],
    }


def eval_step(params: Tree, batch: TokenBatch, setup: StepSetup) -> dict[str, Array]:
    """The sums of a batch."""
    return core.loss_sums(params, batch, setup.model, setup.forward_config)._asdict()


def _select(ok: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def _accumulate_gradients(params: Tree, batch: TokenBatch, setup: StepSetup) -> tuple[Tree, dict[str, Array]]:
    """Float32 sums over all micro-batches, of gradients and of what is measured."""

    def total(params: Tree, part: TokenBatch) -> tuple[Array, dict[str, Array]]:
        sums = eval_step(params, part, setup)
        return sums["loss"], sums

    slope = jax.value_and_grad(total, has_aux=True)
    if setup.accumulate == 1:
        (_, sums), gradients = slope(params, batch)
        return _shard_like_params(gradients, setup), sums

    def add(before: tuple[Tree, dict[str, Array]], part: TokenBatch) -> tuple[tuple[Tree, dict[str, Array]], None]:
        (_, sums), gradients = slope(params, part)
        both = jax.tree.map(jnp.add, before, (gradients, sums))
        return (_shard_like_params(both[0], setup), both[1]), None

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    nothing = {name: jnp.float32(0) for name in LOSS_SUM_NAMES}
    return lax.scan(add, (_shard_like_params(zeros, setup), nothing), _split_micro_batches(batch, setup))[0]


def _shard_like_params(gradients: Tree, setup: StepSetup) -> Tree:
    """Gradients are told to lie as their parameters, so that they are reduced there and nowhere else."""
    if setup.forward_config.sharding.device_mesh is None:
        return gradients
    leaves, shards = setup.model.leaves, setup.forward_config.sharding
    placed = flatten_tree(gradients)
    return unflatten_tree(
        {path: lax.with_sharding_constraint(leaf, shards.param_sharding(leaves[path])) for path, leaf in placed.items()}
    )


def _split_micro_batches(batch: TokenBatch, setup: StepSetup) -> dict[str, Array]:
    """[size, T] -> [accumulate, size / accumulate, T]; every part has its share of each device's sequences."""
    parts = setup.accumulate

    def cut(each: Array) -> Array:
        cut = each.reshape(each.shape[0] // parts, parts, *each.shape[1:]).swapaxes(0, 1)
        sharding = setup.forward_config.sharding.activation_sharding(cut.shape, "part", "batch", "seq")
        return cut if sharding is None else lax.with_sharding_constraint(cut, sharding)

    return {name: cut(each) for name, each in batch.items()}
