"""Training steps of a model with adapters: only the adapters change, and frozen parameters keep their dtype."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.models.lora_config import LoraConfig
from prepcli.models.param_tree import flatten_tree, unflatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers import runs
from tests.helpers.optimizers import compile_step
from tests.helpers.slow_cases import slow_except
from trainer.nn import transformer
from trainer.nn.initialization import init_adapters, init_params
from trainer.nn.model_spec import build_model
from trainer.training import feed
from trainer.training.checkpoint import digest_base_params
from trainer.training.step import StepSetup, TrainState, init_train_state, state_shapes

LORA = LoraConfig(4, 8.0, ("attn.*", "mlp.*"))


def make_setup(
    mesh: str = "", dtype: str = "float32", scan_axis: int = 0, **options: Any
) -> StepSetup:
    """Return the setup of a tiny LLaMA with adapters whose frozen parameters have a dtype."""
    setup = runs.make_setup(runs.LLAMA, mesh, **options)
    model = build_model(
        FAMILIES["llama"], runs.LLAMA, is_tied=False, lora=LORA, scan_axis=scan_axis
    )
    return replace(setup, model=model, base_dtypes=dict.fromkeys(model.base_paths, dtype))


def make_state(setup: StepSetup) -> TrainState:
    """Return the state before the first step, with random parameters."""
    base = build_model(FAMILIES["llama"], runs.LLAMA, is_tied=False)
    leaves = {**flatten_tree(init_params(base, 0)), **flatten_tree(init_adapters(setup.model, 0))}
    cast = {
        path: leaf.astype(setup.base_dtypes.get(path, "float32")) for path, leaf in leaves.items()
    }
    state = init_train_state(unflatten_tree(cast), setup)
    if setup.sharding.device_mesh is None:
        return state
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, state_shapes(setup)))


def run_steps(setup: StepSetup, steps: int = 6) -> tuple[TrainState, TrainState, list[float]]:
    """Run training steps on one batch; return the first state, the last state, and the mean losses."""
    first = state = make_state(setup)
    job, step, losses = runs.make_job(setup), compile_step(setup), []
    for _ in range(steps):
        state, metrics = step(state, feed.load_batch(job.train, job.order.rows(0), setup.sharding))
        losses.append(float(metrics["loss"] / metrics["weight"]))
    return first, state, losses


@cache
def one_device_losses() -> list[float]:
    """Return the losses of three steps on one device."""
    return run_steps(make_setup(), 3)[2]


@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], ["bfloat16"]))
def test_lora_step_changes_only_adapters(dtype: str):
    setup = make_setup(dtype=dtype)
    first, last, losses = run_steps(setup)
    before, after = flatten_tree(first["params"]), flatten_tree(last["params"])
    assert all(np.array_equal(before[path], after[path]) for path in setup.model.base_paths)
    assert {str(after[path].dtype) for path in setup.model.base_paths} == {dtype}
    assert not any(np.array_equal(before[path], after[path]) for path in setup.model.saved_leaves)
    assert losses[-1] < losses[0]


def test_optimizer_state_has_only_adapters():
    setup = make_setup()
    moments = flatten_tree(state_shapes(setup)["opt_state"]["adam"].mu)
    assert moments.keys() == setup.model.saved_leaves.keys()


def test_first_loss_equals_the_base_model():
    setup = runs.make_setup(runs.LLAMA)
    rows = runs.make_job(setup).order.rows(0)
    batch = feed.load_batch(runs.make_job(setup).train, rows, setup.sharding)

    @jax.jit
    def mean_loss(params: Any) -> jax.Array:
        sums = transformer.loss_sums(params, batch, setup.model, setup.forward_config)
        return sums.loss / sums.weight

    assert np.isclose(
        one_device_losses()[0], float(mean_loss(init_params(setup.model, 0))), rtol=1e-6
    )


OPTIONS = [
    {"mesh": "1,2,4"},
    {"mesh": "1,2,4", "accumulate": 2},
    {"mesh": "2,2,2", "accumulate": 2, "scan_layers": False},
]


@pytest.mark.parametrize("options", slow_except(OPTIONS, OPTIONS[2:]))
def test_lora_losses_do_not_depend_on_the_mesh(options: dict[str, Any]):
    mesh = options.pop("mesh", "")
    losses = run_steps(make_setup(mesh, **options), 3)[2]
    assert np.allclose(losses, one_device_losses(), rtol=1e-5)


# By default test_exact_reduction sums gradients of parameters in the same step.
@pytest.mark.slow
def test_exact_reduction_sums_gradients_of_adapters():
    losses = run_steps(replace(make_setup("8,1,1"), reduction_shards=8), 3)[2]
    assert np.allclose(losses, one_device_losses(), rtol=1e-5)


def test_frozen_digest_does_not_depend_on_the_mesh():
    digests = set()
    for mesh in ("", "2,2,2"):
        setup = make_setup(mesh)
        leaves = flatten_tree(make_state(setup)["params"])
        digests.add(digest_base_params({path: leaves[path] for path in setup.model.base_paths}))
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_digest_changes_with_values_and_order_only(dtype: str):
    leaf = jnp.arange(1, 13, dtype=dtype).reshape(3, 4)
    digest = digest_base_params({"a": leaf})
    assert digest != digest_base_params({"a": leaf.at[2, 1].set(0.5)})
    assert digest != digest_base_params({"a": leaf[::-1]})
    assert digest != digest_base_params({"a": leaf, "b": leaf})
    assert digest == digest_base_params({"a": jnp.pad(leaf, ((0, 5), (0, 0)))})
