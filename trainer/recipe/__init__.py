"""Recipes: what `prep train` does, as one TOML file in which every key is known."""

from __future__ import annotations

from trainer.recipe.batching import BatchShape, Schedule, batch_shape, schedule_of
from trainer.recipe.loading import Loaded, load
from trainer.recipe.tables import Recipe, schema
from trainer.recipe.unknown import option_hint
from trainer.recipe.writing import recipe_text

__all__ = [
    "BatchShape",
    "Loaded",
    "Recipe",
    "Schedule",
    "batch_shape",
    "load",
    "option_hint",
    "recipe_text",
    "schedule_of",
    "schema",
]
