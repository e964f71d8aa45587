"""What an optimizer keeps between steps: frozen leaves, decay masks, moving averages, and moments in bfloat16."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from prepcli.models.param_tree import ParamLeaf, flatten_tree, unflatten_tree
from tests.helpers import runs
from tests.helpers.optimizers import (
    KEYS,
    WHOLE_STEP_RULES,
    compile_step,
    compiled_run,
    make_optimizer,
    take_steps,
)
from tests.helpers.slow_cases import slow_except
from trainer.training import feed
from trainer.training.optimizers import (
    RoundingKey,
    decay_mask,
    narrow_moments,
    round_stochastically,
)
from trainer.training.step import StepSetup, leaf_name, state_shapes

ROUNDED = ("embed.tokens", "layers.attn.q.weight", "layers.mlp.up.weight", "final_norm.scale")
FREEZE = ("embed", "re:attn_norm|mlp\\.down")


def moment_names(setup: StepSetup) -> dict[str, Any]:
    """Return shape, dtype and sharding of the leaves of the optimizer state, by name."""
    leaves = jax.tree_util.tree_flatten_with_path(state_shapes(setup)["opt_state"])[0]
    return {leaf_name(path): leaf for path, leaf in leaves}


def frozen_paths(setup: StepSetup) -> set[str]:
    """Return the paths of the leaves that `COMPACT` freezes."""
    texts = ("embed.positions", "attn_norm", "mlp", "attn.q", "attn.k", "attn.o", "final_norm.bias")
    return {path for path in setup.model.leaves if any(text in path for text in texts)}


@pytest.mark.parametrize("name", KEYS)
def test_frozen_leaves_have_no_moments(name: str):
    setup, _ = compiled_run(name, is_compact=True)
    frozen = frozen_paths(setup)
    assert not [name for name in moment_names(setup) if any(path in name for path in frozen)]


# A step gives the trained leaves alone to the optimizer, whatever its rule.
@pytest.mark.parametrize("name", slow_except(KEYS, WHOLE_STEP_RULES))
def test_frozen_leaves_are_not_updated(name: str):
    setup, step = compiled_run(name, is_compact=True)
    before = runs.make_state(setup)
    after = take_steps(setup, before, until=2, step=step)
    changed = {
        path
        for path, leaf in flatten_tree(after["params"]).items()
        if not np.array_equal(leaf, flatten_tree(before["params"])[path])
    }
    assert changed == setup.model.leaves.keys() - frozen_paths(setup)


def test_frozen_leaves_have_no_gradients():
    """Gradients of frozen leaves would count in the norm of the gradients."""
    frozen = runs.make_setup(optimizer=make_optimizer("adamw", freeze=FREEZE))
    whole = runs.make_setup(optimizer=make_optimizer("adamw"))
    norms = []
    for setup in (frozen, whole):
        job = runs.make_job(setup)
        batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)
        norms.append(float(compile_step(setup)(runs.make_state(setup), batch)[1]["grad_norm"]))
    assert norms[0] < 0.99 * norms[1]


def test_decay_exclude_takes_paths_and_expressions():
    optimizer = make_optimizer("adamw", decay_exclude=("embed.positions", "re:attn\\.[qk]"))
    decayed = flatten_tree(decay_mask(optimizer.table, runs.make_setup().model.leaves))
    assert decayed["embed.tokens"]
    assert decayed["layers.attn.v.weight"]
    assert not {path for path, flag in decayed.items() if flag} & {
        "embed.positions", "layers.attn.q.weight", "layers.attn.k.weight", "final_norm.scale", "layers.mlp.up.bias",
    }  # fmt: skip


def test_decay_include_takes_norms_and_biases():
    leaves = runs.make_setup().model.leaves
    table = make_optimizer("adamw", decay_include=("re:.",), decay_exclude=("final_norm",)).table
    everything = decay_mask(table, leaves)
    assert {path for path, flag in flatten_tree(everything).items() if not flag} == {
        "final_norm.scale",
        "final_norm.bias",
    }


def test_ema_averages_the_parameters():
    setup = runs.make_setup(optimizer=make_optimizer("adamw", ema=0.75))
    state, compiled_step = runs.make_state(setup), compile_step(setup)
    expected = np.asarray(state["params"]["embed"]["tokens"])
    for step in range(1, 4):
        state = take_steps(setup, state, until=step, step=compiled_step)
        expected = 0.75 * expected + 0.25 * np.asarray(state["params"]["embed"]["tokens"])
    np.testing.assert_allclose(
        state["opt_state"]["ema"]["embed"]["tokens"], expected, rtol=1e-6, atol=1e-7
    )


def test_statistics_are_sharded_along_the_other_axes():
    optimizer = make_optimizer("adafactor")
    moments = moment_names(runs.make_setup(mesh="1,2,4", optimizer=optimizer))
    rows = moments["rms.v_row.layers.mlp.up.weight"]
    columns = moments["rms.v_col.layers.mlp.up.weight"]
    assert {rows.shape, columns.shape} == {(2, 128, 1), (2, 1, 32)}
    by_shape = {leaf.shape: leaf.sharding.spec for leaf in (rows, columns)}
    assert by_shape == {
        (2, 128, 1): PartitionSpec(None, "mp", None),
        (2, 1, 32): PartitionSpec(None, None, "fsdp"),
    }


def moment_dtypes(opt_state: dict[str, Any]) -> set[str]:
    """Return the dtypes of the moments with several axes."""
    moments = {slot: tree for slot, tree in opt_state.items() if slot != "ema"}
    return {leaf.dtype.name for leaf in jax.tree.leaves(moments) if leaf.ndim > 1}


@pytest.mark.parametrize("name", KEYS)
def test_update_returns_bfloat16_moments(name: str):
    setup, _ = compiled_run(name, is_compact=True)
    shapes = state_shapes(setup)
    params = setup.trained_params(shapes["params"])
    gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)

    def update(gradients: Any, opt_state: Any, params: Any) -> Any:
        return setup.optimizer.update(
            gradients,
            opt_state,
            params,
            leaves=setup.trained_leaves,
            learning_rate=jnp.float32(1e-2),
            rounding=RoundingKey(7, jnp.int32(1)),
        )

    _, opt_state = jax.eval_shape(update, gradients, shapes["opt_state"], params)
    assert moment_dtypes(opt_state) == {"bfloat16"}


# The test above traces the update of each rule.
@pytest.mark.parametrize("name", slow_except(KEYS, WHOLE_STEP_RULES))
def test_bfloat16_moments_are_rounded_after_each_step(name: str):
    setup, step = compiled_run(name, is_compact=True)
    state = take_steps(setup, runs.make_state(setup), until=2, step=step)
    assert moment_dtypes(state["opt_state"]) == {"bfloat16"}


def test_stochastic_rounding_is_unbiased_and_keeps_bfloat16():
    bits = jax.random.bits(jax.random.key(0), (100_000,))
    x = jnp.full((100_000,), 1 + 0.3 * 2**-7, jnp.float32)
    rounded = np.asarray(round_stochastically(x, bits).astype(jnp.float32))
    assert set(rounded) == {1.0, 1 + 2**-7}
    assert (rounded > 1).mean() == pytest.approx(0.3, abs=0.01)
    exact = jnp.array([0.0, -1.5, jnp.inf, -jnp.inf, 3e38], jnp.bfloat16)
    assert np.array_equal(round_stochastically(exact.astype(jnp.float32), bits[:5]), exact)
    assert np.isnan(round_stochastically(jnp.array([jnp.nan]), bits[:1]))


def round_moment(moment: jax.Array, path: str, leaf: ParamLeaf, step: int = 3) -> np.ndarray:
    """Return a moment of a leaf, rounded in a step."""
    tree = {"mu": unflatten_tree({path: moment})}
    rounded = narrow_moments(tree, {path: leaf}, "bfloat16", RoundingKey(7, jnp.int32(step)))
    return np.asarray(flatten_tree(rounded["mu"])[path])


def test_rounding_does_not_depend_on_stacking():
    path = "layers.mlp.up.weight"
    leaf = runs.make_setup().model.leaves[path]
    moment = jnp.asarray(np.random.default_rng(0).standard_normal(leaf.shape, np.float32))
    stacked = round_moment(moment, path, leaf)
    for layer in range(2):
        own = f"layers.{layer}.mlp.up.weight"
        own_leaf = dataclasses.replace(
            leaf, path=own, shape=leaf.shape[1:], dims=leaf.dims[1:], layer_index=layer
        )
        assert np.array_equal(round_moment(moment[layer], own, own_leaf), stacked[layer])
    assert not np.array_equal(round_moment(moment, path, leaf, step=4), stacked)


def test_rounding_does_not_depend_on_the_mesh():
    """Equal moments in float32 have equal bits in bfloat16."""
    optimizer = make_optimizer("lion", moment_dtype="bfloat16")
    rounded = []
    for mesh in ("", "1,2,4"):
        setup = runs.make_setup(mesh=mesh, optimizer=optimizer)
        flat_params = flatten_tree(runs.make_state(setup)["params"])
        params = unflatten_tree({path: flat_params[path] for path in ROUNDED})

        @jax.jit
        def round_params(params: Any, setup: StepSetup = setup) -> Any:
            leaves = {path: setup.model.leaves[path] for path in ROUNDED}
            return narrow_moments({"mu": params}, leaves, "bfloat16", RoundingKey(7, jnp.int32(1)))

        rounded.append(flatten_tree(jax.device_get(round_params(params)["mu"])))
    assert all(np.array_equal(value, rounded[1][path]) for path, value in rounded[0].items())
