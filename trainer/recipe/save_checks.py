"""Checks of the keys that say when a run evaluates, saves, exports and profiles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.recipe.data_sources import has_eval_data
from trainer.recipe.formatting import format_value
from trainer.recipe.problems import Problem
from trainer.recipe.tables import Recipe, value_of

PROFILE_KEY = "train.profile"
PUSH_KEY = "checkpoint.push"
REPOSITORY = re.compile(r"[^\s/@]+/[^\s/@]+(@[^\s@]+)?")
EPOCH_KEYS = {"train.eval_every_epochs": "train.eval_every", "checkpoint.every_epochs": "checkpoint.every"}


def find_save_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of these keys."""
    checkpoint, train, data = recipe.checkpoint, recipe.train, recipe.data
    for key, step_key in EPOCH_KEYS.items():
        if value_of(recipe, key) is not None and value_of(recipe, step_key):
            what = f"{_key_is(recipe, key)} and {_key_is(recipe, step_key)}"
            yield Problem((key, step_key), what, "both set the same interval", "remove one of them")
    if checkpoint.dtype not in (None, recipe.model.param_dtype) and checkpoint.optimizer_state:
        key = "checkpoint.dtype"
        why = f"a run resumes from {recipe.model.param_dtype} parameters, and the optimizer state is saved"
        yield Problem((key,), _key_is(recipe, key), why, "`optimizer_state = false` in [checkpoint]")
    if checkpoint.best is not None:
        key = "checkpoint.best"
        if not has_eval_data(data):
            why = "there is no evaluation data: neither `holdout` nor `eval_path` is set"
            yield Problem((key,), _key_is(recipe, key), why, "`holdout = 0.05` in [data]")
        elif not train.eval_every and train.eval_every_epochs is None:
            why = "the run evaluates only after its last step"
            yield Problem((key,), _key_is(recipe, key), why, "`eval_every = 500` in [train]")
    if checkpoint.push is not None and not REPOSITORY.fullmatch(checkpoint.push):
        why, hint = "it has the form OWNER/NAME or OWNER/NAME@BRANCH", '`push = "me/llama-13b"` in [checkpoint]'
        yield Problem((PUSH_KEY,), _key_is(recipe, PUSH_KEY), why, hint)
    if train.profile is not None and (reason := _invalid_profile(train.profile)):
        yield Problem((PROFILE_KEY,), f"`{PROFILE_KEY}` is invalid", reason, "`profile = { start = 10, steps = 3 }`")


def _key_is(recipe: Recipe, key: str) -> str:
    return f"`{key}` is {format_value(value_of(recipe, key))}"


def _invalid_profile(profile: Mapping[str, Any]) -> str:
    """Return why a profile's table is invalid; empty if it is valid."""
    if {*profile} != {"start", "steps"}:
        return f"its keys are {', '.join(profile) or 'missing'}, not start and steps"
    invalid = [key for key, value in profile.items() if type(value) is not int or value < 1]
    return f"{invalid[0]} is {format_value(profile[invalid[0]])}, not a positive integer" if invalid else ""
