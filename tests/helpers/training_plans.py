"""Recipes and plans of training steps, without checkpoints or data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.models.rules import DEFAULT_RULES
from trainer.planning.model_shapes import model_of_config
from trainer.planning.training_plan import TrainingPlan, plan_training
from trainer.recipe import Recipe, load_recipe
from trainer.recipe.model_table import Model

RECIPE = """\
[model]
path = "llama-7b-init"
[data]
type = "text"
path = "train.txt"
seq_length = 16
[batch]
size = 8
[optimizer]
lr = 1e-3
[train]
steps = 20
"""
TINY = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def load_text(folder: Path, *overrides: str, text: str = RECIPE) -> Recipe:
    """Load a recipe with overrides."""
    path = folder / "recipe.toml"
    path.write_text(text)
    return load_recipe(path, overrides).recipe


def plan_text(folder: Path, *overrides: str, config: Mapping[str, Any] = TINY) -> TrainingPlan:
    """Plan a step of RECIPE with overrides."""
    return plan_training(load_text(folder, *overrides), model_of_config(config), DEFAULT_RULES)


def rope_table(
    scaling: dict[str, Any] | None = None,
    theta: float | None = None,
    max_positions: int | None = None,
) -> Model:
    """Return a recipe's `[model]` with another rotary embedding."""
    return Model(rope_scaling=scaling, rope_theta=theta, max_position_embeddings=max_positions)
