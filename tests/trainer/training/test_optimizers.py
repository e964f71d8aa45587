"""The table of optimizers: each type has a rule, and each key of a rule changes its updates."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers import runs
from tests.helpers.optimizers import (
    KEYS,
    TRAJECTORY_LEAVES,
    make_optimizer,
    random_gradients,
    trajectory_params,
)
from trainer.planning.step_inputs import ELEMENTWISE_OPTIMIZERS
from trainer.recipe.lr_schedule import LRSchedule
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES, AdamWTable
from trainer.training.optimizers import RULES, Optimizer, build_optimizer

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


@pytest.mark.parametrize("name", RULE_KEYS)
def test_each_key_of_a_rule_changes_its_updates(name: str):
    expected = jax.tree.leaves(updates_of(make_optimizer(name)))
    for key, value in {**RULE_KEYS[name], **COMMON_KEYS}.items():
        changed = jax.tree.leaves(updates_of(make_optimizer(name, **{key: value})))
        assert any(not np.array_equal(a, b) for a, b in zip(expected, changed)), key
