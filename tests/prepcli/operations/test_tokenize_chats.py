"""`prep tokenize` of conversations in files that people have: what is read, skipped and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prepcli.cli.main import main
from prepcli.errors import FAILED, OK
from tests.helpers.tiny_checkpoints import LLAMA
from tests.helpers.training_folder import RECIPE, make_training_folder
from tests.trainer.data.test_chat import CHATML, write_tokenizer

USER = {"role": "user", "content": "Hello there"}
ANSWER = {"role": "assistant", "content": "it is the end"}
HUMAN = {"from": "human", "value": "Hello there"}
GPT = {"from": "gpt", "value": "it is the end"}
NAMES_FILE = "`--set data.chat_template=chat_template.jinja` names one"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a model, a tokenizer with a chat template and a recipe in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder({**LLAMA, "vocab_size": 320})
    write_tokenizer(Path("tok"), CHATML)
    data = 'tokenizer = "tok"\npath = "rows.jsonl"'
    recipe = RECIPE.replace('type = "text"\npath = "text.txt"', data)
    Path("recipe.toml").write_text(recipe.replace("holdout = 0.1\n", ""))


def write_rows(*rows: Any) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenize(capsys: pytest.CaptureFixture[str], *words: str, code: int = OK) -> tuple[str, str]:
    """Run `prep tokenize`, and return its results and its messages."""
    capsys.readouterr()
    assert main(["tokenize", "recipe.toml", *words]) == code
    output = capsys.readouterr()
    return output.out, output.err


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"messages": [USER, ANSWER]}, NAMES_FILE),
        ({"conversations": [HUMAN, GPT]}, NAMES_FILE),
        (
            {"instruction": "Hello", "input": "there", "output": "it is the end of the time"},
            f"{NAMES_FILE}; `--set data.format=text` `--set data.fields='[instruction+input], output'`"
            " reads the columns as plain texts",
        ),
    ],
    ids=["messages", "sharegpt", "alpaca"],
)
def test_base_tokenizer_leads_to_both_ways_out(
    row: dict[str, Any], hint: str, capsys: pytest.CaptureFixture[str]
):
    write_rows(row, row)
    write_tokenizer(Path("tok"), "", chat_template=None)
    _, messages = tokenize(capsys, code=FAILED)
    assert "error: the tokenizer in tok has no chat template\n" in messages
    assert messages.endswith(f" hint: {hint}\n")
    # Both ways lead to tokens.
    Path("chat_template.jinja").write_text(CHATML)
    shown, _ = tokenize(capsys, "--set", "data.chat_template=chat_template.jinja", "--show", "1")
    assert "⟦it is the end" in shown
    if "instruction" in row:
        words = ("data.format=text", "data.fields=[instruction+input], output")
        shown, _ = tokenize(capsys, "--set", words[0], "--set", words[1], "--show", "1")
        assert "Hello there⟦it is the end of the time<s>⟧" in shown
