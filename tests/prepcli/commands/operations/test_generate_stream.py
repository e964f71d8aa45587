"""Generation that shows tokens while they are decoded, on a terminal and through the public API."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.run_cli import run_json
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, LLAMA, make_checkpoint
from tests.helpers.training_folder import write_tokenizer
from trainer.generation import generator

NEW_TOKENS = ("--max-new-tokens", "9")


class Terminal(io.StringIO):
    """A terminal that records its writes, and is interrupted after a number of them."""

    def __init__(self, interrupt_after: int = 1000) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.interrupt_after = interrupt_after

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if len(self.writes) == self.interrupt_after:
            self.interrupt_after = -1
            raise KeyboardInterrupt
        self.writes.append(text)
        return super().write(text)


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the Hugging Face models `tiny` and `t5` with a tokenizer in the current folder."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("tiny"), LLAMA)
    make_checkpoint(Path("t5"), FAMILY_CONFIGS["t5"], eos_token_id=None)
    for name in ("tiny", "t5"):
        write_tokenizer(Path(name))
    monkeypatch.setattr(generator, "MAX_STREAM_DELAY_S", 0)  # one step at a time
    return tmp_path


def open_terminal(monkeypatch: pytest.MonkeyPatch, **options: int) -> Terminal:
    """Replace stdout by a terminal."""
    terminal = Terminal(**options)
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


@pytest.mark.parametrize(("name", "prompt"), [("tiny", "w3 w1"), ("t5", "w3 w1")])
def test_one_prompt_streams_to_a_terminal(
    name: str,
    prompt: str,
    work_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    (text,) = run_json(capsys, "generate", name, "--prompt", prompt, *NEW_TOKENS)["texts"]
    terminal = open_terminal(monkeypatch)
    assert main(["generate", name, "--prompt", prompt, *NEW_TOKENS]) == 0
    assert terminal.getvalue() == text + "\n"
    assert [piece for piece in terminal.writes if piece.strip()] == [
        piece if index == 0 and name == "t5" else f" {piece}"
        for index, piece in enumerate(text.split())
    ]


def test_token_ids_stream_without_tokenizer(work_dir: Path, monkeypatch: pytest.MonkeyPatch):
    Path("tiny/tokenizer.json").unlink()
    terminal = open_terminal(monkeypatch)
    assert main(["generate", "tiny", "--tokens", "3,1", *NEW_TOKENS]) == 0
    assert len(terminal.writes) > 9
    assert len(terminal.getvalue().strip().split(",")) == 9


def test_several_prompts_print_one_line_each(work_dir: Path, monkeypatch: pytest.MonkeyPatch):
    terminal = open_terminal(monkeypatch)
    assert main(["generate", "tiny", "--prompt", "w3", "--prompt", "w1", *NEW_TOKENS]) == 0
    assert len(terminal.getvalue().splitlines()) == 2


def test_interrupt_keeps_printed_text(work_dir: Path, monkeypatch: pytest.MonkeyPatch):
    terminal = open_terminal(monkeypatch, interrupt_after=3)
    assert main(["generate", "tiny", "--prompt", "w3 w1", *NEW_TOKENS]) == 130
    assert terminal.getvalue() == "".join(terminal.writes)
    assert terminal.getvalue().endswith("\n")
    assert len(terminal.getvalue().split()) == 3


def test_api_passes_on_new_tokens_of_each_prompt(work_dir: Path):
    received: list[prep.NewTokens] = []
    prompts = ["w3 w1", "w5", "w1 w1"]
    result = prep.generate(
        "tiny", prompts, max_new_tokens=5, batch_size=2, on_tokens=received.append
    )
    assert result.tokens == prep.generate("tiny", prompts, max_new_tokens=5, batch_size=2).tokens
    for prompt, (text, tokens) in enumerate(zip(result.texts, result.tokens)):
        parts = [new for new in received if new.prompt == prompt]
        assert "".join(part.text for part in parts) == text
        assert tuple(token for part in parts for token in part.tokens) == tokens
        assert len(parts) == 5


def test_api_returns_no_texts_without_tokenizer(work_dir: Path):
    Path("tiny/tokenizer.json").unlink()
    received: list[prep.NewTokens] = []
    result = prep.generate("tiny", tokens=[[3, 1]], max_new_tokens=2, on_tokens=received.append)
    assert result.texts == (None,)
    assert "".join(new.text for new in received) == ",".join(map(str, result.tokens[0]))
