"""The shipped recipes: their plans at full size, the tokens with loss, and runs of tiny models with the same keys."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.recipes import recipe_paths, recipes_folder
from prepcli.core.errors import OK
from prepcli.formats.manifest import saved_steps
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.hub_recipes import HUB_RECIPES, NUM_ROWS, HubRecipe
from tests.helpers.hub_server import serve_hub
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT_NEO, LLAMA, make_checkpoint
from tests.helpers.train_runs import read_losses, set_keys
from tests.helpers.training_folder import WORDS, write_tokenizer
from trainer.recipe import load_recipe
from trainer.recipe.tables import keys_of, value_of

# The shipped recipes of other systems' examples: planned at full size, and trained small with the same keys.

FULL_SIZE = [  # recipe, accelerator, devices, largest peak of one device in GB
    ("flan-t5-base", "v4", 8, 5),
    ("flan-t5-base-cnn", "v4", 8, 5),
    ("gpt-neo-1.3b", "v4", 8, 6),
    ("gpt-neo-1.3b-wikitext", "v4", 8, 6),
    ("llama-7b", "H100", 8, 25),
    ("llama-7b-prompts", "H100", 8, 25),
    ("llama-7b-lora", "A100-40", 8, 12),
    ("llama-7b-32k-pretrain", "v4", 256, 6),
    ("open-llama-7b", "v4", 256, 8),
    ("gpt-j-6b-pretrain", "v4", 32, 8),
    ("opt-1.3b-pretrain", "A100-40", 16, 5),
    ("opt-6.7b", "H100", 8, 25),
]

# An encoder-decoder model, adapters, and long contexts. test_comment_of_recipe_has_its_plan plans all hub recipes.
PLANNED = ("flan-t5-base", "llama-7b-lora", "llama-7b-32k-pretrain")

# A vocabulary of 136 is divisible by every mesh.
RANDOM = (
    "model.overrides={ vocab_size = 136 }",
    "optimizer.warmup_steps=1",
)

SHORT = (*RANDOM, "train.steps=2")


@dataclass(frozen=True)
class Tiny:
    """A recipe's model and values at the size of a test."""

    recipe: str
    config: dict[str, Any]
    mesh: str
    values: tuple[str, ...] = ()


TINY = [
    *(
        Tiny(
            recipe,
            FAMILY_CONFIGS["t5"],
            "4,1,2",
            ("data.source_length=16", "optimizer.warmup_steps=1"),
        )
        for recipe in ("flan-t5-base", "flan-t5-base-cnn")
    ),
    Tiny(
        "gpt-neo-1.3b",
        GPT_NEO | {"num_heads": 8},
        "1,1,8",
        ("batch.per_device=1", "train.epochs=1"),
    ),
    Tiny("gpt-neo-1.3b-wikitext", GPT_NEO | {"num_heads": 8}, "1,1,8", ("batch.per_device=1",)),
    Tiny("llama-7b", LLAMA, "1,8,1", ("batch.size=8",)),
    Tiny("llama-7b-prompts", LLAMA, "1,8,1", ("batch.size=8",)),
    Tiny("llama-7b-lora", LLAMA, "1,8,1", ("batch.per_device=1", "lora.rank=2")),
    Tiny(
        "llama-7b-32k-pretrain",
        LLAMA,
        "1,2,4",
        (
            *(*SHORT, "optimizer.decay_steps=2", "batch.size=4"),
            *("model.q_chunk_size=8", "model.k_chunk_size=16", "model.ffn_chunk_size=8"),
        ),
    ),
    Tiny("open-llama-7b", LLAMA, "4,2,1", (*SHORT, "optimizer.decay_steps=2", "batch.size=16")),
    Tiny("gpt-j-6b-pretrain", FAMILY_CONFIGS["gptj"], "1,4,2", (*RANDOM, "batch.size=32")),
    Tiny(
        "opt-1.3b-pretrain",
        FAMILY_CONFIGS["opt"],
        "1,8,1",
        (*SHORT, "batch.size=32", "data.holdout=0.1"),
    ),
    Tiny("opt-6.7b", FAMILY_CONFIGS["opt"], "1,4,2", ("optimizer.warmup_steps=1",)),
]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("name", "devices", "count", "peak_gb"),
    slow_except(FULL_SIZE, lambda case: case[0] in PLANNED),
    ids=lambda value: str(value),
)
def test_seed_recipes_fit(
    name: str, devices: str, count: int, peak_gb: float, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    assert (
        main(["plan", str(recipes_folder() / f"{name}.toml"), "--devices", devices, "--json"]) == OK
    )
    report = json.loads(capsys.readouterr().out)
    assert (report["devices"], report["kinds"][0]["fits"], report["warnings"]) == (count, True, [])
    assert report["memory"]["peak"] < peak_gb * 10**9


@pytest.mark.slow
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.recipe)
def test_seed_recipes_train(case: Tiny, capsys: pytest.CaptureFixture[str]):
    make_data()
    recipe = tiny_recipe(case)
    sets = set_keys(*case.values)
    capsys.readouterr()
    assert main(["train", str(recipe), "--out", "run", "--json", *sets]) == OK
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["loss"] < 10
    assert saved_steps(Path("run"))[-1:] == [report["steps"]]


def make_data() -> None:
    """Write texts, and JSON lines with the columns of all recipes."""
    texts = [" ".join(WORDS[start : start + 20]) for start in range(2, 102)]
    columns = ("text", "instruction", "input", "output", "article", "highlights")
    lines = "".join(f"{json.dumps(dict.fromkeys(columns, text))}\n" for text in texts)
    Path("data").mkdir()
    Path("data/text.txt").write_text(" ".join(texts))
    for name in ("train", "validation"):
        Path(f"data/{name}.jsonl").write_text(lines)


def tiny_recipe(case: Tiny) -> Path:
    """Write a shipped recipe with a tiny model, its mesh and its tokenizer, and make that model."""
    make_checkpoint(Path("tiny"), case.config)
    write_tokenizer(Path("tiny"))
    run_ok("save-init", "tiny", "--mesh", case.mesh, "--pad-vocab", "auto")
    replacements = {
        r'^mesh = "[\d,]+"': f'mesh = "{case.mesh}"',
        r'^path = "(.*-init|llama-7b)"': 'path = "tiny-init"',
        r'^path = "hf://.*"$': 'path = "data/train.jsonl"',
        r'^(config|split) = ".*"\n': "",
        r'^eval_split = ".*"$': 'eval_path = "data/validation.jsonl"',
        r'^preset = ".*"$': 'config = "tiny"',
        r'^tokenizer = ".*"$': 'tokenizer = "tiny"',
        r"^seq_length = \d+": "seq_length = 16",
    }
    text = (recipes_folder() / f"{case.recipe}.toml").read_text()
    for pattern, replacement in replacements.items():
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    path = Path(f"{case.recipe}.toml")
    path.write_text(text)
    return path


# The shipped recipes of models and datasets on the hub: their plans, the tokens with loss, and runs of tiny models.

SHOWN_BY_DEFAULT = ("qwen3-8b-tools",)

PLAN_COMMENT = re.compile(r"^# (Plan for .*)$", re.MULTILINE)

PLAN_COMMAND = re.compile(r"^#   prep (plan .*)$", re.MULTILINE)


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
    # TINY has the others.
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


# The shipped recipes for 32K tokens, trained on a tiny model with the same keys.

RECIPES = ("llama-7b-32k", "llama-13b-32k")


def test_long_context_recipes_differ_in_name_and_model_only():
    small, large = (load_recipe(recipes_folder() / f"{name}.toml").recipe for name in RECIPES)
    changed = {key for key in keys_of(small) if value_of(small, key) != value_of(large, key)}
    assert changed == {"name", "model.path"}
    assert (small.data.seq_length, small.batch.size, small.mesh) == (32768, 64, "1,64,4")
