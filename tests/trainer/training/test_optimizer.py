"""Optimizers: their table, what they keep between steps, weight decay by role, and parameters in bfloat16."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from prepcli.commands.testing.tiny_model import tiny_transformer
from prepcli.models.param_tree import ParamLeaf, flatten_tree, unflatten_tree
from tests.helpers import runs
from tests.helpers.hybrid_configs import HYBRID_FAMILIES
from tests.helpers.later_configs import GEMMA4_EXPERTS, LATER_FAMILIES
from tests.helpers.optimizers import (
    KEYS,
    TRAJECTORY_LEAVES,
    WHOLE_STEP_RULES,
    compile_step,
    compiled_run,
    make_optimizer,
    random_gradients,
    take_steps,
    trajectory_params,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT_NEO, LLAMA
from trainer.planning.step_inputs import ELEMENTWISE_OPTIMIZERS
from trainer.recipe.lr_schedule import LRSchedule
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES, AdamWTable
from trainer.training import feed
from trainer.training.optimizers import (
    RULES,
    Optimizer,
    RoundingKey,
    bfloat16_to_float32,
    build_optimizer,
    decay_mask,
    narrow_moments,
    narrow_params,
    round_stochastically,
    round_to_nearest,
)
from trainer.training.step import StepSetup, leaf_name, state_shapes

# What an optimizer keeps between steps: frozen leaves, decay masks, moving averages, and moments in bfloat16.

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
    whole = runs.make_setup()
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


# The table of optimizers: each type has a rule, and each key of a rule changes its updates.

# Optimizer -> keys with other values than those of `KEYS`.
RULE_KEYS: dict[str, dict[str, Any]] = {
    "adamw": {"b1": 0.8, "b2": 0.7, "eps": 1e-2},
    "lion": {"b1": 0.1, "b2": 0.1},
    "sgd": {"momentum": 0.5, "nesterov": True},
    "muon": {
        "momentum": 0.5,
        "nesterov": False,
        "bias_correction": False,
        "newton_schulz_steps": 3,
        "update_rms": 0.0,
        "b1": 0.8,
        "b2": 0.7,
        "eps": 1e-2,
    },
    "adafactor": {
        "decay_rate": 0.7,
        "factored": False,
        "min_factored_size": 64,
        "clip_threshold": 0.5,
        "scale_by_parameter": False,
        "scale_by": "stacked",
        "momentum": 0.5,
    },
    "palm": {"decay_rate": 0.7, "momentum": 0.5, "scale_by": "stacked"},
}

# Keys of all optimizers that rules read.
COMMON_KEYS: dict[str, Any] = {
    "weight_decay": 0.3,
    "decay_embeddings": False,
    "decay_exclude": ("layers.mlp.up.weight",),
    "decay_include": ("re:norm",),
}


def test_every_recipe_type_has_an_optimizer():
    assert RULES.keys() == OPTIMIZER_TABLES.keys() == KEYS.keys() == RULE_KEYS.keys()
    assert {*ELEMENTWISE_OPTIMIZERS} < KEYS.keys()


def test_build_optimizer_adds_the_schedule():
    table = AdamWTable(lr=1e-3, init_lr=1e-5, warmup_steps=3)
    schedule = LRSchedule(peak=1e-3, end=0.0, kind="linear", warmup=3, decay=20, initial=1e-5)
    assert build_optimizer(table, 20) == Optimizer(table, schedule)
    # Steps are compiled once for equal setups.
    assert hash(build_optimizer(table, 20)) == hash(Optimizer(table, schedule))


def updates_of(optimizer: Optimizer) -> Any:
    """Return the updates of the second step, with which momenta take part."""
    setup = runs.make_setup()
    params = trajectory_params(setup)
    leaves = {path: setup.model.leaves[path] for path in TRAJECTORY_LEAVES}
    transformation = optimizer.transformation(leaves)

    @jax.jit
    def run() -> Any:
        state: Any = transformation.init(params)
        updates: Any = params
        for step in range(2):
            gradients = random_gradients(params, step)
            updates, state = transformation.update(gradients, state, params, learning_rate=0.1)
        return updates

    return run()


@pytest.mark.parametrize("name", slow_except(RULE_KEYS, ["adamw"]))
def test_each_key_of_a_rule_changes_its_updates(name: str):
    expected = jax.tree.leaves(updates_of(make_optimizer(name)))
    for key, value in {**RULE_KEYS[name], **COMMON_KEYS}.items():
        changed = jax.tree.leaves(updates_of(make_optimizer(name, **{key: value})))
        assert any(not np.array_equal(a, b) for a, b in zip(expected, changed)), key


# Leaves with weight decay: the same as in transformers' Trainer, and included relative position biases.

# Families with parameters that others do not have.
LATER = {
    "apertus": LATER_FAMILIES["apertus"],
    "gemma4_text": LATER_FAMILIES["gemma4_text"] | GEMMA4_EXPERTS,
    **{name: LATER_FAMILIES[name] for name in ("diffllama", "doge", "gpt_neox_japanese")},
}

CONFIGS = {"llama": LLAMA, "gpt_neo": GPT_NEO, **FAMILY_CONFIGS, **HYBRID_FAMILIES, **LATER}

# The Trainer finds norms by their names, and misses this one.
UNRECOGNIZED_NORMS = {"backbone.norm_f.weight", "model.norm_f.weight"}

# Prefix in files -> prefix in the model, where transformers renames tensors.
RENAMED = {"nemotron_h": ("backbone.", "model.")}

BIASES = {"encoder.relative_positions.weight", "decoder.relative_positions.weight"}


def decayed(config: dict, **keys: Any) -> set[str]:
    """Return the paths of the leaves with weight decay."""
    table = AdamWTable(lr=1.0, weight_decay=0.1, **keys)
    mask = flatten_tree(decay_mask(table, tiny_transformer(config).model.leaves))
    return {path for path, decays in mask.items() if decays}


# A family with each way of naming norms and biases.
DECAYED = ("llama", "gpt_neo", "t5", "gpt_oss", "deepseek_v3", "mamba2", "nemotron_h", "doge")


@pytest.mark.parametrize("family", slow_except(CONFIGS, lambda family: family in DECAYED))
def test_decayed_leaves_match_the_transformers_trainer(family: str):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = CONFIGS[family]
    with torch.device("meta"):
        hf_config = transformers.AutoConfig.for_model(**config)
        auto = (
            transformers.AutoModelForSeq2SeqLM
            if family == "t5"
            else transformers.AutoModelForCausalLM
        )
        model = auto.from_config(hf_config)
    trainer_names = {*transformers.Trainer.get_decay_parameter_names(None, model)}
    trainer_names -= UNRECOGNIZED_NORMS
    names = {name for name, _ in model.named_parameters()}
    leaves = decayed(config)
    old, new = RENAMED.get(family, ("", ""))
    leaf_paths = {
        location.tensor.replace(old, new, 1): location.leaf_path
        for location in tiny_transformer(config).locations
    }
    compared = leaf_paths.keys() & names
    assert len(compared) > len(names) / 2, "the names of tensors differ"
    wrong = {x for x in compared if (leaf_paths[x] in leaves) != (x in trainer_names)}
    assert wrong == set()


def test_relative_position_biases_decay_if_included():
    config = FAMILY_CONFIGS["t5"]
    assert not BIASES & decayed(config)
    assert decayed(config, decay_include=("re:relative_positions",)) >= BIASES


# Updates of parameters in bfloat16, compared with float32.

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


def test_skipped_step_keeps_bfloat16_parameters():
    setup, step = compiled_run("adamw", is_compact=True)
    job, state = runs.make_job(setup), runs.make_state(setup)
    batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)
    after, _ = step(state, {**batch, "weights": jnp.zeros_like(batch["weights"])})
    assert int(after["skipped"]) == 1
    assert runs.state_bytes(after["params"]) == runs.state_bytes(state["params"])
