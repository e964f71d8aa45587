"""Recipes: the TOML files that configure `prep train`."""

from __future__ import annotations

from trainer.recipe.loading import LoadedRecipe, complete_recipe, load_recipe
from trainer.recipe.resolve import BatchShape, WarmupDecay, batch_shape, warmup_decay
from trainer.recipe.serialize import recipe_to_toml
from trainer.recipe.tables import Recipe, schema
from trainer.recipe.unknown_keys import option_hint

__all__ = [
    "BatchShape",
    "LoadedRecipe",
    "Recipe",
    "WarmupDecay",
    "batch_shape",
    "complete_recipe",
    "load_recipe",
    "option_hint",
    "recipe_to_toml",
    "schema",
    "warmup_decay",
]
