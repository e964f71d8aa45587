"""The shipped recipes of models and datasets on the hub: their plans, the tokens with loss, and runs of tiny models."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.recipes import recipe_paths
from prepcli.core.errors import OK
from prepcli.formats.manifest import saved_steps
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.hub_recipes import HUB_RECIPES, NUM_ROWS, HubRecipe
from tests.helpers.hub_server import serve_hub
from tests.helpers.slow_cases import slow_except
from tests.helpers.train_runs import read_losses, set_keys

SHOWN_BY_DEFAULT = ("gemma-3-4b-chat", "qwen3-8b-tools", "olmo-2-7b-math")
PLAN_COMMENT = re.compile(r"^# (Plan for .*)$", re.MULTILINE)
PLAN_COMMAND = re.compile(r"^#   prep (plan .*)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def run_with_hub(recipe: HubRecipe, command: str, *words: str) -> str:
    """Run a command with a recipe as it is shipped, except for sizes, and return its output."""
    sets = set_keys(*recipe.values)
    with serve_hub(recipe.repos(Path("model"))) as hub:
        environment = {**os.environ, **hub.environment(Path("home").absolute())}
        environment.pop("HF_HUB_OFFLINE", None)
        finished = run_python(
            *(PREP, command, recipe.name, *sets, *words),
            env=environment,
            has_jax=command == "train",
        )
    assert finished.returncode == OK, finished.stdout + finished.stderr
    return finished.stdout


def plan_text(output: str) -> str:
    """Return the figures in the output of `prep plan`, as the comments of recipes have them."""
    (tokens,) = re.findall(r"= ([\d,]+) tokens per step", output)
    (peak,) = re.findall(r"^peak +(.*)$", output, re.MULTILINE)
    row = re.findall(r"^(\d+ x \S+) +(\S+ GiB) +(yes|no) +(\S+ s) +([\d,]+) ", output, re.MULTILINE)
    ((devices, memory, fits, step, speed),) = row
    return (
        f"Plan for {devices}: peak {peak} of {memory} per device, "
        f"{'fits' if fits == 'yes' else 'does not fit'}. "
        f"{tokens} tokens per step, {step} per step, {speed} tokens/s."
    )


def learned_texts(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts with loss between those without."""
    runs = itertools.groupby(parts, key=lambda part: part["weight"] > 0)
    return ["".join(part["text"] for part in run) for has_loss, run in runs if has_loss]


def test_every_hub_recipe_is_tested():
    shipped = {
        name
        for name, path in recipe_paths().items()
        if re.search('^path = "hf://', path.read_text(), re.MULTILINE)
    }
    # test_seed_recipes has the others.
    assert shipped - {"flan-t5-base-cnn", "gpt-neo-1.3b-wikitext"} == {
        recipe.name for recipe in HUB_RECIPES
    }


@pytest.mark.parametrize("name", [recipe.name for recipe in HUB_RECIPES])
def test_comment_of_recipe_has_its_plan(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    comment = recipe_paths()[name].read_text()
    (command,) = PLAN_COMMAND.findall(comment)
    capsys.readouterr()
    assert main(command.split()) == OK
    assert PLAN_COMMENT.findall(comment) == [plan_text(capsys.readouterr().out)]


@pytest.mark.parametrize(
    "recipe",
    slow_except(HUB_RECIPES, fast=lambda recipe: recipe.name in SHOWN_BY_DEFAULT),
    ids=lambda recipe: recipe.name,
)
def test_loss_is_on_the_text_that_the_model_writes(recipe: HubRecipe):
    report = json.loads(run_with_hub(recipe, "tokenize", "--show", "1", "--json"))
    train = next(data for name, data in report["data"].items() if name.endswith("train"))
    assert learned_texts(train["samples"][0]["parts"]) == [*recipe.learned]
    counts = train["counts"]
    assert (counts["samples"], counts["cut"], counts["without_loss"]) == (NUM_ROWS, 0, 0)


@pytest.mark.parametrize(
    "recipe",
    slow_except(HUB_RECIPES, fast=lambda recipe: recipe.name == "qwen3-4b-reasoning"),
    ids=lambda recipe: recipe.name,
)
def test_hub_recipes_train(recipe: HubRecipe):
    report = json.loads(run_with_hub(recipe, "train", "--json"))
    losses = read_losses(f"runs/{recipe.name}")
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.1
    assert saved_steps(Path("runs", recipe.name))[-1:] == [report["steps"]]
