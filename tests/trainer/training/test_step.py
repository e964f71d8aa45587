"""A step: the same on every mesh and for every split of a batch; what is not finite changes nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import runs
from trainer.models.errors import PrepError
from trainer.training import feed
from trainer.training.step import StepSetup, TrainState, batch_sharding, find_param_path, state_shapes, train_step

STEPS = 20


def losses(made: StepSetup, steps: int = STEPS) -> tuple[np.ndarray, TrainState]:
    found = runs.make_state(made)
    where = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(made))
    step = jax.jit(partial(train_step, setup=made), out_shardings=(where, None))
    job = runs.make_job(made)
    measured = []
    for number in range(steps):
        found, sums = step(found, feed.load_batch(made, job.train, job.order, number))
        measured.append(float(sums["loss"]) / float(sums["weight"]))
    return np.array(measured), found


@pytest.fixture(scope="module")
def alone() -> np.ndarray:
    return losses(runs.make_setup())[0]


def test_it_learns(alone: np.ndarray):
    assert alone[-1] < alone[0] - 1


@pytest.mark.parametrize(
    ("mesh", "accumulate", "how"),
    [
        ("8,1,1", 1, {}),
        ("1,8,1", 1, {}),
        ("1,2,4", 1, {}),
        ("1,2,4", 4, {"remat": "nothing_saveable"}),
        ("2,2,2", 2, {"scan": False}),
        ("fsdp:2,mp:2,sp:2", 1, {}),
        ("", 4, {}),
    ],
)
def test_losses_do_not_depend_on_mesh_or_micro_batches(
    alone: np.ndarray, mesh: str, accumulate: int, how: dict[str, Any]
):
    found, _ = losses(runs.make_setup(mesh=mesh, accumulate=accumulate, **how))
    np.testing.assert_allclose(found, alone, rtol=1e-5)


def test_grouped_heads_that_a_mesh_does_not_divide():
    """8 heads over mp 8, of 4 groups: k and v stay whole."""
    found, _ = losses(runs.make_setup(runs.LLAMA, mesh="1,1,8"), 5)
    wanted, _ = losses(runs.make_setup(runs.LLAMA), 5)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_micro_batches_of_unequal_weight_count_by_their_tokens():
    """The gradient is that of the sum over all tokens, not the mean of means; a part without any token is no nan."""
    weights = np.zeros((8, runs.LENGTH), np.float32)
    weights[0] = 1
    weights[1, :3] = 1  # rows 0 and 1 are in different parts, and with accumulate 8 most parts have no token
    found = []
    for accumulate in (1, 2, 8):
        made = runs.make_setup(accumulate=accumulate)
        job = runs.make_job(made)
        batch = {**feed.load_batch(made, job.train, job.order, 0), "weights": jnp.asarray(weights)}
        after, sums = jax.jit(partial(train_step, setup=made))(runs.make_state(made), batch)
        assert float(sums["weight"]) == weights.sum()
        found.append(after["params"]["layers"]["mlp"]["up"]["weight"])
    np.testing.assert_allclose(found[1], found[0], atol=1e-7)
    np.testing.assert_allclose(found[2], found[0], atol=1e-7)


@pytest.mark.parametrize("spoiled", ["loss", "weights"])
def test_a_step_without_a_finite_loss_changes_only_its_counts(spoiled: str):
    made = runs.make_setup(mesh="1,2,4")
    job = runs.make_job(made)
    step = jax.jit(partial(train_step, setup=made))
    before, _ = step(runs.make_state(made), feed.load_batch(made, job.train, job.order, 0))
    batch = feed.load_batch(made, job.train, job.order, 1)
    if spoiled == "loss":
        batch["weights"] = batch["weights"].at[3, 2].set(jnp.inf)
    else:
        batch["weights"] = jnp.zeros_like(batch["weights"])
    after, sums = step(before, batch)
    old, new = runs.state_bytes(before), runs.state_bytes(after)
    assert {name for name in old if old[name] != new[name]} == {"step", "skipped", "skipped_in_row"}
    assert (int(after["step"]), int(after["skipped"]), int(sums["in_row"])) == (2, 1, 1)
    again, _ = step(after, feed.load_batch(made, job.train, job.order, 2))
    assert (int(again["skipped"]), int(again["skipped_in_row"])) == (1, 0)
    assert runs.state_bytes(again)["params.embed.tokens"] != new["params.embed.tokens"]


def test_a_skipped_step_does_not_move_the_learning_rate():
    made = runs.make_setup()
    job = runs.make_job(made)
    step = jax.jit(partial(train_step, setup=made))
    batch = feed.load_batch(made, job.train, job.order, 0)
    state, first = step(runs.make_state(made), batch)
    state, _ = step(state, {**batch, "weights": jnp.zeros_like(batch["weights"])})
    _, third = step(state, batch)
    assert float(first["lr"]) == 0.0
    assert float(third["lr"]) == pytest.approx(float(made.optimizer.lr_schedule.learning_rate(jnp.int32(1))), rel=1e-6)


def test_the_state_is_handed_on_without_a_copy():
    made = runs.make_setup(mesh="1,2,4")
    where = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(made))
    step = jax.jit(partial(train_step, setup=made), donate_argnums=0, out_shardings=(where, None))
    shapes = state_shapes(made)
    memory = step.lower(shapes, feed.batch_shapes(made, runs.make_job(made).train, 8)).compile().memory_analysis()
    own = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in jax.tree.leaves(shapes))
    assert memory is not None
    assert memory.alias_size_in_bytes == own


def test_moments_lie_as_their_parameters():
    shapes = state_shapes(runs.make_setup(mesh="1,2,4"))
    params, moments = shapes["params"], shapes["opt_state"]["adam"]
    for slot in (moments.mu, moments.nu):
        assert jax.tree.map(lambda leaf: leaf.sharding, slot) == jax.tree.map(lambda leaf: leaf.sharding, params)
    assert moments.count.sharding.is_fully_replicated


def test_a_leaf_of_the_state_belongs_to_the_longest_path_that_it_ends_with():
    paths = {"weight": 0, "head.weight": 0}
    assert find_param_path("opt_state.adam.mu.head.weight", paths) == "head.weight"
    assert find_param_path("opt_state.adam.mu.tail.weight", paths) == "weight"
    assert find_param_path("opt_state.adam.count", paths) is None


def test_a_batch_that_the_mesh_does_not_divide_is_refused():
    with pytest.raises(PrepError, match="batch 6 cannot be split over dp 8"):
        batch_sharding(runs.make_setup(mesh="8,1,1"), 6, runs.LENGTH)
