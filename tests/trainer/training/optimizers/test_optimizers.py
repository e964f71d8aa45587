"""The table of optimizers."""

from __future__ import annotations

from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES, AdamWTable
from trainer.training.optimizers import OPTIMIZER_BUILDERS, build_optimizer
from trainer.training.optimizers.adamw import AdamW
from trainer.training.optimizers.lr_schedule import LRSchedule


def test_every_recipe_type_has_an_optimizer():
    assert OPTIMIZER_BUILDERS.keys() == OPTIMIZER_TABLES.keys()


def test_build_optimizer_passes_every_key_of_adamw():
    table = AdamWTable(
        lr=1e-3, b1=0.8, b2=0.7, eps=1e-7, weight_decay=0.1, decay_embeddings=False, clip_norm=2.0, warmup_steps=3
    )
    schedule = LRSchedule(peak=1e-3, end=0.0, kind="linear", warmup=3, decay=20)
    expected = AdamW(schedule, 0.8, 0.7, 1e-7, weight_decay=0.1, decay_embeddings=False, clip_norm=2.0)
    assert build_optimizer(table, 20) == expected
