"""Tests of the training step: independence of mesh and micro-batches, and skipping of non-finite steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.helpers import runs
from tests.helpers.optimizers import compile_step
from tests.helpers.slow_cases import slow_except
from trainer.nn.lm_head import LossTerms
from trainer.nn.model_spec import AttentionOptions
from trainer.training import feed
from trainer.training.step import StepSetup, TrainState, find_param_path, state_shapes, train_step

STEPS = 20
RING = AttentionOptions("blockwise", 2, 3)


def train_losses(setup: StepSetup, steps: int = STEPS) -> tuple[np.ndarray, TrainState]:
    """Run training steps; return the mean loss of each step, and the final state."""
    state, step, job = runs.make_state(setup), compile_step(setup), runs.make_job(setup)
    losses = []
    for number in range(steps):
        state, metrics = step(
            state, feed.load_batch(job.train, job.order.rows(number), setup.sharding)
        )
        losses.append(float(metrics["loss"]) / float(metrics["weight"]))
    return np.array(losses), state


@pytest.fixture(scope="module")
def one_device_losses() -> np.ndarray:
    """Losses of steps on one device without micro-batches."""
    return train_losses(runs.make_setup())[0]


def test_train_step_decreases_loss(one_device_losses: np.ndarray):
    assert one_device_losses[-1] < one_device_losses[0] - 1


@pytest.mark.parametrize(
    ("mesh", "accumulate", "forward_options"),
    slow_except(
        [
            ("8,1,1", 1, {}),
            ("1,8,1", 1, {}),
            ("1,2,4", 1, {}),
            ("1,2,4", 4, {"remat_policy": "nothing_saveable"}),
            ("2,2,2", 2, {"scan_layers": False}),
            ("fsdp:2,mp:2,sp:2", 1, {"attention_options": RING, "ffn_chunk_size": 3}),
            (
                "dp:2,sp:4",
                2,
                {
                    "attention_options": RING,
                    "remat_policy": "nothing_saveable",
                    "scan_layers": False,
                },
            ),
            ("", 4, {}),
            ("2,2,2", 2, {"rules": ("heads=dp", "mlp=dp+fsdp", "embed=mp", "vocab=none")}),
        ],
        # test_loop covers the usual meshes.
        lambda case: case[0] == "2,2,2" and case[1] == 2 and "rules" in case[2],
    ),
)
def test_losses_do_not_depend_on_mesh_or_micro_batches(
    one_device_losses: np.ndarray, mesh: str, accumulate: int, forward_options: dict[str, Any]
):
    losses, _ = train_losses(runs.make_setup(mesh=mesh, accumulate=accumulate, **forward_options))
    np.testing.assert_allclose(losses, one_device_losses, rtol=1e-5)


# By default test_sharding compares loss and gradients of such a mesh.
@pytest.mark.slow
def test_losses_with_unsplit_kv_heads_match_one_device():
    """A mesh with mp 8 splits 8 query heads but not 4 key and value heads."""
    losses, _ = train_losses(runs.make_setup(runs.LLAMA, mesh="1,1,8"), 5)
    expected, _ = train_losses(runs.make_setup(runs.LLAMA), 5)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


# By default test_sharding compares loss and gradients of experts on this mesh.
@pytest.mark.slow
def test_expert_losses_do_not_depend_on_mesh_or_micro_batches():
    setup = runs.make_setup(
        runs.MIXTRAL, mesh="2,2,2", accumulate=2, remat_policy="dots_saveable", ffn_chunk_size=5
    )
    expected, _ = train_losses(runs.make_setup(runs.MIXTRAL), 5)
    np.testing.assert_allclose(train_losses(setup, 5)[0], expected, rtol=1e-5)


def updated_weight(accumulate: int, weights: np.ndarray) -> jax.Array:
    """Return a weight after a step with these token weights."""
    setup = runs.make_setup(accumulate=accumulate)
    job = runs.make_job(setup)
    batch = {
        **feed.load_batch(job.train, job.order.rows(0), setup.sharding),
        "weights": jnp.asarray(weights),
    }
    state, metrics = compile_step(setup)(runs.make_state(setup), batch)
    assert float(metrics["weight"]) == weights.sum()
    return state["params"]["layers"]["mlp"]["up"]["weight"]


@pytest.mark.parametrize("accumulate", slow_except((2, 8), (8,)))
def test_micro_batches_count_by_their_token_weights(accumulate: int):
    """The gradient is that of the sum over all tokens, and a micro-batch without tokens is not nan."""
    weights = np.zeros((8, runs.LENGTH), np.float32)
    weights[0] = 1
    # Row 1 is in another micro-batch than row 0. Of 8 micro-batches most have no token.
    weights[1, :3] = 1
    np.testing.assert_allclose(
        updated_weight(accumulate, weights), updated_weight(1, weights), atol=1e-7
    )


@pytest.mark.parametrize("accumulate", slow_except([1, 2], [2]))
def test_z_loss_is_apart_from_the_loss(accumulate: int):
    """The loss compares with that of an evaluation, and the z-loss changes the gradient."""
    setup = runs.make_setup(accumulate=accumulate)
    job = runs.make_job(setup)
    batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)

    def first_step(terms: LossTerms) -> dict[str, jax.Array]:
        return compile_step(replace(setup, loss_terms=terms))(runs.make_state(setup), batch)[1]

    plain, penalized = first_step(LossTerms()), first_step(LossTerms(z_loss=0.5))
    assert penalized.keys() - plain.keys() == {"z_loss"}
    assert float(penalized["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-6)
    assert float(penalized["z_loss"]) > 0.1 * float(plain["weight"])
    assert float(penalized["grad_norm"]) != pytest.approx(float(plain["grad_norm"]), rel=1e-2)


CompiledStep = Callable[[TrainState, feed.TokenBatch], tuple[TrainState, dict[str, jax.Array]]]


@pytest.fixture(scope="module")
def mesh_setup_and_step() -> tuple[StepSetup, CompiledStep]:
    """Return a setup on a mesh, and its step, which is compiled once."""
    setup = runs.make_setup(mesh="1,2,4")
    return setup, compile_step(setup)


@pytest.mark.parametrize("cause", ["infinite loss", "no tokens"])
def test_skipped_step_changes_only_counters(
    mesh_setup_and_step: tuple[StepSetup, CompiledStep], cause: str
):
    setup, step = mesh_setup_and_step
    job = runs.make_job(setup)
    state, _ = step(
        runs.make_state(setup), feed.load_batch(job.train, job.order.rows(0), setup.sharding)
    )
    batch = feed.load_batch(job.train, job.order.rows(1), setup.sharding)
    if cause == "infinite loss":
        batch["weights"] = batch["weights"].at[3, 2].set(jnp.inf)
    else:
        batch["weights"] = jnp.zeros_like(batch["weights"])
    skipped_state, metrics = step(state, batch)
    before, after = runs.state_bytes(state), runs.state_bytes(skipped_state)
    assert {name for name in before if before[name] != after[name]} == {
        "step",
        "skipped",
        "skipped_in_row",
    }
    assert (int(skipped_state["step"]), int(skipped_state["skipped"]), int(metrics["in_row"])) == (
        2,
        1,
        1,
    )
    next_state, _ = step(
        skipped_state, feed.load_batch(job.train, job.order.rows(2), setup.sharding)
    )
    assert (int(next_state["skipped"]), int(next_state["skipped_in_row"])) == (1, 0)
    assert runs.state_bytes(next_state)["params.embed.tokens"] != after["params.embed.tokens"]


def test_skipped_step_does_not_advance_learning_rate():
    setup = runs.make_setup()
    job, step = runs.make_job(setup), compile_step(setup)
    batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)
    state, first = step(runs.make_state(setup), batch)
    state, _ = step(state, {**batch, "weights": jnp.zeros_like(batch["weights"])})
    _, third = step(state, batch)
    assert float(first["lr"]) == 0.0
    second_rate = setup.optimizer.lr_schedule.learning_rate(jnp.int32(1))
    assert float(third["lr"]) == pytest.approx(float(second_rate), rel=1e-6)


def test_train_step_updates_state_in_place():
    setup = runs.make_setup(mesh="1,2,4")
    shapes = state_shapes(setup)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    step = jax.jit(
        partial(train_step, setup=setup), donate_argnums=0, out_shardings=(shardings, None)
    )
    batch = feed.batch_shapes(runs.make_job(setup).train, 8, setup.sharding)
    memory = step.lower(shapes, batch).compile().memory_analysis()
    state_nbytes = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in jax.tree.leaves(shapes)
    )
    assert memory is not None
    assert memory.alias_size_in_bytes == state_nbytes


@pytest.mark.parametrize(
    ("rules", "spec"),
    [((), PartitionSpec("mp", "fsdp")), (("embed=mp", "vocab=fsdp"), PartitionSpec("fsdp", "mp"))],
)
def test_moments_are_sharded_like_params(rules: tuple[str, ...], spec: PartitionSpec):
    shapes = state_shapes(runs.make_setup(mesh="1,2,4", rules=rules))
    params, moments = shapes["params"], shapes["opt_state"]["adam"]
    assert params["embed"]["tokens"].sharding.spec == spec
    for moment in (moments.mu, moments.nu):
        assert jax.tree.map(lambda leaf: leaf.sharding, moment) == jax.tree.map(
            lambda leaf: leaf.sharding, params
        )
    assert moments.count.sharding.is_fully_replicated


def test_find_param_path_returns_longest_suffix():
    paths = {"weight": 0, "head.weight": 0}
    assert find_param_path("opt_state.adam.mu.head.weight", paths) == "head.weight"
    assert find_param_path("opt_state.adam.mu.tail.weight", paths) == "weight"
    assert find_param_path("opt_state.adam.count", paths) is None
