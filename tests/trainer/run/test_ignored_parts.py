"""Parts of conversations without effect on the tokens: every command that reads the data counts them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from prepcli.core.observer import SilentObserver
from tests.helpers.training_folder import RECIPE, make_training_folder

EOS = "w2"
# The next role ends a turn, as in GLM-4.
TEMPLATE = """\
{%- for message in messages %}
    {{- 'w3 ' if message.role == 'user' else 'w4 ' }}{{ message.content + ' ' }}END
{%- endfor %}
{%- if add_generation_prompt %}{{ 'w4 ' }}{% endif %}
"""
TOOLS = [{"type": "function", "function": {"name": "sum"}}]
NOTES = {
    "tools": "2 conversations have `tools` that the chat template does not show",
    "reasoning": "1 turn of the assistant has reasoning that the template leaves out",
    "stop": "10 conversations have no loss on a token that ends a text",
}


@dataclass(frozen=True)
class Notes(SilentObserver):
    """An observer that keeps notes."""

    lines: list[str] = field(default_factory=list)

    def note(self, text: str, level: int = 0) -> None:
        self.lines.append(text)


def turn(role: str, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": "w7 w8 w9", **keys}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    rows: list[dict[str, Any]] = [
        {
            "messages": [turn("user", weight=0), turn("assistant", reasoning_content="w1")],
            "tools": TOOLS,
        },
        {"messages": [turn("user"), turn("assistant", weight=0), turn("assistant", weight=1)]},
        {"messages": [turn("user"), turn("assistant", train=False)], "tools": TOOLS},
        {"messages": [turn("user"), turn("assistant", loss=False), turn("user")], "tools": None},
        *[{"messages": [turn("user"), turn("assistant")], "tools": []}] * 8,
    ]
    for index in range(2):
        part = rows[6 * index : 6 * index + 6]
        Path(f"{index}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    text = RECIPE.replace('path = "text.txt"', 'path = "*.jsonl"\nformat = "chat"')
    text = text.replace('type = "text"', 'type = "json"').replace("holdout = 0.1\n", "")
    Path("recipe.toml").write_text(text.replace('"tiny-init"', '"tiny"'))
    write_template("")


def write_template(end: str) -> None:
    """Write a template that ends each turn with a text, and let `w2` end generated texts."""
    template = TEMPLATE.replace("END", end and f"{{{{ '{end} ' }}}}")
    Path("tiny/chat_template.jinja").write_text(template)
    Path("tiny/generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))


def count_notes(log: str) -> dict[str, int]:
    return {name: log.count(note) for name, note in NOTES.items()}


def test_every_command_counts_ignored_parts(capsys: pytest.CaptureFixture[str]):
    once = dict.fromkeys(NOTES, 1)
    for process in ("2/1", "2/0"):
        capsys.readouterr()
        assert main(["tokenize", "recipe.toml", "--processes", process]) == OK
    assert count_notes(capsys.readouterr().err) == once
    # The tokens are in the cache now.
    assert main(["train", "recipe.toml", "--set", "train.steps=1"]) == OK
    assert count_notes(capsys.readouterr().err) == once
    notes = Notes()
    prep.batches("recipe.toml", out="other", progress=notes)
    assert count_notes("\n".join(notes.lines)) == once


def test_stop_token_with_loss_is_no_note():
    write_template(EOS)
    notes = Notes()
    prep.batches("recipe.toml", progress=notes)
    assert count_notes("\n".join(notes.lines)) == {"tools": 1, "reasoning": 1, "stop": 0}
