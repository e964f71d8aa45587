"""The token that a tokenizer puts before texts: the same in every command, one per document."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import WORDS, make_training_folder

BEGIN = 5
TEXTS = ["w9 w8 w7", "w20 w21"]
DATA = ("data.path=rows.jsonl", "data.type=json", "data.holdout=0", "data.add_eos=false")


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    write_prefix(Path("tiny"))
    convert = ["save-init", "tiny", "--pad-vocab", "8", "--mesh", "1,2,4", "--overwrite", "-q"]
    assert main(convert) == OK
    lines = [json.dumps({"text": text}) for text in TEXTS * 40]
    Path("rows.jsonl").write_text("\n".join(lines))


def write_prefix(folder: Path) -> None:
    """Let the tokenizer of a folder begin each text with a token."""
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    ids = [(WORDS[BEGIN], BEGIN)]
    tokenizer.post_processor = processors.TemplateProcessing(f"{WORDS[BEGIN]} $A", None, ids)
    tokenizer.save(file)


def expected_ids() -> list[int]:
    """Return the ids of the first documents, as the tokenizers library encodes them."""
    tokenizer = Tokenizer.from_file("tiny/tokenizer.json")
    return [token for text in TEXTS for token in tokenizer.encode(text).ids]


def test_tokens_of_training_are_those_of_the_tokenizer(capsys: pytest.CaptureFixture[str]):
    overrides = [*DATA, "data.shuffle=false"]
    batch = next(iter(prep.batches("recipe.toml", overrides=overrides)))
    assert batch["tokens"][0][: len(expected_ids())].tolist() == expected_ids()
    # The first token of a document has no loss. Targets are one place before their tokens.
    is_begin = batch["targets"][0] == BEGIN
    assert is_begin.any()
    assert not batch["weights"][0][is_begin].any()
    settings = set_keys(*overrides)
    assert main(["tokenize", "recipe.toml", *settings, "--out", "again"]) == OK
    log = capsys.readouterr().err
    assert log.count("each document begins with w5, as the tokenizer begins a text") == 1
    (tokens,) = Path("again").rglob("tokens.bin")
    assert np.fromfile(tokens, "<u2")[: len(expected_ids())].tolist() == expected_ids()


def test_prompts_and_evaluation_begin_as_training_does():
    loss = prep.evaluate("tiny-init", "rows.jsonl", seq_length=8).loss
    assert loss is not None
    plain = prep.evaluate(
        "tiny-init", "rows.jsonl", seq_length=8, overrides="data.add_bos=false"
    ).loss
    assert loss != plain
    generated = prep.generate("tiny-init", TEXTS[0], max_new_tokens=1)
    assert generated.prompt_tokens[0][0] == BEGIN


def test_recipe_overrides_the_tokenizer():
    batch = next(iter(prep.batches("recipe.toml", overrides=[*DATA, "data.add_bos=false"])))
    assert BEGIN not in batch["tokens"]


def train(*overrides: str) -> list[str]:
    words = ["train", "recipe.toml", "--out", "run", "--set", "train.steps=4"]
    for override in (*DATA, *overrides):
        words += ["--set", override]
    return words


def test_stopped_run_without_the_token_says_how_to_resume(capsys: pytest.CaptureFixture[str]):
    # A run of an earlier version has recorded `add_bos = false`, the default then.
    assert main([*train("data.add_bos=false"), "--stop-after", "2", "-q"]) in (OK, 75)
    stores = sorted(Path().rglob("tokens.bin"))
    error = run_failing(capsys, FAILED, *train())
    assert "data.add_bos: false -> not set" in error
    # The data is not tokenized again before the refusal.
    assert sorted(Path().rglob("tokens.bin")) == stores != []
    assert "`--set data.add_bos=false` keeps it" in error
    run_ok(*train("data.add_bos=false"))


def test_stopped_run_resumes_if_the_tokenizer_adds_nothing():
    make_training_folder()
    assert main([*train("data.add_bos=false"), "--stop-after", "2", "-q"]) in (OK, 75)
    run_ok(*train())
