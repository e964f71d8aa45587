"""The table of optimizers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.helpers.optimizers import KEYS, make_optimizer
from trainer.planning.exact_reduction import ELEMENTWISE_OPTIMIZERS
from trainer.recipe.lr_schedule import LRSchedule
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES, AdamWTable
from trainer.training.optimizers import RULE_BUILDERS, build_optimizer
from trainer.training.optimizers.adamw import AdamW
from trainer.training.optimizers.optimizer import Optimizer
from trainer.training.optimizers.weight_decay import WeightDecay

# Optimizer -> keys with other values than the defaults.
RULE_KEYS: dict[str, dict[str, Any]] = {
    "lion": {"b1": 0.8, "b2": 0.7},
    "sgd": {"momentum": 0.5, "nesterov": True},
    "muon": {
        "momentum": 0.5,
        "nesterov": False,
        "bias_correction": False,
        "newton_schulz_steps": 3,
        "update_rms": 0.0,
        "b1": 0.8,
        "b2": 0.7,
    },
    "adafactor": {
        "decay_rate": 0.7,
        "clip_threshold": 0.5,
        "scale_by_parameter": False,
        "momentum": 0.5,
    },
    "palm": {"decay_rate": 0.7, "momentum": 0.5},
}


def test_every_recipe_type_has_an_optimizer():
    assert RULE_BUILDERS.keys() == OPTIMIZER_TABLES.keys() == KEYS.keys()
    assert {*ELEMENTWISE_OPTIMIZERS} < KEYS.keys()


def test_build_optimizer_passes_every_key_of_adamw():
    table = AdamWTable(
        lr=1e-3, init_lr=1e-5, b1=0.8, b2=0.7, eps=1e-7, weight_decay=0.1, decay_embeddings=False, clip_norm=2.0,
        warmup_steps=3, decay_exclude=("head",), decay_include=("re:norm",), freeze=("embed",),
        moment_dtype="bfloat16", ema=0.9,
    )  # fmt: skip
    schedule = LRSchedule(peak=1e-3, end=0.0, kind="linear", warmup=3, decay=20, initial=1e-5)
    decay = WeightDecay(0.1, False, ("head",), ("re:norm",))
    expected = Optimizer(AdamW(0.8, 0.7, 1e-7), schedule, decay, 2.0, ("embed",), "bfloat16", 0.9)
    assert build_optimizer(table, 20) == expected


@pytest.mark.parametrize("name", RULE_KEYS)
def test_build_optimizer_passes_the_keys_of_its_rule(name: str):
    rule: Any = make_optimizer(name, **RULE_KEYS[name]).rule
    attributes = dataclasses.asdict(rule)
    assert {key: attributes[key] for key in RULE_KEYS[name]} == RULE_KEYS[name]


def test_adafactor_without_factors_has_no_smallest_size():
    sizes: list[int] = []
    for factored in (True, False):
        rule: Any = make_optimizer("adafactor", factored=factored).rule
        sizes.append(rule.min_factored_size)
    assert sizes == [8, 0]
