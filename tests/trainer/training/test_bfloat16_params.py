"""Updates of parameters in bfloat16, compared with float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.models.param_tree import flatten_tree, unflatten_tree
from tests.helpers import runs
from tests.helpers.optimizers import (
    KEYS,
    compile_step,
    compiled_run,
    make_optimizer,
    random_gradients,
)
from tests.helpers.slow_cases import slow_except
from trainer.training import feed
from trainer.training.optimizers import (
    Optimizer,
    RoundingKey,
    bfloat16_to_float32,
    narrow_params,
    round_to_nearest,
)
from trainer.training.step import StepSetup

# Rounding differences of float32 between two programs.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}
# A leaf of each number of axes. Every further leaf takes time to compile. They have the order of a tree: the
# gradients of `random_gradients` depend on it.
UPDATED = ("embed.tokens", "final_norm.scale", "layers.attn.q.weight", "layers.mlp.up.weight")


def spacing_of(x: np.ndarray) -> np.ndarray:
    """Return the distance between the two bfloat16 values around each float32 value."""
    return np.ldexp(np.float32(1), np.frexp(x)[1] - 8)


def some_params(setup: StepSetup) -> Any:
    """Return the parameters `UPDATED` of the first state of a setup."""
    params = flatten_tree(runs.make_state(setup)["params"])
    return unflatten_tree({path: params[path] for path in UPDATED})


def update_once(optimizer: Optimizer, setup: StepSetup, params: Any) -> Any:
    """Return the parameters and the optimizer state after one update with random gradients."""
    leaves = {path: setup.model.leaves[path] for path in UPDATED}

    @jax.jit
    def update(gradients: Any, params: Any) -> Any:
        return optimizer.update(
            gradients,
            optimizer.init(params, leaves),
            params,
            leaves=leaves,
            learning_rate=jnp.float32(1e-2),
            rounding=RoundingKey(7, jnp.int32(1)),
        )

    return update(random_gradients(params, 0), params)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64))
def test_round_to_nearest_equals_a_cast_on_the_host(bits: list[int]):
    edges = [
        0x00000001,
        0x00008000,
        0x80018000,
        0x3F808000,
        0x3F818000,
        0x7F7F7FFF,
        0x7F7F8000,
        0x7F800000,
        0xFF800000,
    ]
    x = np.array([*edges, *bits], np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    actual = np.asarray(jax.jit(round_to_nearest)(x))
    is_nan = np.isnan(x)
    assert np.array_equal(np.isnan(actual), is_nan)
    assert np.array_equal(actual.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan])


# A rule never gets bfloat16. Adafactor has moments of other shapes than the parameters.
@pytest.mark.parametrize("name", slow_except(KEYS, ("adafactor",)))
def test_bfloat16_update_is_the_float32_update_rounded_once(name: str):
    optimizer = make_optimizer(name, ema=0.75)
    setup = runs.make_setup(runs.LLAMA, optimizer=optimizer, param_dtype="bfloat16")
    before = some_params(setup)
    expected, expected_state = update_once(optimizer, setup, bfloat16_to_float32(before))
    actual, state = update_once(optimizer, setup, before)
    for path, leaf in flatten_tree(actual).items():
        assert leaf.dtype == jnp.bfloat16
        exact, rounded = (
            np.asarray(flatten_tree(expected)[path]),
            np.asarray(bfloat16_to_float32(leaf)),
        )
        assert (np.abs(rounded - exact) < 1.001 * spacing_of(exact)).all(), path
        start, average = (flatten_tree(tree)[path] for tree in (before, state["ema"]))
        assert average.dtype == jnp.float32
        np.testing.assert_allclose(
            average, 0.75 * bfloat16_to_float32(start) + 0.25 * exact, **TOLERANCE
        )
    moments = [{k: v for k, v in tree.items() if k != "ema"} for tree in (state, expected_state)]
    for a, b in zip(*map(jax.tree.leaves, moments), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, **TOLERANCE)


def test_updates_below_the_spacing_are_kept_on_average():
    """An update of a twentieth of the spacing is lost if it is rounded to nearest."""
    path, leaf = next(
        (path, leaf)
        for path, leaf in runs.make_setup().model.leaves.items()
        if len(leaf.shape) == 3
    )
    params = unflatten_tree({path: jnp.ones(leaf.shape, jnp.bfloat16)})
    step_size = 2**-7 / 20

    @jax.jit
    def add(params: Any, step: jax.Array) -> Any:
        updated = jax.tree.map(lambda x: x + step_size, bfloat16_to_float32(params))
        return narrow_params(updated, params, leaves={path: leaf}, key=RoundingKey(0, step))

    for step in range(40):
        params = add(params, jnp.int32(step))
    mean = float(np.asarray(flatten_tree(bfloat16_to_float32(params))[path], np.float64).mean())
    assert mean == pytest.approx(1 + 40 * step_size, abs=2**-7 / 10)


# By default test_bfloat16_run_is_saved_resumed_and_exported has moments in float32.
@pytest.mark.slow
def test_gradients_of_bfloat16_parameters_are_float32():
    """The first moment of Adam is a multiple of them; rounding to bfloat16 changes it by up to 2^-9 of itself."""
    moments, narrow = [], runs.make_setup(runs.LLAMA, accumulate=2, param_dtype="bfloat16")
    params = runs.make_state(narrow)["params"]
    wide = runs.make_setup(runs.LLAMA, accumulate=2)
    for setup, start in ((narrow, params), (wide, bfloat16_to_float32(params))):
        job = runs.make_job(setup)
        batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)
        state = {**runs.make_state(setup), "params": start}
        moments.append(flatten_tree(compile_step(setup)(state, batch)[0]["opt_state"]["adam"].mu))
    for path, moment in moments[0].items():
        expected = np.asarray(moments[1][path])
        np.testing.assert_allclose(moment, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_rounded_parameters_do_not_depend_on_the_mesh():
    """Equal updated parameters in float32 have equal bits in bfloat16."""
    rounded = []
    for mesh in ("", "1,2,4"):
        setup = runs.make_setup(runs.LLAMA, mesh=mesh)
        params = some_params(setup)

        @jax.jit
        def narrow(params: Any, setup: StepSetup = setup) -> Any:
            before = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
            leaves = {path: setup.model.leaves[path] for path in UPDATED}
            return narrow_params(params, before, leaves=leaves, key=RoundingKey(7, jnp.int32(1)))

        rounded.append(flatten_tree(jax.device_get(narrow(params))))
    assert all(np.array_equal(value, rounded[1][path]) for path, value in rounded[0].items())


def test_skipped_step_keeps_bfloat16_parameters():
    setup, step = compiled_run("adamw", is_compact=True)
    job, state = runs.make_job(setup), runs.make_state(setup)
    batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)
    after, _ = step(state, {**batch, "weights": jnp.zeros_like(batch["weights"])})
    assert int(after["skipped"]) == 1
    assert runs.state_bytes(after["params"]) == runs.state_bytes(state["params"])
