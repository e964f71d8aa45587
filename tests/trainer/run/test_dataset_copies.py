"""A copy of a dataset of the hub on this machine: every command reads the same part of it, or refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import USAGE
from tests.helpers.run_cli import run_failing
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import RECIPE, WORDS, make_training_folder

SPLITS = {"train": "w1", "test": "w2", "validation": "w3"}
README = "---\nconfigs:\n- config_name: default\n  data_files:\n"
README += "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in SPLITS)
README += "---\n# Text\n"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    Path("copy/data").mkdir(parents=True)
    Path("copy/README.md").write_text(README)
    for split, word in SPLITS.items():
        lines = [json.dumps({"text": " ".join([word] * 40)}) for _ in range(20)]
        Path(f"copy/data/{split}-00000-of-00001.jsonl").write_text("\n".join(lines))
    text = RECIPE.replace('path = "text.txt"\n', 'path = "copy"\n').replace("holdout = 0.1\n", "")
    Path("recipe.toml").write_text(text.replace('"text"', '"json"'))


def used_words(tokens: np.ndarray) -> set[str]:
    return {WORDS[token] for token in np.unique(tokens)} - {WORDS[0]}


def batch_words(*overrides: str) -> set[str]:
    batch = next(iter(prep.batches("recipe.toml", overrides=["data.add_eos=false", *overrides])))
    return used_words(batch["tokens"])


def tokenized_words(*overrides: str) -> set[str]:
    settings = ["data.add_eos=false", *overrides]
    report = prep.tokenize_shard("recipe.toml", overrides=settings)
    (part,) = (part for part in report.data if part.name == "train")
    assert part.path is not None
    return used_words(np.fromfile(part.path / "00000" / "tokens.bin", "<u2"))


@pytest.mark.parametrize("read", [batch_words, tokenized_words])
def test_copy_of_a_dataset_gives_one_split(read: Callable[..., set[str]]):
    assert read() == {"w1"}
    assert read("data.split=test") == {"w2"}
    assert read("data.split=train", "data.eval_split=validation") == {"w1"}


def test_folder_without_a_readme_gives_the_split_of_its_names(capsys: pytest.CaptureFixture[str]):
    Path("copy/README.md").unlink()
    assert batch_words("data.split=validation") == {"w3"}
    assert main(["tokenize", "recipe.toml"]) == 0
    note = "copy has files of several splits (test, train, validation) and all are read"
    assert note in capsys.readouterr().err


COMMANDS = {
    "train": ["train", "recipe.toml"],
    "tokenize": ["tokenize", "recipe.toml"],
    "plan": ["plan", "recipe.toml"],
    "eval": ["eval", "tiny-init", "--data", "copy", "--type", "json"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.split=dev", "copy has no split `dev`"),
        ("data.config=fr", "copy has no configuration `fr`"),
        ("data.revision=main", "data.revision"),
    ],
)
def test_every_command_refuses_an_unknown_part(
    capsys: pytest.CaptureFixture[str], command: str, override: str, message: str
):
    error = run_failing(capsys, USAGE, *COMMANDS[command], "--set", override)
    assert message in error


@pytest.mark.parametrize("override", ["data.split=dev", "data.config=fr", "data.revision=main"])
def test_batches_refuse_an_unknown_part(override: str):
    with pytest.raises(prep.UsageError):
        prep.batches("recipe.toml", overrides=[override])


@pytest.mark.parametrize("command", ["tokenize", "plan"])
def test_every_command_refuses_too_long_sequences(capsys: pytest.CaptureFixture[str], command: str):
    arguments = [*COMMANDS[command], *set_keys("model.preset=gpt2", "model.init=random")]
    arguments += set_keys("model.path=", "data.tokenizer=tiny")
    error = run_failing(capsys, USAGE, *arguments, "--set", "data.seq_length=4096")
    assert "the model has 1024 positions" in error
