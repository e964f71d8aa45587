"""Recipes: the TOML files that configure `prep train`."""

from __future__ import annotations

from trainer.recipe.description import recipe_to_toml
from trainer.recipe.hints import option_hint
from trainer.recipe.loading import LoadedRecipe, complete_recipe, load_recipe
from trainer.recipe.tables import BatchShape, Recipe, batch_shape, schema

__all__ = [
    "BatchShape",
    "LoadedRecipe",
    "Recipe",
    "batch_shape",
    "complete_recipe",
    "load_recipe",
    "option_hint",
    "recipe_to_toml",
    "schema",
]
