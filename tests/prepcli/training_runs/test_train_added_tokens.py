"""Training of a model with added tokens, its export, and the removal of the tokens with their trained rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from prepcli.cli.main import main
from tests.helpers.tiny_checkpoints import read_tensors
from tests.helpers.training_folder import WORDS, make_training_folder

TABLES = ("model.embed_tokens.weight", "lm_head.weight")
SHORT = ["train.steps=3", "checkpoint.every=3", "data.holdout=0"]


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    Path("tokens.txt").write_text("<tool>\n")
    text = Path("text.txt").read_text()
    Path("text.txt").write_text(text.replace(" w7 ", " <tool> "))


@pytest.mark.parametrize("is_init", [False, True])
def test_removal_after_training_names_lost_rows(
    capsys: pytest.CaptureFixture[str], *, is_init: bool
):
    prep.add_tokens("./tiny", "added", tokens="tokens.txt")
    start = "./added"
    if is_init:
        prep.save_init("./added", "start", pad_vocab="8", mesh="1,2,4")
        start = "start"
    prep.train("recipe.toml", overrides=[*SHORT, f'model.path="{start}"'])
    prep.export("runs/recipe", "exported")
    before = read_tensors(Path("added"))
    trained = read_tensors(Path("exported"))
    for name in TABLES:
        assert trained[name].shape == before[name].shape
        assert (trained[name][len(WORDS)] != before[name][len(WORDS)]).any()

    capsys.readouterr()
    assert main(["remove-tokens", "./exported", "--out", "removed"]) == 0
    messages = capsys.readouterr().err
    assert "1 token removed: id 131" in messages
    assert "their rows are dropped, also where training changed them" in messages
    removed = read_tensors(Path("removed"))
    assert removed.keys() == trained.keys()
    for name, array in trained.items():
        kept = array[: len(WORDS)] if name in TABLES else array
        assert np.array_equal(removed[name], kept), name
    tokenizer = Path("removed/tokenizer.json").read_bytes()
    assert tokenizer == Path("tiny/tokenizer.json").read_bytes()
    assert json.loads(Path("removed/config.json").read_text())["vocab_size"] == len(WORDS)
