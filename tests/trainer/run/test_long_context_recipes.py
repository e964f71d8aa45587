"""The shipped recipes for 32K tokens, trained on a tiny model with the same keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.recipes import recipes_folder
from prepcli.core.errors import OK
from prepcli.formats.manifest import saved_steps
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import WORDS, write_tokenizer
from trainer.recipe import load_recipe
from trainer.recipe.tables import keys_of, value_of

RECIPES = ("llama-7b-32k", "llama-13b-32k")
TINY_VALUES = (
    *(
        "mesh=1,2,4",
        "model.path=tiny-init",
        "batch.size=4",
        "train.steps=2",
        "optimizer.warmup_steps=1",
    ),
    *("data.seq_length=64", "data.path=train.jsonl", "data.eval_path=train.jsonl", "eval.limit=2"),
    *("model.q_chunk_size=16", "model.k_chunk_size=32", "model.ffn_chunk_size=16"),
)


@pytest.mark.slow  # test_seed_recipes trains a recipe with these keys
def test_long_context_recipes_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("tiny"), LLAMA)
    write_tokenizer(Path("tiny"))
    run_ok("save-init", "tiny", "--mesh", "1,2,4", "--pad-vocab", "auto")
    Path("train.jsonl").write_text(json.dumps({"text": " ".join(WORDS * 8)}) + "\n")
    sets = set_keys(*TINY_VALUES)
    capsys.readouterr()
    recipe = recipes_folder() / f"{RECIPES[0]}.toml"
    assert main(["train", str(recipe), "--out", "run", "--json", *sets]) == OK
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == 2
    assert 0 < report["loss"] < 10
    assert saved_steps(Path("run")) == [2]


def test_long_context_recipes_differ_in_name_and_model_only():
    small, large = (load_recipe(recipes_folder() / f"{name}.toml").recipe for name in RECIPES)
    changed = {key for key in keys_of(small) if value_of(small, key) != value_of(large, key)}
    assert changed == {"name", "model.path"}
    assert (small.data.seq_length, small.batch.size, small.mesh) == (32768, 64, "1,64,4")
