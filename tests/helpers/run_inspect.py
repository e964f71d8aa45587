"""Functions that run `prep inspect`, and configs of small models for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint

SMALL_GPT_NEO = GPT_NEO | {
    "vocab_size": 13,
    "hidden_size": 8,
    "num_heads": 2,
    "max_position_embeddings": 6,
}
SMALL_LLAMA = LLAMA | {
    "vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip

Capture = pytest.CaptureFixture[str]


def inspect_lines(capsys: Capture, *args: str) -> list[str]:
    """Run `prep inspect` and return the lines of stdout."""
    assert main(["inspect", *args, "-q"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def inspect_json(capsys: Capture, *args: str, code: int = 0) -> dict[str, Any]:
    """Run `prep inspect` and return its JSON."""
    assert main(["inspect", *args, "--json", "-q"]) == code
    return json.loads(capsys.readouterr().out)


def inspect_failing(capsys: Capture, *args: str) -> tuple[int, str]:
    """Run a failing `prep inspect` without output to stdout; return the exit code and stderr."""
    code = main(["inspect", *args])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


def make_model_and_init(
    capsys: Capture, config: dict[str, Any], *options: str
) -> dict[str, np.ndarray]:
    """Make a model `model` and its init `init`; return the model's tensors."""
    tensors = make_checkpoint(Path("model"), config, files=1)
    assert main(["save-init", "model", "--out", "init", "-q", *options]) == 0
    capsys.readouterr()
    return tensors
