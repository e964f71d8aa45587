"""Optimizers of all types for tests, and the parameters of a tiny model as one matrix or vector per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prepcli.models.param_tree import flatten_tree, unflatten_tree
from tests.helpers import runs
from tests.helpers.shared_steps import SharedResults
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES
from trainer.training import feed
from trainer.training.optimizers import Optimizer, RoundingKey, build_optimizer
from trainer.training.step import StepSetup, TrainState, state_shapes, train_step

STEPS = 20
# Keys of a recipe table with which a tiny model uses every part of the optimizer.
KEYS: Mapping[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "adafactor": {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "min_factored_size": 8},
    "lion": {"lr": 1e-3, "weight_decay": 0.1},
    "muon": {"lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"lr": 1e-1, "weight_decay": 0.1},
    "palm": {"lr": 1e-2},
}
# Whole steps of these are compiled by default. Freezing, rounding, saving and averages are code of
# `Optimizer` and of the step, not of a rule.
WHOLE_STEP_RULES = ("adamw",)
# Most leaves are frozen, because each leaf takes time to compile. The others have one, two and four
# axes.
COMPACT: dict[str, Any] = {
    "moment_dtype": "bfloat16",
    "ema": 0.9,
    "freeze": ("embed.positions", "re:attn_norm|mlp|attn\\.[qko]", "final_norm.bias"),
}
# Leaves of each role and number of axes, in the order of a tree. Every further leaf takes time to
# compile.
TRAJECTORY_LEAVES = (
    "embed.tokens",
    "final_norm.scale",
    "layers.attn.o.weight",
    "layers.attn.q.weight",
    "layers.mlp.up.bias",
    "layers.mlp.up.weight",
)


def make_optimizer(name: str, **keys: Any) -> Optimizer:
    """Return an optimizer of this type, with other keys than those of `KEYS`."""
    values = {"type": name, **KEYS[name], **keys}
    return build_optimizer(OPTIMIZER_TABLES[name].model_validate(values), STEPS)  # pyright: ignore[reportArgumentType]


def _jit_step(setup: StepSetup) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Compile a training step. Its new state is split as the old one."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(setup))
    return jax.jit(partial(train_step, setup=setup), out_shardings=(shardings, None))


# Returns the training step of a setup, compiled once for equal setups.
compile_step = SharedResults(_jit_step)


@cache
def compiled_run(name: str, *, is_compact: bool = False) -> tuple[StepSetup, Callable[..., Any]]:
    """Return a setup on one device and its compiled step.

    With `is_compact` it has all of `COMPACT`, parameters in bfloat16, and micro-batches.
    """
    if not is_compact:
        setup = runs.make_setup(optimizer=make_optimizer(name))
    else:
        setup = runs.make_setup(
            optimizer=make_optimizer(name, **COMPACT), accumulate=2, param_dtype="bfloat16"
        )
    return setup, compile_step(setup)


def take_steps(setup: StepSetup, state: TrainState, *, until: int, step: Any = None) -> TrainState:
    """Take training steps from the step of a state to step `until`."""
    step, job = step or compile_step(setup), runs.make_job(setup)
    for number in range(int(state["step"]), until):
        state, _ = step(state, feed.load_batch(job.train, job.order.rows(number), setup.sharding))
    return state


def trajectory_params(setup: StepSetup) -> Any:
    """Return the parameters `TRAJECTORY_LEAVES` of the first state of a setup."""
    params = flatten_tree(runs.make_state(setup)["params"])
    return unflatten_tree({path: params[path] for path in TRAJECTORY_LEAVES})


def by_layer(params: Any) -> dict[str, np.ndarray]:
    """Return the tree of a GPT-Neo as a matrix [out, in] or a vector per layer, by path and layer."""
    tensors: dict[str, np.ndarray] = {}
    for path, leaf in flatten_tree(params).items():
        layers = list(np.asarray(leaf)) if path.startswith("layers.") else [np.asarray(leaf)]
        for layer, array in enumerate(layers):
            if path.endswith("bias"):
                array = array.reshape(-1)
            elif array.ndim == 3:
                array = (
                    array.reshape(array.shape[0], -1)
                    if ".o." in path
                    else array.reshape(-1, array.shape[-1])
                )
            tensors[f"{path} {layer}"] = array
    return tensors


def random_gradients(params: Any, step: int) -> Any:
    """Return gradients of the shapes of parameters; they depend on the step."""
    rng = np.random.default_rng(step)
    flat = {
        path: 0.1 * rng.standard_normal(leaf.shape, np.float32)
        for path, leaf in flatten_tree(params).items()
    }
    return unflatten_tree(flat)


def run_trajectory(optimizer: Optimizer, steps: int, mesh: str = "") -> list[dict[str, np.ndarray]]:
    """Return the parameters, one array per layer, before the first of `steps` updates and after each of them."""
    setup = runs.make_setup(mesh=mesh, optimizer=optimizer)
    params = trajectory_params(setup)
    leaves = {path: setup.model.leaves[path] for path in TRAJECTORY_LEAVES}
    opt_state = optimizer.init(params, leaves)

    @jax.jit
    def update(gradients: Any, opt_state: Any, params: Any, step: jax.Array) -> Any:
        rate = optimizer.lr_schedule.learning_rate(step)
        rounding = RoundingKey(0, step)
        return optimizer.update(
            gradients, opt_state, params, leaves=leaves, learning_rate=rate, rounding=rounding
        )

    trajectory = [by_layer(params)]
    for step in range(steps):
        params, opt_state = update(
            random_gradients(params, step), opt_state, params, jnp.int32(step)
        )
        trajectory.append(by_layer(params))
    return trajectory
